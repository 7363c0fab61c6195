"""Does our quantising copy give what vLLM's own steps give? Each kind of layer is tried once, on a copy of the layer.

Form tells where a live weight and its scales are, not how they were made: kernels may shuffle elements, or quantise
anew with scales of another kind. So a stand-in with random weights goes through vLLM's step after loading (for an
engine whose checkpoint is quantised, after our quantiser's first step, as its checkpoint would hold it), and a rule
counts only if our copy gives the same bits, weight and scales.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from reshard.dtype import DType
from reshard.quant import QuantMode
from reshard.torch_layout import dtype_of
from reshard.vllm.after_loading import FAILURES, as_bits, kind_of_layer, method_of, random_bits, run_step
from reshard.vllm.quantised import SCALES, QuantRule
from reshard.vllm.quantiser import Quantiser

_CANDIDATES: Mapping[QuantMode, tuple[QuantMode, ...]] = {"blocks": ("blocks", "blocks_ue8m0"), "rows": ("rows",)}
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A live layer, its parameters as its loader fills them, and the rules of its weights, by their short names."""

    module: nn.Module
    method: QuantizeMethodBase
    as_loaded: Tensors
    rules: Mapping[str, QuantRule]


def checked_rules(
    rules: Mapping[str, QuantRule], as_loaded: nn.Module, live: nn.Module
) -> tuple[dict[str, QuantRule], dict[str, str]]:
    """The rules that hold, each in the mode that does, and the reasons why the others don't, by parameter.

    ``as_loaded`` is the engine's model on the meta device as its own checkpoint fills it. A layer's rules hold together
    or not at all, and only if what else the layer holds stays as loaded. Needs memory for one layer more, in full
    precision, on the live parameters' device. Live tensors are not touched.
    """
    of_module: dict[str, dict[str, QuantRule]] = {}
    for name, rule in rules.items():
        of_module.setdefault(rule.module, {})[name.rpartition(".")[2]] = rule
    modules, fresh = dict(live.named_modules()), dict(as_loaded.named_modules())
    known: dict[object, dict[str, QuantMode] | str] = {}
    held: dict[str, QuantRule] = {}
    reasons: dict[str, str] = {}
    for name, own in of_module.items():
        method = method_of(modules[name])
        if not isinstance(method, QuantizeMethodBase):
            reasons |= {f"{name}.{leaf}": "vLLM has no method for its layer that could be tried" for leaf in own}
            continue
        kind = kind_of_layer(modules[name], method), tuple(sorted(own))
        if kind not in known:
            inputs = {leaf: p.detach() for leaf, p in fresh[name].named_parameters(recurse=False)}
            known[kind] = _tried(_Layer(modules[name], method, inputs, own))
        modes = known[kind]
        if isinstance(modes, str):
            reasons |= dict.fromkeys((f"{name}.{leaf}" for leaf in own), modes)
        else:
            held |= {f"{name}.{leaf}": replace(rule, mode=modes[leaf]) for leaf, rule in own.items()}
    return held, reasons


def _tried(layer: _Layer) -> dict[str, QuantMode] | str:
    """The mode of every weight of a layer; or why there is none."""
    device = next(iter(layer.module.parameters())).device
    full = {leaf: _random(rule, device) for leaf, rule in layer.rules.items()}
    try:
        given = _inputs(layer, full, device)
        after = run_step(layer.module, given, layer.method)
    except FAILURES as error:
        return f"its layer can't be tried: {type(error).__name__}: {error}"
    modes: dict[str, QuantMode] = {}
    touched = set()
    for leaf, rule in layer.rules.items():
        scale = rule.scale.storage.rpartition(".")[2]
        touched |= {leaf, scale}
        mode = _mode(layer, rule, full[leaf], after, leaf, scale)
        if mode is None:
            return f"our quantising copy gives other bits than {type(layer.method).__name__} for {leaf}"
        modes[leaf] = mode
    for name in set(given) - touched:
        if name not in after or not torch.equal(as_bits(after[name]), as_bits(given[name])):
            return f"the engine moved elements of {name} after loading, though its form is the same"
    return modes


def _mode(
    layer: _Layer, rule: QuantRule, full: torch.Tensor, after: Tensors, leaf: str, scale: str
) -> QuantMode | None:
    """The mode in which our copy gives the bits that the step gave."""
    for name in (leaf, scale):
        live = layer.module.get_parameter(name)
        if name not in after or (after[name].shape, after[name].stride()) != (live.shape, live.stride()):
            return None
    for mode in _CANDIDATES[rule.mode]:
        mine = {name: torch.zeros_like(after[name]) for name in (leaf, scale)}
        storages = {rule.weight.storage: mine[leaf], rule.scale.storage: mine[scale], rule.staged: full}
        Quantiser(replace(rule, mode=mode).entries(storages), full.device).run()
        if all(torch.equal(as_bits(mine[name]), as_bits(after[name])) for name in mine):
            return mode
    return None


def _inputs(layer: _Layer, full: Tensors, device: torch.device) -> dict[str, torch.Tensor]:
    """What the step is given: the layer's parameters as its loader would have filled them."""
    given: dict[str, torch.Tensor] = {}
    for leaf, parameter in layer.as_loaded.items():
        if leaf in full:
            continue
        given[leaf] = random_bits(parameter, device)
    for leaf, values in full.items():
        loaded = layer.as_loaded[leaf]
        if dtype_of(loaded.dtype) is not DType.FLOAT8_E4M3FN:
            given[leaf] = values
            continue
        scales = [leaf + ending for ending in SCALES if leaf + ending in layer.as_loaded]
        rule = layer.rules[leaf]
        if tuple(loaded.shape) != rule.shape or len(scales) != 1:
            raise ValueError(f"its checkpoint holds {leaf} as {list(loaded.shape)} with scales {scales}")
        given |= _quantised_once(leaf, scales[0], layer.as_loaded, rule, values)
    return given


def _quantised_once(
    leaf: str, scale: str, as_loaded: Tensors, rule: QuantRule, values: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A weight and its scales as a checkpoint in float8 has them."""
    made = {
        name: torch.zeros(as_loaded[name].shape, dtype=as_loaded[name].dtype, device=values.device)
        for name in (leaf, scale)
    }
    plain = replace(
        rule,
        weight=replace(rule.weight, offset=0, strides=made[leaf].stride()),
        scale=replace(rule.scale, offset=0, strides=made[scale].view(rule.scale_shape).stride()),
    )
    storages = {plain.weight.storage: made[leaf], plain.scale.storage: made[scale], plain.staged: values}
    Quantiser(plain.entries(storages), values.device).run()
    return made


def _random(rule: QuantRule, device: torch.device) -> torch.Tensor:
    """Weights in which each row and each group have magnitudes of their own."""
    generator = torch.Generator(device="cpu").manual_seed(sum(rule.shape))
    rows = torch.randn(rule.shape[:-1], generator=generator).exp().unsqueeze(-1).to(device)
    values = torch.empty(rule.shape, dtype=torch.float32, device=device)
    for matrix, scale in zip(_matrices(values), _matrices(rows), strict=True):
        noise = torch.randn(min(matrix.numel(), 1 << 20), generator=generator).to(device)
        repeated = noise.repeat(-(-matrix.numel() // noise.numel()))[: matrix.numel()]
        matrix.copy_(repeated.view(matrix.shape) * scale * 0.05)
    return values.to(torch.bfloat16 if rule.dtype is DType.BFLOAT16 else torch.float16)


def _matrices(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor] if tensor.dim() == 2 else list(tensor.unbind())
