"""Does our quantising copy give what vLLM's own steps give? Each kind of layer is tried once, on a copy of the layer.

Form tells where a live weight and its scales are, not how they were made: kernels may shuffle elements, or quantise
anew with scales of another kind. So a stand-in with random weights goes through vLLM's step after loading (for an
engine whose checkpoint is quantised, after our quantiser's first step, as its checkpoint would hold it), and a rule
counts only if our copy gives the same bits, weight and scales.

Note "rare bits". A reciprocal that differs by one unit in the last place changes about two elements of a million, so a
small layer is tried many times, with other weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from reshard.dtype import DType
from reshard.quant import QuantMode
from reshard.torch_layout import dtype_of, torch_dtype
from reshard.vllm.after_loading import FAILURES, as_bits, kind_of_layer, method_of, random_bits, run_step
from reshard.vllm.quantised import SCALES, QuantRule
from reshard.vllm.quantiser import Quantiser

_TRIED_ELEMENTS = {"cuda": 1 << 25, "cpu": 1 << 16}
"""How many elements of each weight are tried at least; vLLM's own kernels, whose rare bits these are, run on a GPU."""
_BLOCKS: tuple[QuantMode, ...] = ("blocks", "blocks_ue8m0")
_Way = tuple[QuantMode, bool]
"""Mode and division of a quantising copy."""
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
    known: dict[object, dict[str, _Way] | str] = {}
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
        ways = known[kind]
        if isinstance(ways, str):
            reasons |= dict.fromkeys((f"{name}.{leaf}" for leaf in own), ways)
        else:
            for leaf, rule in own.items():
                mode, full_division = ways[leaf]
                held[f"{name}.{leaf}"] = replace(rule, mode=mode, full_division=full_division)
    return held, reasons


def _tried(layer: _Layer) -> dict[str, _Way] | str:
    """How every weight of a layer is quantised; or why our copy can't do it."""
    device = next(iter(layer.module.parameters())).device
    left = {leaf: _candidates(layer, leaf, rule) for leaf, rule in layer.rules.items()}
    smallest = min(math.prod(rule.shape) for rule in layer.rules.values())
    for seed in range(math.ceil(_TRIED_ELEMENTS.get(device.type, 1) / smallest)):
        full = {leaf: _random(rule, device, seed) for leaf, rule in layer.rules.items()}
        try:
            given = _inputs(layer, full, device)
            after = run_step(layer.module, given, layer.method)
        except FAILURES as error:
            return f"its layer can't be tried: {type(error).__name__}: {error}"
        if moved := _moved(layer, given, after):
            return f"the engine moved elements of {moved} after loading, though its form is the same"
        for leaf, rule in layer.rules.items():
            left[leaf] = [way for way in left[leaf] if _is_same(layer, rule, way, full[leaf], after)]
            if not left[leaf]:
                return f"our quantising copy gives other bits than {type(layer.method).__name__} for {leaf}"
    return {leaf: ways[0] for leaf, ways in left.items()}


def _candidates(layer: _Layer, leaf: str, rule: QuantRule) -> list[_Way]:
    """What may have been done to a weight, likelier ways first: what quantises at load time is compiled by Triton."""
    if rule.mode == "rows":
        return [("rows", False)]
    divisions = (False,) if dtype_of(layer.as_loaded[leaf].dtype) is DType.FLOAT8_E4M3FN else (True, False)
    return [(mode, division) for mode in _BLOCKS for division in divisions]


def _moved(layer: _Layer, given: Tensors, after: Tensors) -> str | None:
    """A parameter without a rule that the step changed."""
    ruled = set(layer.rules) | {_leaf(rule.scale.storage) for rule in layer.rules.values()}
    for name in set(given) - ruled:
        if name not in after or not torch.equal(as_bits(after[name]), as_bits(given[name])):
            return name
    return None


def _is_same(layer: _Layer, rule: QuantRule, way: _Way, full: torch.Tensor, after: Tensors) -> bool:
    """Whether our copy gives the weight and the scales that the step gave, in the form of the live ones."""
    names = {_leaf(rule.weight.storage): rule.weight.storage, _leaf(rule.scale.storage): rule.scale.storage}
    for name in names:
        live = layer.module.get_parameter(name)
        if name not in after or (after[name].shape, after[name].stride()) != (live.shape, live.stride()):
            return False
    mine = {name: torch.zeros_like(after[name]) for name in names}
    storages = {names[name]: tensor for name, tensor in mine.items()} | {rule.staged: full}
    tried = replace(rule, mode=way[0], full_division=way[1])
    Quantiser(tried.entries(storages), full.device).run()
    return all(torch.equal(as_bits(mine[name]), as_bits(after[name])) for name in names)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


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


def _random(rule: QuantRule, device: torch.device, seed: int) -> torch.Tensor:
    """Weights in which each row and each group have magnitudes of their own."""
    generator = torch.Generator(device="cpu").manual_seed(seed * 1_000_003 + sum(rule.shape))
    rows = torch.randn(rule.shape[:-1], generator=generator).exp().unsqueeze(-1).to(device)
    values = torch.empty(rule.shape, dtype=torch.float32, device=device)
    for matrix, scale in zip(_matrices(values), _matrices(rows), strict=True):
        noise = torch.randn(min(matrix.numel(), 1 << 20), generator=generator).to(device)
        repeated = noise.repeat(-(-matrix.numel() // noise.numel()))[: matrix.numel()]
        matrix.copy_(repeated.view(matrix.shape) * scale * 0.05)
    return values.to(torch_dtype(rule.dtype))


def _matrices(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor] if tensor.dim() == 2 else list(tensor.unbind())
