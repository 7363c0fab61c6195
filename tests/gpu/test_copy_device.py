"""The CUDA executor of a copy table: bit for bit what the host oracle writes, on streams and in graphs."""

import numpy as np
import pytest
import torch
from copy_cases import (
    FLOATS,
    PAIRS,
    assert_same_as_oracle,
    assert_same_bytes,
    build,
    cases,
    every_half_pattern,
    fans,
    rounding_edges,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard import _C
from reshard.dtype import DType
from reshard.oracle import cast_reference
from reshard.table import CopyEntry, make_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not _C.CUDA_KERNELS, reason="needs a build with CUDA kernels (RESHARD_CUDA=on)"),
]

TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
OPTIONS = [
    {},
    {"tile_vectors": 64, "vectors_in_flight": 4},
    {"wide_casts": False, "blocks_per_sm": 1, "vectors_in_flight": 1},
    {"tile_vectors": 1000, "copy_engine_min_bytes": 64},
]


def run_on_device(table, **options) -> None:
    device_table = _C.DeviceTable(table, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    device_table.launch(stream.cuda_stream)
    stream.synchronize()


def device_sums(device_table, *, of_destination: bool) -> list[int]:
    sums = torch.full((device_table.num_records,), -1, dtype=torch.int64, device="cuda")
    device_table.launch_checksum(
        torch.cuda.current_stream().cuda_stream, sums.data_ptr(), of_destination=of_destination
    )
    return [int(value) % 2**64 for value in sums.cpu()]


@pytest.mark.parametrize("options", OPTIONS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(specs=st.lists(cases(), min_size=1, max_size=4))
def test_random_strided_copies_equal_the_oracle(specs, options):
    assert_same_as_oracle(specs, lambda table: run_on_device(table, **options), device="cuda")


@pytest.mark.parametrize("options", OPTIONS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(specs=fans())
def test_random_fans_equal_the_oracle(specs, options):
    assert_same_as_oracle(specs, lambda table: run_on_device(table, **options), device="cuda", one_source=True)


@pytest.mark.parametrize("num_targets", [2, 3, 8])
@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype"), [(DType.FLOAT32, DType.BFLOAT16), (DType.BFLOAT16, DType.BFLOAT16)]
)
def test_large_fans(src_dtype: DType, dst_dtype: DType, num_targets: int):
    """Matrices into plain ones and into columns of wider ones, all from one read, with checksums of every target."""
    src = (torch.arange(2000 * 1536, dtype=torch.int32) * 40503).view(torch.float32).to(TORCH[src_dtype])
    src = src.view(2000, 1536).cuda()
    wide = [torch.zeros(2000, 1536 + 8 * (i % 3), dtype=TORCH[dst_dtype], device="cuda") for i in range(num_targets)]
    table = make_table(CopyEntry.from_tensors(dst[:, :1536], src) for dst in wide)
    assert table["num_followers"].tolist() == [num_targets - 1, *[0] * (num_targets - 1)]
    device_table = _C.DeviceTable(table)
    expected_sums = device_sums(device_table, of_destination=False)
    device_table.launch(torch.cuda.current_stream().cuda_stream)
    assert device_sums(device_table, of_destination=True) == expected_sums
    assert len(set(expected_sums)) == 1
    expected = cast_reference(src.cpu(), TORCH[dst_dtype])
    for dst in wide:
        assert_same_bytes(dst[:, :1536].cpu(), expected, what="target")
        assert not dst[:, 1536:].any()


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("wide_casts", [True, False])
@pytest.mark.parametrize(("src_dtype", "dst_dtype"), PAIRS)
def test_every_rounding_edge(src_dtype: DType, dst_dtype: DType, contiguous: bool, wide_casts: bool):
    host = rounding_edges() if src_dtype is DType.FLOAT32 else every_half_pattern(TORCH[src_dtype])
    values = host.cuda()
    dst = torch.zeros((len(values), 1 if contiguous else 3), dtype=TORCH[dst_dtype], device="cuda")[:, 0]
    run_on_device(make_table([CopyEntry.from_tensors(dst, values)]), wide_casts=wide_casts)
    assert_same_bytes(dst.cpu(), cast_reference(host, TORCH[dst_dtype]), what=f"{src_dtype} -> {dst_dtype}")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtypes", [(a, b) for a in FLOATS for b in FLOATS])
def test_large_fused_destinations(dtypes: tuple[DType, DType], options):
    """Three matrices into rows of a fused one, and two into columns of another, many tiles each."""
    parts = [torch.arange(rows * 1536, dtype=torch.int32).view(rows, 1536) for rows in (1536, 256, 256)]
    sources = [(part * 40503).view(torch.float32).to(TORCH[dtypes[0]]).cuda() for part in parts]
    rows = torch.zeros(2048, 1536, dtype=TORCH[dtypes[1]], device="cuda")
    columns = torch.zeros(256, 2 * 1536 + 8, dtype=TORCH[dtypes[1]], device="cuda")
    row_views = list(rows.split([1536, 256, 256]))
    column_views = [columns[:, :1536], columns[:, 1536 + 8 :]]
    pairs = list(zip(row_views + column_views, sources + sources[1:], strict=True))
    run_on_device(make_table(CopyEntry.from_tensors(dst, src) for dst, src in pairs), **options)
    for dst, src in pairs:
        assert_same_bytes(dst.cpu(), cast_reference(src.cpu(), dst.dtype), what=f"{dtypes}")
    assert not columns[:, 1536 : 1536 + 8].any()


def test_pinned_host_memory_on_either_side():
    device = torch.arange(10_000, dtype=torch.float32, device="cuda")
    pinned = torch.zeros(10_000, dtype=torch.bfloat16, pin_memory=True)
    back = torch.zeros(10_000, dtype=torch.float32, device="cuda")
    run_on_device(make_table([CopyEntry.from_tensors(pinned, device)]))
    run_on_device(make_table([CopyEntry.from_tensors(back, pinned)]))
    assert torch.equal(pinned, device.cpu().bfloat16())
    assert torch.equal(back.cpu(), pinned.float())


@pytest.mark.parametrize("options", OPTIONS)
def test_a_captured_graph_follows_its_sources(options):
    """Captured once with its checksums, replayed after the sources changed, no table rebuilt."""
    sources = [torch.zeros(1000 + i, 64, device="cuda") for i in range(40)]
    targets = [torch.zeros(src.shape, dtype=torch.bfloat16, device="cuda") for src in sources]
    plain, plain_copy = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    pairs = [*zip(targets, sources, strict=True), (plain_copy, plain)]
    table = _C.DeviceTable(make_table(CopyEntry.from_tensors(dst, src) for dst, src in pairs), **options)
    sums = torch.zeros(2, table.num_records, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        table.launch_checksum(stream, sums[0].data_ptr(), of_destination=False)
        table.launch(stream)
        table.launch_checksum(stream, sums[1].data_ptr(), of_destination=True)
    for step in range(1, 3):
        for _, src in pairs:
            src.copy_(torch.arange(src.numel(), device="cuda").view(src.shape) * step)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(dst, src.to(dst.dtype)) for dst, src in pairs)
        assert torch.equal(sums[0], sums[1])
        assert int((sums[0] == 0).sum()) == 0


def test_launches_are_few_and_allocate_nothing():
    sources = [torch.ones(64, 64, device="cuda") for _ in range(500)]
    targets = [torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda") for _ in sources]
    table = _C.DeviceTable(make_table(map(CopyEntry.from_tensors, targets, sources)))
    assert table.num_launches == 1
    assert table.num_records == 500
    assert table.device_bytes == 500 * 184 + table.num_tiles * 4
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(50):
        table.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == before
    assert all(torch.equal(dst, src.bfloat16()) for dst, src in zip(targets, sources, strict=True))


def test_an_empty_table_launches_nothing():
    table = _C.DeviceTable(make_table([]))
    assert (table.num_launches, table.num_records, table.device_bytes) == (0, 0, 0)
    table.launch(torch.cuda.current_stream().cuda_stream)


@settings(max_examples=40, deadline=None)
@given(specs=st.lists(cases(max_numel=3000), min_size=1, max_size=3))
def test_checksums_equal_those_of_the_host(specs):
    host = build(specs)
    expected = _C.checksum_host(host.table, of_destination=False)
    built = build(specs, device="cuda")
    table = _C.DeviceTable(built.table, tile_vectors=64)
    assert device_sums(table, of_destination=False) == expected
    table.launch(torch.cuda.current_stream().cuda_stream)
    assert device_sums(table, of_destination=True) == expected


def test_a_checksum_sees_one_changed_bit():
    src = torch.arange(1 << 16, dtype=torch.float32, device="cuda")
    dst = torch.zeros(1 << 16, dtype=torch.bfloat16, device="cuda")
    table = _C.DeviceTable(make_table([CopyEntry.from_tensors(dst, src)]))
    table.launch(torch.cuda.current_stream().cuda_stream)
    assert device_sums(table, of_destination=True) == device_sums(table, of_destination=False)
    dst.view(torch.int16)[12345] ^= 1
    assert device_sums(table, of_destination=True) != device_sums(table, of_destination=False)


def test_options_and_tables_are_checked():
    table = make_table([CopyEntry.from_tensors(torch.zeros(4, device="cuda"), torch.ones(4, device="cuda"))])
    with pytest.raises(ValueError, match="vectors_in_flight must be 1, 2 or 4"):
        _C.DeviceTable(table, vectors_in_flight=3)
    with pytest.raises(ValueError, match="blocks_per_sm must be 0"):
        _C.DeviceTable(table, blocks_per_sm=-1)
    table["extents"][0] = 0
    with pytest.raises(ValueError, match="record 0: extent 0 is below 1"):
        _C.DeviceTable(table)


def test_rows_beyond_two_to_the_thirty_vectors_are_cut():
    """A byte matrix of 2^30 + 2^20 single-byte vectors: strided rows that no wider vector fits."""
    rows, width = (1 << 20) + (1 << 10), 1023
    src = torch.zeros(rows, width + 2, dtype=torch.uint8, device="cuda")
    src.view(-1)[::1021] = 7
    dst = torch.zeros(rows, width + 1, dtype=torch.uint8, device="cuda")
    table = make_table([CopyEntry.from_tensors(dst[:, :width], src[:, 1 : width + 1])])
    run_on_device(np.concatenate([table]))
    assert torch.equal(dst[:, :width], src[:, 1 : width + 1])
    assert not dst[:, width].any()
