"""The layout of a vLLM engine's rank, learnt from its own loader on the meta device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from vllm.config import VllmConfig

from reshard.dtype import DType
from reshard.layout import Layout, TensorSpec
from reshard.loader_layout import LoadWeights, trace_loader
from reshard.vllm.after_loading import moved_elements
from reshard.vllm.meta_model import isolated, meta_model
from reshard.vllm.quantised import QuantRule, find_rules
from reshard.vllm.quantised_check import checked_rules

_FLOAT8 = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """What one rank of an engine holds and where.

    Attributes:
        layout: regions of the checkpoint's tensors in the engine's parameters, by the parameters' own names.
        unread: checkpoint tensors that this rank's loader does not use.
        unwritten: parameters that the loader never fills.
        opaque: parameters that ``layout`` can't describe, each with the reason; they need the engine's own reload path.
        sources: per parameter, the checkpoint tensors that its loader needs, opaque ones included.
        quantised: parameters that the engine holds in float8, by name, each with the rule that fills it. ``layout`` has
            them in full precision, in the rule's staged storage. Empty unless asked for: then they count as opaque.
        serialised: opaque parameters that the engine's own checkpoint holds quantised: no loader makes them from full
            precision.
        derived: tensors that the engine computed from its parameters after loading and that are no parameters
            themselves (``module.attribute``): stale once the parameters change, until the engine computes them anew.
    """

    layout: Layout
    unread: tuple[str, ...]
    unwritten: tuple[str, ...]
    opaque: Mapping[str, str]
    sources: Mapping[str, tuple[str, ...]]
    quantised: Mapping[str, QuantRule]
    serialised: tuple[str, ...]
    derived: tuple[str, ...]


def learn_layout(
    vllm_config: VllmConfig,
    checkpoint: Iterable[TensorSpec],
    *,
    rank: int,
    live: nn.Module | None = None,
    memory: str | None = None,
    quantised: bool = False,
) -> EngineLayout:
    """The layout of the engine's rank that this process is, or would be; ``rank`` is its number in the Layout.

    ``checkpoint`` are the tensors that the loader would get (``reshard.vllm.checkpoint``); without float8 among them,
    the loader is that of the same model in full precision. With ``live``, the engine's own model, parameters that vLLM
    replaced, moved or repacked after loading come out opaque, each with what differs. With ``quantised``, those that
    it holds in float8 in a known way, proved on vLLM's own step, are described by rules instead.
    """
    specs = list(checkpoint)
    twin = meta_model(vllm_config, quantised=any(spec.dtype in _FLOAT8 for spec in specs))
    targets = _targets(twin)
    with isolated(vllm_config):
        trace = trace_loader(_loader(twin), specs, targets, rank=rank, memory=memory)
    reasons = dict.fromkeys(trace.layout.opaque(rank), "its loader computes it from the checkpoint")
    rules: dict[str, QuantRule] = {}
    serialised: tuple[str, ...] = ()
    if live is not None:
        now = _targets(live)
        differ = _differences(targets, now)
        as_loaded = twin if vllm_config.quant_config is None else meta_model(vllm_config)
        if quantised:
            held = {name for name in differ if name in now and now[name].dtype == torch.float8_e4m3fn}
            rules, whys = find_rules(sorted(held - reasons.keys()), targets, now)
            rules, failed = checked_rules(rules, as_loaded, live)
            whys |= failed
            partly = {name.rpartition(".")[0] for name in {*differ, *reasons} if name not in rules}
            whys |= {n: "another parameter of its layer has no rule" for n, r in rules.items() if r.module in partly}
            rules = {name: rule for name, rule in rules.items() if rule.module not in partly}
            differ = {n: f"{r}; {whys[n]}" if n in whys else r for n, r in differ.items() if n not in rules}
        reasons |= moved_elements(twin, live, skip={rule.module for rule in rules.values()}) | differ
        serialised = _serialised(reasons, targets, _targets(as_loaded))
    parameters = {name for name, _ in twin.named_parameters()}
    return EngineLayout(
        layout=_settled(trace.layout, rank, reasons, rules) if reasons or rules else trace.layout,
        unread=trace.unread,
        unwritten=tuple(name for name in trace.unwritten if name in parameters),
        opaque=dict(sorted(reasons.items())),
        sources=trace.sources,
        quantised=rules,
        serialised=serialised,
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


def _serialised(
    names: Iterable[str], loaded: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Those of ``names`` that the engine's ``own`` checkpoint has in another form than one in full precision."""
    return tuple(n for n in names if n in loaded and (n not in own or own[n].dtype != loaded[n].dtype))


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


def _settled(layout: Layout, rank: int, opaque: Mapping[str, str], rules: Mapping[str, QuantRule]) -> Layout:
    """The layout without holdings in opaque storages, and with staged storages in place of quantised ones."""
    staged = {name: rule.staged for name, rule in rules.items()}
    holdings = [
        replace(h, address=replace(h.address, storage=staged.get(h.address.storage, h.address.storage)))
        for h in layout.holdings(rank)
        if h.address.storage not in opaque
    ]
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
