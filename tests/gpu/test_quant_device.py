"""Quantising copies on a GPU: bit for bit as on the host, and as the engine's formulas when torch runs them there."""

import pytest
import torch
from copy_cases import assert_same_bytes, rounding_edges
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import _C
from reshard.oracle import quantize_reference
from reshard.quant import MODES, QuantEntry, make_quant_table, scale_shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not _C.CUDA_KERNELS, reason="needs a build with CUDA kernels (RESHARD_CUDA=on)"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quantized(
    values: torch.Tensor, mode: str, *, through_bf16: bool = True, full_division: bool = False, padding: int = 0
):
    """Values and scales by the device kernel; ``padding`` columns in every row of the destination."""
    rows, columns = values.shape
    whole = torch.zeros(rows, columns + padding, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.zeros(scale_shape(rows, columns, mode), device="cuda")
    dst = whole[:, :columns]
    entry = QuantEntry(
        src=values, dst=dst, scale=scale, mode=mode, through_bf16=through_bf16, full_division=full_division
    )
    table = _C.QuantDeviceTable(make_quant_table([entry]))
    table.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert not whole[:, columns:].view(torch.uint8).any()
    return dst.contiguous().cpu(), scale.cpu()


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.sampled_from(DTYPES),
    st.sampled_from(["blocks", "rows"]),
    st.booleans(),
    st.integers(-8, 8),
    st.sampled_from([0, 1, 4]),
)
def test_random_matrices_equal_the_reference(rows, columns, dtype, mode, through_bf16, exponent, padding):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    values = (torch.randn(rows, columns, generator=generator) * 2.0**exponent).to(dtype)
    dst, scale = quantized(values.cuda(), mode, through_bf16=through_bf16, padding=padding)
    expected, expected_scale = quantize_reference(values, mode=mode, through_bf16=through_bf16)
    assert_same_bytes(scale, expected_scale, what="scales")
    assert_same_bytes(dst, expected, what="values")


def test_blocks_equal_the_engines_formula_as_torch_runs_it_here():
    """amax.clamp(1e-4) / 448.0, x * (1.0 / scale): the divisor is a Python number, on CUDA tensors."""
    weight = (torch.randn(1024, 3584, generator=torch.Generator().manual_seed(5)) * 0.03).bfloat16().cuda()
    blocks = weight.view(8, 128, 28, 128)
    engine_scale = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    engine = (blocks * (1.0 / engine_scale)).to(torch.float8_e4m3fn).view(1024, 3584)
    dst, scale = quantized(weight, "blocks")
    assert_same_bytes(scale, engine_scale[:, 0, :, 0].cpu(), what="scales")
    assert_same_bytes(dst, engine.cpu(), what="values")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_against_vllm_itself(mode: str, seed: int):
    """8 million weights each: a wrong last bit of a reciprocal changes two in a million. Triton compiled theirs."""
    pytest.importorskip("vllm.utils", reason="needs vllm")
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = (torch.randn(2048, 4096, generator=generator, device="cuda") * 0.03).bfloat16()
    dst, scale = quantized(weight, mode, full_division=mode != "rows")
    if mode != "rows":
        from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
        from vllm.utils.deep_gemm import per_block_cast_to_fp8

        engine, engine_scale = per_block_cast_to_fp8(weight, [128, 128], use_ue8m0=False)
        if mode == "blocks_ue8m0":
            requant_weight_ue8m0_inplace(engine, engine_scale)
    else:
        from vllm._custom_ops import scaled_fp8_quant

        engine, engine_scale = scaled_fp8_quant(weight, use_per_token_if_dynamic=True)
    assert_same_bytes(scale, engine_scale.cpu(), what="scales")
    assert_same_bytes(dst, engine.cpu(), what="values")


@pytest.mark.parametrize("mode", MODES)
def test_rounding_edges_at_a_scale_of_one(mode: str):
    edges = rounding_edges()
    edges = edges[edges.abs() <= 448]
    table = torch.zeros(len(edges) // 127 + 1, 128)
    table[:-1, :127] = edges[: len(edges) // 127 * 127].view(-1, 127)
    table[:, 127] = 448.0
    dst, scale = quantized(table.cuda(), mode, through_bf16=False)
    expected, expected_scale = quantize_reference(table, mode=mode, through_bf16=False)
    assert_same_bytes(scale, expected_scale, what="scales")
    assert_same_bytes(dst, expected, what="values")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(130, 8), (5, 64), (3, 520), (37, 3584), (130, 8192), (5, 18944), (3, 30000), (2, 60000)]
)
def test_every_size_class_of_rows_and_blocks(shape: tuple[int, int], dtype: torch.dtype, mode: str):
    """Several rows a block of threads, one row, rows beyond what shared memory holds; two exponents a row."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1]))
    values[:, ::7] *= 2.0 ** torch.arange(shape[0])[:, None].remainder(19).sub(9)
    values = values.to(dtype)
    dst, scale = quantized(values.cuda(), mode)
    expected, expected_scale = quantize_reference(values, mode=mode)
    assert_same_bytes(scale, expected_scale, what="scales")
    assert_same_bytes(dst, expected, what="values")


@pytest.mark.parametrize("through_bf16", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_infinities_and_nans_as_on_the_host(mode: str, dtype: torch.dtype, through_bf16: bool):
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(4)).to(dtype)
    values[3, 5], values[200, 7], values[9, 200] = float("inf"), float("nan"), -float("inf")
    values[20], values[21, 0] = 0.0, torch.finfo(dtype).max
    dst, scale = quantized(values.cuda(), mode, through_bf16=through_bf16)
    host_dst = torch.zeros(values.shape, dtype=torch.float8_e4m3fn)
    host_scale = torch.zeros(scale_shape(256, 256, mode))
    entry = QuantEntry(src=values, dst=host_dst, scale=host_scale, mode=mode, through_bf16=through_bf16)
    _C.quantize_host(make_quant_table([entry]))
    assert torch.equal(scale.isnan(), host_scale.isnan())
    assert_same_bytes(scale.nan_to_num(), host_scale.nan_to_num(), what="scales")
    nans = [side.float().isnan() for side in (dst, host_dst)]
    assert torch.equal(*nans)
    assert torch.equal(dst.view(torch.uint8)[~nans[0]], host_dst.view(torch.uint8)[~nans[0]])


def test_many_matrices_in_one_captured_launch():
    sources = [torch.zeros(130 + i, 256, device="cuda") for i in range(30)]
    targets = [torch.zeros(src.shape, dtype=torch.float8_e4m3fn, device="cuda") for src in sources]
    targets[::3] = [dst.t().contiguous().t() for dst in targets[::3]]  # strides that go element by element
    modes = ["blocks" if i % 2 else "rows" for i in range(30)]
    shapes = [scale_shape(*src.shape, mode) for src, mode in zip(sources, modes, strict=True)]
    scales = [torch.zeros(shape, device="cuda") for shape in shapes]
    entries = [
        QuantEntry(src=src, dst=dst, scale=scale, mode=mode)
        for src, dst, scale, mode in zip(sources, targets, scales, modes, strict=True)
    ]
    table = _C.QuantDeviceTable(make_quant_table(entries))
    assert table.num_launches == 3  # blocks of 64 KiB, several rows of 1 KiB, and element by element
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        table.launch(torch.cuda.current_stream().cuda_stream)
    for step in range(2):
        for i, src in enumerate(sources):
            src.copy_(torch.randn(src.shape, generator=torch.Generator().manual_seed(100 * step + i)))
        graph.replay()
        torch.cuda.synchronize()
        for entry in entries:
            expected, expected_scale = quantize_reference(entry.src.cpu(), mode=entry.mode)
            assert_same_bytes(entry.dst.cpu().contiguous(), expected, what="values")
            assert_same_bytes(entry.scale.cpu(), expected_scale, what="scales")
