"""The host executor against the oracle and against known bit patterns."""

import threading

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
    rounding_edges,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import _C
from reshard.dtype import DType
from reshard.oracle import cast_reference, checksum_reference, copy_reference
from reshard.table import CopyEntry, make_table

TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
NAN = {torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF, torch.float32: 0x7FFFFFFF}


@settings(max_examples=300, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=4), st.sampled_from([0, 1, 2, 5]))
def test_random_strided_copies_equal_the_oracle(specs, num_threads: int):
    assert_same_as_oracle(specs, lambda table: _C.copy_host(table, num_threads))


def values_of(dtype: torch.dtype) -> torch.Tensor:
    return rounding_edges() if dtype == torch.float32 else every_half_pattern(dtype)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(("src_dtype", "dst_dtype"), PAIRS)
def test_every_rounding_edge(src_dtype: DType, dst_dtype: DType, contiguous: bool):
    """All 16-bit patterns, and floats around every 16-bit value and midpoint: vector, tail and strided loops."""
    values = values_of(TORCH[src_dtype])
    dst = torch.zeros((len(values), 1 if contiguous else 3), dtype=TORCH[dst_dtype])[:, 0]
    _C.copy_host(make_table([CopyEntry.from_tensors(dst, values)]))
    expected = cast_reference(values, TORCH[dst_dtype])
    assert_same_bytes(dst, expected, what=f"{src_dtype} -> {dst_dtype}")
    numbers = ~values.isnan()
    assert torch.equal(dst[numbers], values.to(TORCH[dst_dtype])[numbers])


@pytest.mark.parametrize(
    ("bits", "bf16", "fp16"),
    [
        (0x3F800000, 0x3F80, 0x3C00),  # 1
        (0x3F808000, 0x3F80, 0x3C04),  # halfway between two bf16: to even, down
        (0x3F818000, 0x3F82, 0x3C0C),  # halfway: to even, up
        (0x3F808001, 0x3F81, 0x3C04),  # just above halfway
        (0x7F7FFFFF, 0x7F80, 0x7C00),  # the largest float overflows to infinity
        (0xFF800000, 0xFF80, 0xFC00),  # -infinity
        (0x477FE000, 0x4780, 0x7BFF),  # 65504, the largest fp16
        (0x477FF000, 0x4780, 0x7C00),  # 65520, the first that overflows in fp16
        (0x33000000, 0x3300, 0x0000),  # 2**-25, halfway to the smallest fp16: to even, zero
        (0x33000001, 0x3300, 0x0001),  # just above
        (0x80000001, 0x8000, 0x8000),  # a negative fp32 subnormal keeps its sign
        (0x7FC12345, 0x7FFF, 0x7FFF),  # NaNs are canonical
        (0xFF800001, 0x7FFF, 0x7FFF),
    ],
)
def test_known_roundings(bits: int, bf16: int, fp16: int):
    src = torch.from_numpy(np.full(37, bits, dtype=np.uint32).view(np.float32))
    for dtype, expected in ((torch.bfloat16, bf16), (torch.float16, fp16)):
        dst = torch.zeros(37, dtype=dtype)
        _C.copy_host(make_table([CopyEntry.from_tensors(dst, src)]))
        assert dst.view(torch.int16).numpy().view(np.uint16).tolist() == [expected] * 37


def test_nan_payloads():
    """bf16 to fp32 keeps a NaN's payload; every other cast makes it canonical; equal types keep all bits."""
    patterns = {torch.bfloat16: [0x7F81, 0xFF81], torch.float16: [0x7C01, 0xFC01]}  # signalling, both signs
    for src_dtype, bits in patterns.items():
        values = torch.from_numpy(np.array(bits, dtype=np.uint16).view(np.int16)).view(src_dtype)
        wide = torch.zeros(2)
        _C.copy_host(make_table([CopyEntry.from_tensors(wide, values)]))
        found = wide.view(torch.int32).tolist()
        assert found == ([0x7F810000, -0x7F0000] if src_dtype == torch.bfloat16 else [0x7FFFFFFF] * 2)
        same = torch.zeros(2, dtype=src_dtype)
        _C.copy_host(make_table([CopyEntry.from_tensors(same, values)]))
        assert torch.equal(same.view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize("offset", [0, 1, 3, 16])
@pytest.mark.parametrize("dtypes", [(a, b) for a in FLOATS for b in FLOATS])
def test_streaming_writes_of_large_tables(dtypes: tuple[DType, DType], offset: int):
    """More than the size from which stores bypass the caches, at aligned and unaligned ends, with two threads."""
    numel = 9 * 2**20 + 5
    src = torch.arange(numel + 20, dtype=torch.int32).view(torch.float32)
    src = src.to(TORCH[dtypes[0]]) if dtypes[0] is not DType.FLOAT32 else src
    buffer = torch.zeros(numel + 40, dtype=TORCH[dtypes[1]])
    dst = buffer[offset : offset + numel]
    _C.copy_host(make_table([CopyEntry.from_tensors(dst, src[3 : 3 + numel])]), 2)
    assert_same_bytes(dst, cast_reference(src[3 : 3 + numel], dst.dtype), what=f"{dtypes} at {offset}")
    assert not buffer[:offset].any() and not buffer[offset + numel :].any()


def test_items_of_any_size():
    """A same-type record copies items of any size, here 3, 12 and 24 bytes, strided on both sides."""
    for itemsize in (3, 12, 24):
        table = make_table([entry_of_bytes(1, 1)])
        src = torch.arange(40 * itemsize, dtype=torch.int64).to(torch.uint8)
        dst = torch.zeros(40 * itemsize, dtype=torch.uint8)
        table["src"], table["dst"] = src.data_ptr(), dst.data_ptr()
        table["extents"] = [1, 1, 1, 20]
        table["src_strides"], table["dst_strides"] = itemsize, 2 * itemsize
        table["src_itemsize"] = table["dst_itemsize"] = itemsize
        _C.copy_host(table)
        expected = torch.zeros(20, 2, itemsize, dtype=torch.uint8)
        expected[:, 0] = src[: 20 * itemsize].view(20, itemsize)
        assert torch.equal(dst, expected.view(-1))


def entry_of_bytes(src: int, dst: int) -> CopyEntry:
    return CopyEntry(
        src=src + 4096,
        dst=dst + 8192,
        shape=(4,),
        src_strides=(1,),
        dst_strides=(1,),
        src_dtype=DType.UINT8,
        dst_dtype=DType.UINT8,
    )


def test_many_small_records_and_an_empty_table():
    sources = [torch.full((i % 7 + 1, i % 5 + 1), float(i)) for i in range(3000)]
    targets = [torch.zeros(source.shape, dtype=torch.bfloat16) for source in sources]
    _C.copy_host(make_table(CopyEntry.from_tensors(d, s) for d, s in zip(targets, sources, strict=True)), 2)
    assert all(torch.equal(d, s.bfloat16()) for d, s in zip(targets, sources, strict=True))
    _C.copy_host(make_table([]))


def test_two_runs_of_one_table_follow_their_sources():
    """The table is bound once: new values in the same memory are what the second run copies."""
    src = torch.arange(5000, dtype=torch.float32)
    dst = torch.zeros(5000, dtype=torch.float16)
    table = make_table([CopyEntry.from_tensors(dst, src)])
    for step in range(2):
        src.add_(step * 17)
        _C.copy_host(table)
        assert torch.equal(dst, src.half())


def test_negative_thread_counts_are_refused():
    with pytest.raises(ValueError, match="num_threads must be 0"):
        _C.copy_host(make_table([]), -1)


def test_nothing_is_written_when_a_record_is_malformed():
    src, dst = torch.ones(8), torch.zeros(8)
    good = make_table([CopyEntry.from_tensors(dst, src)])
    bad = np.concatenate([good, good])
    bad["extents"][1] = 0
    with pytest.raises(ValueError, match="record 1"):
        _C.copy_host(bad)
    assert not dst.any()


def test_tables_run_from_several_python_threads_at_once():
    src = torch.arange(2**20, dtype=torch.float32)
    targets = [torch.zeros(2**20, dtype=torch.bfloat16) for _ in range(4)]
    tables = [make_table([CopyEntry.from_tensors(dst, src)]) for dst in targets]
    threads = [threading.Thread(target=_C.copy_host, args=(table, 2)) for table in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(dst, src.bfloat16()) for dst in targets)


@settings(max_examples=150, deadline=None)
@given(st.lists(cases(max_numel=600), min_size=1, max_size=3), st.sampled_from([1, 3]))
def test_checksums_agree_on_both_sides_and_with_the_oracle(specs, num_threads: int):
    built = build(specs)
    before = _C.checksum_host(built.table, of_destination=False, num_threads=num_threads)
    copy_reference(built.table)
    after = _C.checksum_host(built.table, of_destination=True, num_threads=num_threads)
    assert before == after
    for record, checksum in zip(built.table, after, strict=True):
        dst = torch.zeros([*record["extents"].tolist(), int(record["dst_itemsize"])], dtype=torch.uint8)
        whole = record.copy()
        whole["src"], whole["src_strides"], whole["src_dtype"] = (
            record["dst"],
            record["dst_strides"],
            record["dst_dtype"],
        )
        whole["src_itemsize"] = record["dst_itemsize"]
        whole["dst"], whole["dst_strides"] = dst.data_ptr(), np.array(dst.stride()[:4])
        copy_reference(np.array([whole]))
        assert checksum == reference_of_bytes(dst)


def reference_of_bytes(elements: torch.Tensor) -> int:
    """checksum_reference for elements that are given as their bytes in the last dimension (at most 16 of them)."""
    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return checksum_reference(elements.view(by_size[elements.shape[-1]]))


def test_a_checksum_sees_changed_and_swapped_elements():
    values = torch.arange(1000, dtype=torch.float32)
    other = torch.zeros(1000)
    table = make_table([CopyEntry.from_tensors(other, values)])
    (first,) = _C.checksum_host(table, of_destination=False)
    values[[3, 4]] = values[[4, 3]]
    (swapped,) = _C.checksum_host(table, of_destination=False)
    values[[3, 4]] = values[[4, 3]]
    values[999] += 1
    (changed,) = _C.checksum_host(table, of_destination=False)
    assert len({first, swapped, changed}) == 3
