"""The device's cutting of a table into tiles and vectors, run on host memory with the same index arithmetic."""

import pytest
import torch
from copy_cases import assert_same_as_oracle, build, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import _C
from reshard.dtype import DType
from reshard.oracle import copy_reference
from reshard.table import CopyEntry, make_table


@settings(max_examples=400, deadline=None)
@given(
    st.lists(cases(), min_size=1, max_size=4),
    st.sampled_from([1, 7, 64, 4096]),
    st.booleans(),
    st.sampled_from([5, 100, 2**30]),
)
def test_tiles_of_random_strided_copies_equal_the_oracle(specs, tile_vectors: int, wide_casts: bool, max_vectors: int):
    """Boxes of more than ``max_vectors`` are cut, as those of more than 2^30 are on a device."""
    options = {"tile_vectors": tile_vectors, "wide_casts": wide_casts, "max_vectors": max_vectors}
    assert_same_as_oracle(specs, lambda table: _C._run_tiles_on_host(table, **options))


@settings(max_examples=150, deadline=None)
@given(st.lists(cases(max_numel=3000), min_size=1, max_size=3), st.sampled_from([3, 2**30]))
def test_tile_checksums_equal_those_of_the_host(specs, max_vectors: int):
    built = build(specs)
    before = _C.checksum_host(built.table, of_destination=False)
    assert _C._checksum_tiles_on_host(built.table, of_destination=False, max_vectors=max_vectors) == before
    copy_reference(built.table)
    assert _C._checksum_tiles_on_host(built.table, of_destination=True, max_vectors=max_vectors) == before


@pytest.mark.parametrize("shift", range(17))
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 100])
def test_byte_runs_at_every_alignment(shift: int, length: int):
    src = torch.arange(200, dtype=torch.uint8)
    for src_shift in (0, shift, 3):
        dst = torch.zeros(200, dtype=torch.uint8)
        _C._run_tiles_on_host(
            make_table([CopyEntry.from_tensors(dst[shift : shift + length], src[src_shift : src_shift + length])])
        )
        expected = torch.zeros(200, dtype=torch.uint8)
        expected[shift : shift + length] = src[src_shift : src_shift + length]
        assert torch.equal(dst, expected)


@pytest.mark.parametrize("itemsize", [3, 6, 12, 24, 32])
def test_items_whose_size_is_no_vector(itemsize: int):
    src = torch.arange(40 * itemsize, dtype=torch.int64).to(torch.uint8)
    dst = torch.zeros(2 * 40 * itemsize, dtype=torch.uint8)
    table = make_table([CopyEntry.from_tensors(dst[:4], src[:4])])
    table["src_itemsize"] = table["dst_itemsize"] = itemsize
    table["extents"], table["src_strides"], table["dst_strides"] = [1, 1, 1, 20], itemsize, 2 * itemsize
    _C._run_tiles_on_host(table, tile_vectors=8)
    expected = torch.zeros(40, 2, itemsize, dtype=torch.uint8)
    expected[:20, 0] = src[: 20 * itemsize].view(20, itemsize)
    assert torch.equal(dst, expected.view(-1))
    assert _C._checksum_tiles_on_host(table, of_destination=True) == _C.checksum_host(table, of_destination=False)


def test_casts_of_misaligned_elements_are_refused():
    memory = torch.zeros(4096, dtype=torch.uint8)
    entry = CopyEntry(
        src=memory.data_ptr() + 2,
        dst=memory.data_ptr() + 2048,
        shape=(8,),
        src_strides=(1,),
        dst_strides=(1,),
        src_dtype=DType.FLOAT32,
        dst_dtype=DType.BFLOAT16,
    )
    with pytest.raises(ValueError, match="record 0: a device can't cast elements that are not aligned"):
        _C._run_tiles_on_host(make_table([entry]))
    _C.copy_host(make_table([entry]))


def test_tile_sizes_are_checked():
    with pytest.raises(ValueError, match="tile_vectors must be between 1 and"):
        _C._run_tiles_on_host(make_table([]), tile_vectors=0)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 5000), st.integers(2, 40))
def test_division_by_every_extent(extent: int, rows: int):
    """Rows of one byte each, strided, so that each index goes through the division by ``extent``."""
    src = torch.arange(rows * extent, dtype=torch.int32).to(torch.uint8).view(rows, extent)
    columns = src.T.contiguous()
    buffer = torch.zeros(rows, extent, 2, dtype=torch.uint8)
    _C._run_tiles_on_host(make_table([CopyEntry.from_tensors(buffer[:, :, 0], columns.T)]))
    assert torch.equal(buffer[:, :, 0], src)
    assert not buffer[:, :, 1].any()
