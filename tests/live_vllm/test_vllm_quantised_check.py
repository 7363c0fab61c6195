"""A rule for a float8 weight counts only if vLLM's own step gives the same bits: layers that do, layers that don't."""

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from reshard.oracle import quantize_reference
from reshard.vllm.quantised import find_rules
from reshard.vllm.quantised_check import checked_rules

ROWS, COLUMNS = 320, 256


class Online(QuantizeMethodBase):
    """Quantises full precision after loading, in one of our quantiser's modes, as vLLM's methods of that kind do."""

    mode = "blocks"

    def create_weights(self, layer, *args, **kwargs):
        raise AssertionError("the layer is built by the test")

    def apply(self, layer, *args, **kwargs):
        raise AssertionError("the layer never runs")

    def quantised(self, weight):
        return quantize_reference(weight, mode=self.mode)

    def process_weights_after_loading(self, layer):
        values, scale = self.quantised(layer.weight)
        layer.weight = nn.Parameter(values, requires_grad=False)
        layer.weight_scale_inv = nn.Parameter(scale.contiguous(), requires_grad=False)


class Ue8m0(Online):
    mode = "blocks_ue8m0"


class Rows(Online):
    mode = "rows"


class Shuffled(Online):
    """Rows in another order: the form stays."""

    def quantised(self, weight):
        values, scale = super().quantised(weight)
        return values.view(torch.uint8).roll(128, 0).view(torch.float8_e4m3fn), scale


class OtherScales(Online):
    def quantised(self, weight):
        values, scale = super().quantised(weight)
        return values, scale * 1.0000002


class MovesTheBias(Online):
    def process_weights_after_loading(self, layer):
        super().process_weights_after_loading(layer)
        layer.bias.data = layer.bias.data.flip(0)


class Fails(Online):
    def process_weights_after_loading(self, layer):
        raise RuntimeError("no such kernel here")


class FromFloat8(Online):
    """The checkpoint has float8 and float32 scales; the engine wants powers of two."""

    def process_weights_after_loading(self, layer):
        assert layer.weight.dtype == torch.float8_e4m3fn and layer.weight_scale_inv.shape == (3, 2)
        spread = layer.weight_scale_inv.repeat_interleave(128, 0)[:ROWS].repeat_interleave(128, 1)
        kept = layer.weight.float() * spread
        padded = torch.zeros(384, COLUMNS)
        padded[:ROWS] = kept
        amax = padded.view(3, 128, 2, 128).abs().amax(dim=(1, 3)).clamp(min=1e-4)
        scale = (amax / 448.0).log2().ceil().exp2()
        again = scale.repeat_interleave(128, 0)[:ROWS].repeat_interleave(128, 1)
        layer.weight = nn.Parameter((kept / again).to(torch.float8_e4m3fn), requires_grad=False)
        layer.weight_scale_inv = nn.Parameter(scale, requires_grad=False)


def models(method: QuantizeMethodBase) -> tuple[nn.Module, nn.Module]:
    """The engine's model, live, and as its loader fills it, on the meta device."""
    live, as_loaded = nn.Module(), nn.Module()
    live.proj, as_loaded.proj = nn.Module(), nn.Module()
    scale_shape = (ROWS, 1) if method.mode == "rows" else (3, 2)
    live.proj.weight = parameter((ROWS, COLUMNS), torch.float8_e4m3fn)
    live.proj.weight_scale_inv = parameter(scale_shape, torch.float32)
    live.proj.bias = parameter((ROWS,), torch.bfloat16)
    live.proj.quant_method = method
    dtype = torch.float8_e4m3fn if isinstance(method, FromFloat8) else torch.bfloat16
    as_loaded.proj.weight = parameter((ROWS, COLUMNS), dtype, "meta")
    as_loaded.proj.bias = parameter((ROWS,), torch.bfloat16, "meta")
    if isinstance(method, FromFloat8):
        as_loaded.proj.weight_scale_inv = parameter(scale_shape, torch.float32, "meta")
    return live, as_loaded


def parameter(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)


def check(method: QuantizeMethodBase):
    live, as_loaded = models(method)
    full = {"proj.weight": torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="meta")}
    rules, reasons = find_rules(["proj.weight"], full, dict(live.named_parameters()))
    assert reasons == {}
    before = {name: p.clone() for name, p in live.named_parameters()}
    found = checked_rules(rules, as_loaded, live)
    assert all(torch.equal(p.float(), before[name].float()) for name, p in live.named_parameters()), "live ones stay"
    return found


@pytest.mark.parametrize("method", [Online, Ue8m0, Rows, FromFloat8])
def test_rules_hold_in_the_mode_that_gives_the_engines_bits(method):
    rules, reasons = check(method())
    assert reasons == {}
    wanted = "blocks_ue8m0" if method is FromFloat8 else method.mode
    assert rules["proj.weight"].mode == wanted
    assert rules["proj.weight"].full_division is (method in (Online, Ue8m0)), "what Triton compiles comes first"


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Shuffled, "our quantising copy gives other bits than Shuffled for weight"),
        (OtherScales, "our quantising copy gives other bits than OtherScales for weight"),
        (MovesTheBias, "the engine moved elements of bias after loading"),
        (Fails, "its layer can't be tried: RuntimeError: no such kernel here"),
    ],
)
def test_layers_that_do_otherwise_have_no_rule_and_a_reason(method, words):
    rules, reasons = check(method())
    assert rules == {} and words in reasons["proj.weight"]
