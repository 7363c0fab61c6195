"""Quantising copies on the host: e4m3 rounding of every kind, scales, shapes that end within a block, refusals."""

import math

import numpy as np
import pytest
import torch
from copy_cases import assert_same_bytes, rounding_edges
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import _C
from reshard.errors import PlanError
from reshard.oracle import quantize_reference
from reshard.quant import MODES, QUANT_RECORD, QuantEntry, make_quant_table, scale_shape

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quantized(values: torch.Tensor, mode: str, *, through_bf16: bool = True, threads: int = 2):
    dst = torch.zeros(values.shape, dtype=torch.float8_e4m3fn)
    scale = torch.zeros(scale_shape(*values.shape, mode))
    entry = QuantEntry(src=values, dst=dst, scale=scale, mode=mode, through_bf16=through_bf16)
    _C.quantize_host(make_quant_table([entry]), threads)
    return dst, scale


def assert_as_reference(values: torch.Tensor, mode: str, *, through_bf16: bool = True) -> None:
    dst, scale = quantized(values, mode, through_bf16=through_bf16)
    expected, expected_scale = quantize_reference(values, mode=mode, through_bf16=through_bf16)
    assert_same_bytes(scale, expected_scale, what=f"scales of {mode}")
    assert_same_bytes(dst, expected, what=f"values of {mode}")


def test_record_is_128_bytes():
    assert QUANT_RECORD.itemsize == 128
    assert QUANT_RECORD.fields["src_dtype"][1] == 88


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from(DTYPES),
    st.sampled_from(MODES),
    st.booleans(),
    st.integers(-8, 8),
)
def test_random_matrices_equal_the_reference(rows, columns, dtype, mode, through_bf16, exponent):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    values = (torch.randn(rows, columns, generator=generator) * 2.0**exponent).to(dtype)
    assert_as_reference(values, mode, through_bf16=through_bf16)


@pytest.mark.parametrize("mode", MODES)
def test_every_rounding_edge_of_e4m3(mode: str):
    """A scale of exactly one: every fp16-range float around every e4m3 value and midpoint, both signs."""
    values = rounding_edges()
    values = values[values.abs() <= 448][: 5000 * 128].unique()
    magnitudes = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    near = torch.cat([torch.nextafter(x, torch.full_like(x, y)) for x in (magnitudes, middles) for y in (0.0, 500.0)])
    edges = torch.cat([values, magnitudes, middles, near.clamp(max=448.0)])
    edges = torch.cat([edges, -edges])
    padded = torch.zeros(math.ceil(len(edges) / 127) * 127)
    padded[: len(edges)] = edges
    table = torch.cat([padded.view(-1, 127), torch.full((len(padded) // 127, 1), 448.0)], dim=1)
    dst, scale = quantized(table, mode, through_bf16=False)
    expected, expected_scale = quantize_reference(table, mode=mode, through_bf16=False)
    assert_same_bytes(dst, expected, what=mode)
    assert_same_bytes(scale, expected_scale, what=mode)
    if mode == "rows":
        assert scale.eq(1).all()
        assert_same_bytes(dst, table.to(torch.float8_e4m3fn), what="scale of one")


def test_known_values():
    values = torch.zeros(2, 4)
    values[0] = torch.tensor([448.0, 224.0, -1.0, 0.0])
    dst, scale = quantized(values, "rows")
    assert scale[:, 0].tolist() == [1.0, float(np.float32(1) / np.float32(448 * 512))]
    assert dst.float().tolist() == [[448.0, 224.0, -1.0, 0.0], [0.0] * 4]
    dst, scale = quantized(values, "blocks")
    assert scale.tolist() == [[float(np.float32(448) * (np.float32(1) / np.float32(448)))]]
    _, scale = quantized(torch.zeros(1, 4), "blocks")
    assert scale.tolist() == [[float(np.float32(1e-4) * (np.float32(1) / np.float32(448)))]]


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_marks_its_group_and_no_other(mode: str):
    values = torch.ones(200, 200)
    values[3, 5] = math.nan
    dst, scale = quantized(values, mode)
    assert scale[3 if mode == "rows" else 0, 0].isnan()
    assert int(scale.isnan().sum()) == 1
    assert dst.view(torch.uint8)[3, 5] == 0x7F
    assert not dst[130:].float().isnan().any()


def test_through_bf16_is_what_an_engine_sees_that_loads_bf16():
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(3))
    for mode in MODES:
        from_fp32 = quantized(values, mode)
        from_bf16 = quantized(values.bfloat16(), mode)
        assert_same_bytes(from_fp32[0], from_bf16[0], what="values")
        assert_same_bytes(from_fp32[1], from_bf16[1], what="scales")
        direct = quantized(values, mode, through_bf16=False)
        assert not all(torch.equal(a.float(), b.float()) for a, b in zip(direct, from_bf16, strict=True))


def test_scales_of_powers_of_two_come_from_what_the_first_quantising_kept():
    values = torch.zeros(128, 256)
    values[0, :2] = torch.tensor([450.0, 17.0])
    values[5, 128] = 448.0
    dst, scale = quantized(values, "blocks_ue8m0")
    assert scale.tolist() == [[2.0, 1.0]], "450/448 is above 1, 448/448 is 1"
    # 17 * 448/450 = 16.92 rounds to 16 in steps of 2; what it stands for, 16.07, is 8.04 of the second scale: 8.
    assert (dst[0, 0].item(), dst[0, 1].item(), dst[5, 128].item()) == (224.0, 8.0, 448.0)
    once, _ = quantized(values, "blocks")
    assert once[0, 0].item() == 448.0


def test_live_strides_on_every_side():
    """Into a transposed weight (stride 1 down), from a column slice, scales into columns of a wider matrix."""
    whole = torch.randn(300, 500, generator=torch.Generator().manual_seed(1))
    src = whole[:, 100:400]
    dst = torch.zeros(300, 300, dtype=torch.float8_e4m3fn).t()
    scales = torch.full((3, 9), -1.0)
    entry = QuantEntry(src=src, dst=dst, scale=scales[:, 2:8:2], mode="blocks")
    _C.quantize_host(make_quant_table([entry]))
    expected, expected_scale = quantize_reference(src, mode="blocks")
    assert_same_bytes(dst.contiguous(), expected, what="values")
    assert_same_bytes(scales[:, 2:8:2].contiguous(), expected_scale, what="scales")
    assert int((scales == -1).sum()) == 27 - 9


def test_empty_matrices_leave_no_record():
    entry = QuantEntry(
        src=torch.zeros(0, 4), dst=torch.zeros(0, 4, dtype=torch.float8_e4m3fn), scale=torch.zeros(0, 1), mode="blocks"
    )
    assert len(make_quant_table([entry])) == 0
    _C.quantize_host(make_quant_table([]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "columns"}, "mode must be one of ..blocks', 'rows', 'blocks_ue8m0'., but is 'columns'"),
        ({"src": torch.zeros(4, 5)}, r"source \(4, 5\) and destination \(4, 4\) must be one matrix shape"),
        ({"src": torch.zeros(4, 4, dtype=torch.int32)}, "source is torch.int32; quantise from"),
        ({"dst": torch.zeros(4, 4)}, "destination is torch.float32; it must be float8_e4m3fn"),
        ({"scale": torch.zeros(4)}, r"scales are torch.float32 \(4,\); expected float32 \(1, 1\)"),
        ({"scale": torch.zeros(1, 1, dtype=torch.float64)}, "expected float32"),
    ],
)
def test_refusals_name_the_entry(changes, words: str):
    fields = {
        "src": torch.zeros(4, 4),
        "dst": torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
        "scale": torch.zeros(1, 1),
        "mode": "blocks",
    }
    with pytest.raises(PlanError, match=f"quantising copy of 'w': .*{words}"):
        make_quant_table([QuantEntry(**(fields | changes), label="w")])


def test_the_extension_refuses_malformed_records():
    entry = QuantEntry(
        src=torch.zeros(4, 4), dst=torch.zeros(4, 4, dtype=torch.float8_e4m3fn), scale=torch.zeros(1, 1), mode="blocks"
    )
    for field, value, words in (
        ("extents", 0, "an extent is below 1"),
        ("scale", 0, "an address is null"),
        ("src_dtype", 9, "no quantising copy from dtype code 9"),
        ("mode", 3, "an unknown mode"),
        ("src", 4097, "not aligned to their own size"),
        ("scale", 4098, "scales are not aligned"),
    ):
        table = make_quant_table([entry])
        table[field] = value
        with pytest.raises(ValueError, match=f"quantising table record 0: .*{words}"):
            _C.quantize_host(table)
