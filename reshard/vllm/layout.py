"""The layout of a vLLM engine's rank, learnt from its own loader on the meta device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from vllm.config import VllmConfig

from reshard.layout import Layout, TensorSpec
from reshard.loader_layout import LoadWeights, trace_loader
from reshard.vllm.after_loading import moved_elements
from reshard.vllm.meta_model import isolated, meta_model


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """What one rank of an engine holds and where.

    Attributes:
        layout: regions of the checkpoint's tensors in the engine's parameters, by the parameters' own names.
        unread: checkpoint tensors that this rank's loader does not use.
        unwritten: parameters that the loader never fills.
        opaque: parameters that ``layout`` can't describe, each with the reason; they need the engine's own reload path.
        sources: per parameter, the checkpoint tensors that its loader needs, opaque ones included.
        derived: tensors that the engine computed from its parameters after loading and that are no parameters
            themselves (``module.attribute``): stale once the parameters change, until the engine computes them anew.
    """

    layout: Layout
    unread: tuple[str, ...]
    unwritten: tuple[str, ...]
    opaque: Mapping[str, str]
    sources: Mapping[str, tuple[str, ...]]
    derived: tuple[str, ...]


def learn_layout(
    vllm_config: VllmConfig,
    checkpoint: Iterable[TensorSpec],
    *,
    rank: int,
    live: nn.Module | None = None,
    memory: str | None = None,
) -> EngineLayout:
    """The layout of the engine's rank that this process is, or would be; ``rank`` is its number in the Layout.

    ``checkpoint`` are the tensors that the loader would get (``reshard.vllm.checkpoint``). With ``live``, the engine's
    own model, parameters that vLLM replaced or repacked after loading come out opaque, each with what differs.
    """
    twin = meta_model(vllm_config)
    targets = _targets(twin)
    with isolated(vllm_config):
        trace = trace_loader(_loader(twin), checkpoint, targets, rank=rank, memory=memory)
    reasons = dict.fromkeys(trace.layout.opaque(rank), "its loader computes it from the checkpoint")
    if live is not None:
        reasons |= moved_elements(twin, live) | _differences(targets, _targets(live))
    parameters = {name for name, _ in twin.named_parameters()}
    return EngineLayout(
        layout=_without(trace.layout, rank, reasons) if reasons else trace.layout,
        unread=trace.unread,
        unwritten=tuple(name for name in trace.unwritten if name in parameters),
        opaque=dict(sorted(reasons.items())),
        sources=trace.sources,
        derived=() if live is None else _derived(twin, live),
    )


def _loader(model: nn.Module) -> LoadWeights:
    """vLLM's models share no base class that declares the loader which all of them have."""
    load: LoadWeights = model.load_weights  # type: ignore[assignment]
    return load


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a loader may write: parameters and floating point buffers."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return {**dict(model.named_parameters()), **buffers}


def _differences(loaded: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Why the layout at load time is not the live one, by name of the parameter."""
    found = {}
    for name, tensor in loaded.items():
        if name not in live:
            found[name] = "the engine dropped it after loading"
            continue
        then, now = _form(tensor), _form(live[name])
        if then != now:
            found[name] = f"the engine changed it after loading: {then} became {now}"
    return found


def _form(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} with strides {tensor.stride()} from element {tensor.storage_offset()}"


def _without(layout: Layout, rank: int, opaque: Mapping[str, str]) -> Layout:
    """The layout with all holdings in opaque storages taken out."""
    holdings = [h for h in layout.holdings(rank) if h.address.storage not in opaque]
    used = {holding.region.name for holding in holdings}
    specs = [spec for name, spec in layout.specs.items() if name in used]
    return Layout.from_holdings(
        specs, holdings, ranks=[rank], memory=layout.memory, opaque={rank: tuple(sorted(opaque))}
    )


def _derived(twin: nn.Module, live: nn.Module) -> tuple[str, ...]:
    """Tensors that live modules hold as plain attributes and that a fresh model does not have."""
    fresh = dict(twin.named_modules())
    found = []
    for name, module in live.named_modules():
        known = vars(fresh[name]) if name in fresh else {}
        found += [
            f"{name}.{attribute}" if name else attribute
            for attribute, value in vars(module).items()
            if isinstance(value, torch.Tensor) and attribute not in known
        ]
    return tuple(sorted(found))
