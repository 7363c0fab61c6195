"""One source box for several destinations: how a table gathers them, and that every executor still does each copy."""

import numpy as np
import pytest
import torch
from copy_cases import assert_same_as_oracle, assert_same_bytes, build, fans
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import _C
from reshard.dtype import DType
from reshard.oracle import copy_reference
from reshard.table import MAX_TARGETS, CopyEntry, make_table, num_read_bytes, num_written_bytes

F32, BF16 = DType.FLOAT32, DType.BFLOAT16


def entry(dst: int, *, src: int = 1 << 20, shape=(64, 64), src_strides=(64, 1), dst_strides=(64, 1), dst_dtype=BF16):
    return CopyEntry(
        src=src,
        dst=dst,
        shape=shape,
        src_strides=src_strides,
        dst_strides=dst_strides,
        src_dtype=F32,
        dst_dtype=dst_dtype,
    )


def followers(*entries: CopyEntry, **options) -> list[int]:
    return make_table(entries, **options)["num_followers"].tolist()


def test_equal_boxes_are_gathered_at_the_place_of_the_first():
    entries = [entry(1 << 30), entry(1 << 31, src=1 << 21), entry(1 << 32), entry(1 << 33)]
    table = make_table(entries)
    assert table["num_followers"].tolist() == [2, 0, 0, 0]
    assert table["dst"].tolist() == [1 << 30, 1 << 32, 1 << 33, 1 << 31]
    assert followers(*entries, max_targets=1) == [0, 0, 0, 0]
    assert make_table(entries, max_targets=1)["dst"].tolist() == [1 << 30, 1 << 31, 1 << 32, 1 << 33]


def test_a_fan_is_read_once_and_written_as_often_as_it_has_targets():
    entries = [entry(1 << 30), entry(1 << 31), entry(1 << 32, src=1 << 22)]
    assert num_read_bytes(make_table(entries)) == 2 * 64 * 64 * 4
    assert num_read_bytes(make_table(entries, max_targets=1)) == 3 * 64 * 64 * 4
    assert num_written_bytes(make_table(entries)) == 3 * 64 * 64 * 2


def test_large_groups_are_cut_into_even_fans():
    entries = [entry((1 << 30) + (i << 20)) for i in range(9)]
    assert followers(*entries) == [3, 0, 0, 0, 4, 0, 0, 0, 0]
    assert followers(*entries[:8]) == [MAX_TARGETS - 1, *[0] * 7]
    assert followers(*entries, max_targets=3) == [2, 0, 0] * 3
    with pytest.raises(ValueError, match="max_targets must be between 1 and 8"):
        make_table(entries, max_targets=9)


@pytest.mark.parametrize(
    "other",
    [
        entry(1 << 31, src=(1 << 20) + 4),
        entry(1 << 31, shape=(64, 32)),
        entry(1 << 31, src_strides=(65, 1)),
        entry(1 << 31, dst_dtype=DType.FLOAT16),
        entry((1 << 31) + 2),  # another alignment: a vector of one would not fit the other
        entry(1 << 31, dst_strides=(1, 64)),  # another order of dimensions
        entry(1 << 31, dst_strides=(65, 1)),  # rows that are not aligned
        entry(1 << 31, dst_strides=(256, 2)),  # elements apart
    ],
)
def test_copies_that_share_less_stay_apart(other: CopyEntry):
    assert followers(entry(1 << 30), other) == [0, 0]


def test_dimensions_merge_only_where_all_targets_allow_it():
    table = make_table([entry(1 << 30), entry(1 << 31, dst_strides=(72, 1))])
    assert table["num_followers"].tolist() == [1, 0]
    assert table["extents"].tolist() == [[1, 1, 64, 64]] * 2
    assert table["dst_strides"][:, 2].tolist() == [128, 144]


def test_split_boxes_keep_their_fans_together():
    shape = (2, 3, 4, 5, 6)
    src_strides, dst_strides = (720, 240, 60, 12, 2), (2000, 300, 72, 14, 2)
    table = make_table(
        [entry(base, shape=shape, src_strides=src_strides, dst_strides=dst_strides) for base in (1 << 30, 1 << 31)]
    )
    assert table["num_followers"].tolist() == [1, 0, 1, 0]
    assert (table["src"][0::2] == table["src"][1::2]).all()


def test_dimensions_named_in_another_order_are_the_same_box():
    """Two transposed views of one matrix: the same elements of the source, at the same places of the destinations."""
    a = entry(1 << 30, shape=(64, 32), src_strides=(32, 1), dst_strides=(40, 1))
    b = entry(1 << 31, shape=(32, 1, 64), src_strides=(1, 7, 32), dst_strides=(1, 5, 40))
    table = make_table([a, b])
    assert table["num_followers"].tolist() == [1, 0]
    assert table["dst_strides"][:, 2:].tolist() == [[80, 2]] * 2


@settings(max_examples=150, deadline=None)
@given(fans(), st.sampled_from([1, 2, 5]))
def test_the_host_writes_every_target(specs, num_threads: int):
    assert_same_as_oracle(specs, lambda table: _C.copy_host(table, num_threads), one_source=True)


@settings(max_examples=200, deadline=None)
@given(fans(), st.sampled_from([1, 64, 512]), st.booleans(), st.sampled_from([5, 2**30]))
def test_tiles_write_every_target(specs, tile_vectors: int, wide_casts: bool, max_vectors: int):
    options = {"tile_vectors": tile_vectors, "wide_casts": wide_casts, "max_vectors": max_vectors}
    assert_same_as_oracle(specs, lambda table: _C._run_tiles_on_host(table, **options), one_source=True)


@settings(max_examples=100, deadline=None)
@given(fans(max_numel=1000))
def test_gathering_changes_no_copy(specs):
    """As a set, the records are those of the same entries one by one, wherever no dimension merged differently."""
    built = build(specs, one_source=True)
    single = [make_table([e], check_overlap=False) for e in entries_of(built, specs)]
    assert num_written_bytes(built.table) == sum(map(num_written_bytes, single))
    assert int((built.table["num_followers"] + 1)[heads(built.table)].sum()) == len(built.table)
    _C.check_records(built.table)


@settings(max_examples=60, deadline=None)
@given(fans(max_numel=1000), st.sampled_from([3, 2**30]))
def test_checksums_are_a_records_own(specs, max_vectors: int):
    built = build(specs, one_source=True)
    before = _C.checksum_host(built.table, of_destination=False)
    assert _C._checksum_tiles_on_host(built.table, of_destination=False, max_vectors=max_vectors) == before
    copy_reference(built.table)
    assert _C.checksum_host(built.table, of_destination=True) == before
    assert _C._checksum_tiles_on_host(built.table, of_destination=True, max_vectors=max_vectors) == before


def entries_of(built, specs) -> list[CopyEntry]:
    return [
        CopyEntry(
            src=src.data_ptr() + case.src.offset_bytes,
            dst=dst.data_ptr() + case.dst.offset_bytes,
            shape=case.shape,
            src_strides=case.src.strides,
            dst_strides=case.dst.strides,
            src_dtype=case.src_dtype,
            dst_dtype=case.dst_dtype,
        )
        for case, src, dst in zip(specs, built.src_buffers, built.dst_buffers, strict=True)
    ]


def heads(table) -> list[int]:
    found, position = [], 0
    while position < len(table):
        found.append(position)
        position += 1 + int(table["num_followers"][position])
    return found


@pytest.mark.parametrize("num_targets", [2, 3, 8])
def test_large_fans_with_streaming_stores(num_targets: int):
    src = torch.arange(3 * 2**20 + 7, dtype=torch.int32).view(torch.float32)
    targets = [torch.zeros(len(src), dtype=torch.bfloat16) for _ in range(num_targets)]
    table = make_table(CopyEntry.from_tensors(dst, src) for dst in targets)
    _C.copy_host(table, 2)
    expected = torch.zeros_like(targets[0])
    copy_reference(make_table([CopyEntry.from_tensors(expected, src)]))
    for dst in targets:
        assert_same_bytes(dst, expected, what="target")


@pytest.mark.parametrize(
    ("position", "field", "value", "words"),
    [
        (0, "num_followers", 3, "record 0: it has 3 followers, but the table ends before them"),
        (0, "num_followers", 8, "record 0: it has 8 followers, but at most 7 are allowed"),
        (1, "num_followers", 1, "record 0: it has 2 followers, but record 1 has some of its own"),
        (2, "src", 1 << 22, "record 0: it has 2 followers, but record 2 reads another box"),
        (2, "extents", [1, 1, 1, 4095], "record 0: it has 2 followers, but record 2 reads another box"),
        (1, "src_strides", [4, 4, 4, 8], "record 0: it has 2 followers, but record 1 reads another box"),
    ],
)
def test_malformed_fans_are_refused(position: int, field: str, value: object, words: str):
    table = make_table([entry(1 << 30), entry(1 << 31), entry(1 << 32)])
    table[field][position] = value
    with pytest.raises(ValueError, match=words):
        _C.check_records(table)


def test_columns_must_belong_together():
    columns = [np.zeros(2, np.int64)] * 9
    with pytest.raises(ValueError, match="don't belong together"):
        _C.build_table(*columns, max_targets=1)
    with pytest.raises(ValueError, match="expected contiguous 1-d arrays of int64"):
        _C.build_table(*columns[:8], np.zeros(2, np.int32), max_targets=1)
