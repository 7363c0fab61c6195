"""Rules for parameters that vLLM holds in float8: what its own methods make of a weight, our quantising copy makes too.

The methods run here without a GPU's kernel: quantising, transposing and naming are theirs, a kernel adds nothing.
"""

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.quantization.online import fp8

from reshard import _C
from reshard.quant import make_quant_table
from reshard.vllm.quantised import STAGED, find_rules

METHODS = {"blocks": fp8.Fp8PerBlockOnlineLinearMethod, "rows": fp8.Fp8PtpcOnlineLinearMethod}


class NoKernel:
    """In place of a GPU's kernel."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Takes weights as they are."""


def weights(rows: int, columns: int) -> torch.Tensor:
    """Each group of 128 x 128, and each row, has a scale that is a power of two of its own, exact in any arithmetic."""
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randint(-7, 8, (rows, columns), generator=generator).float()
    values[:, ::128] = 448.0
    down, across = torch.arange(rows) // 128, torch.arange(columns) // 128
    exponent = (down[:, None] * 3 + across[None, :] * 5) % 11 - 5
    return (values * 2.0**exponent).to(torch.bfloat16)


def after_vllm(weight: torch.Tensor, mode: str, monkeypatch) -> dict[str, torch.Tensor]:
    """The live tensors of a layer that vLLM quantised."""
    monkeypatch.setattr(fp8, "expose_input_quant_key", lambda layer, kernel: None, raising=False)
    method = object.__new__(METHODS[mode])
    sources = {"requantization_source": None, "requantization_source_parameters": {}}
    method.__dict__.update(weight_block_size=[128, 128], fp8_linear=NoKernel(), **sources)
    layer = nn.Module()
    layer.tp_size = 1
    layer.input_size = layer.input_size_per_partition = weight.shape[1]
    layer.output_size = layer.output_size_per_partition = weight.shape[0]
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    with torch.compiler.set_stance("force_eager"):
        method.process_weights_after_loading(layer)
    return {f"layer.{name}": parameter.data for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("mode", METHODS)
@pytest.mark.parametrize(("rows", "columns"), [(384, 256), (200, 328), (8 * 1856, 128), (96, 64)])
def test_a_rule_fills_live_tensors_as_vllm_does(rows, columns, mode, monkeypatch):
    """8 groups of 1856 rows end within blocks: scales follow the rows of the whole fused parameter."""
    weight = weights(rows, columns)
    live = after_vllm(weight, mode, monkeypatch)
    rules, reasons = find_rules(["layer.weight"], {"layer.weight": weight.to("meta")}, live)
    rule = rules["layer.weight"]
    assert (reasons, rule.mode, rule.shape) == ({}, mode, (rows, columns))
    wanted = {name: tensor.clone() for name, tensor in live.items()}
    for tensor in live.values():
        tensor.zero_()
    _C.quantize_host(make_quant_table(rule.entries({**live, STAGED + "layer.weight": weight})), 1)
    assert all(torch.equal(live[name].float(), wanted[name].float()) for name in wanted)


def test_experts_are_quantised_one_by_one(monkeypatch):
    stack = torch.stack([weights(256, 384) * 2.0**expert for expert in range(3)])
    parts = [after_vllm(expert, "blocks", monkeypatch) for expert in stack]
    live = {
        "w13_weight": torch.stack([part["layer.weight"].view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn),
        "w13_weight_scale_inv": torch.stack([part["layer.weight_scale_inv"] for part in parts]),
    }
    rule = find_rules(["w13_weight"], {"w13_weight": stack.to("meta")}, live)[0]["w13_weight"]
    wanted = {name: tensor.float() for name, tensor in live.items()}
    for tensor in live.values():
        tensor.zero_()
    entries = rule.entries({**live, STAGED + "w13_weight": stack})
    assert len(entries) == 3
    _C.quantize_host(make_quant_table(entries), 1)
    assert all(torch.equal(live[name].float(), wanted[name]) for name in wanted)


def forms(**tensors: tuple[tuple[int, ...], torch.dtype]) -> dict[str, torch.Tensor]:
    return {name.replace("__", "."): torch.empty(s, dtype=t, device="meta") for name, (s, t) in tensors.items()}


F8, F32, BF16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16


def test_square_matrices_are_read_as_others_of_their_kind_or_not_at_all():
    loaded = forms(a__weight=((256, 256), BF16), b__weight=((384, 256), BF16))
    live = forms(a__weight=((256, 256), F8), a__weight_scale_inv=((2, 2), F32))
    rules, reasons = find_rules(["a.weight"], loaded, live)
    assert rules == {} and "does not settle how it is quantised" in reasons["a.weight"]
    live |= forms(b__weight=((384, 256), F8), b__weight_scale_inv=((3, 2), F32))
    rules, reasons = find_rules(["a.weight", "b.weight"], loaded, live)
    assert reasons == {} and rules["a.weight"].weight.strides == (256, 1)
    live["b.weight"] = torch.empty((256, 384), dtype=F8, device="meta")
    live["b.weight_scale_inv"] = torch.empty((2, 3), dtype=F32, device="meta")
    rules, _ = find_rules(["a.weight", "b.weight"], loaded, live)
    assert rules["a.weight"].weight.strides == (1, 256) and rules["a.weight"].scale.strides == (1, 2)


@pytest.mark.parametrize(
    ("live", "reason"),
    [
        (forms(a__weight=((96, 64), F8), a__weight_scale=((1,), F32)), "fit no known grouping"),
        (forms(a__weight=((96, 64), F8)), "it has no float32 scales"),
        (forms(a__weight=((96, 64), torch.int32)), "it is no float8_e4m3fn matrix"),
        (forms(a__weight=((48, 128), F8), a__weight_scale=((96, 1), F32)), "fit no known grouping"),
        ({}, "it is no float8_e4m3fn matrix"),
    ],
)
def test_other_forms_have_no_rule_and_a_reason(live, reason):
    rules, reasons = find_rules(["a.weight"], forms(a__weight=((96, 64), BF16)), live)
    assert rules == {} and reason in reasons["a.weight"]
