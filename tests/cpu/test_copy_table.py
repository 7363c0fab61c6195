"""The copy table's records: their layout, merging, splitting, and what is refused and how."""

import numpy as np
import pytest
import torch
from copy_cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import _C
from reshard.dtype import DType
from reshard.errors import PlanError
from reshard.table import COPY_RECORD, CopyEntry, make_table, num_read_bytes, num_written_bytes

F32, BF16, I64 = DType.FLOAT32, DType.BFLOAT16, DType.INT64


def entry(
    shape, src_strides, dst_strides, *, src=1 << 20, dst=1 << 30, src_dtype=F32, dst_dtype=F32, label=""
) -> CopyEntry:
    return CopyEntry(
        src=src,
        dst=dst,
        shape=shape,
        src_strides=src_strides,
        dst_strides=dst_strides,
        src_dtype=src_dtype,
        dst_dtype=dst_dtype,
        label=label,
    )


def box(record) -> tuple[list[int], list[int], list[int]]:
    return tuple(record[name].tolist() for name in ("extents", "src_strides", "dst_strides"))


def test_record_is_128_bytes_in_the_documented_order():
    assert COPY_RECORD.itemsize == 128
    offsets = {name: COPY_RECORD.fields[name][1] for name in COPY_RECORD.names}
    assert offsets == {
        "src": 0,
        "dst": 8,
        "extents": 16,
        "src_strides": 48,
        "dst_strides": 80,
        "src_dtype": 112,
        "dst_dtype": 113,
        "src_itemsize": 114,
        "dst_itemsize": 116,
        "num_followers": 118,
        "reserved": 120,
    }


def test_contiguous_tensors_become_one_run():
    (record,) = make_table([entry((3, 4, 5), (20, 5, 1), (20, 5, 1), dst_dtype=BF16)])
    assert box(record) == ([1, 1, 1, 60], [4, 4, 4, 4], [2, 2, 2, 2])
    assert (record["src_dtype"], record["dst_dtype"]) == (F32.code, BF16.code)
    assert (record["src_itemsize"], record["dst_itemsize"]) == (4, 2)


def test_dimensions_merge_only_where_both_sides_are_one_run():
    (record,) = make_table([entry((3, 4, 5), (40, 10, 1), (20, 5, 1))])
    assert box(record) == ([1, 1, 12, 5], [4, 4, 40, 4], [4, 4, 20, 4])


def test_the_innermost_dimension_is_the_densest_of_the_destination():
    (record,) = make_table([entry((6, 7), (1, 6), (1, 100))])
    assert box(record) == ([1, 1, 7, 6], [4, 4, 24, 4], [4, 4, 400, 4])


def test_extents_of_one_are_dropped_whatever_their_strides():
    (record,) = make_table([entry((1, 5, 1), (999, 1, 777), (123, 1, 0))])
    assert box(record)[0] == [1, 1, 1, 5]


def test_boxes_of_more_than_four_dimensions_are_split_over_the_smallest():
    shape = (4, 2, 3, 5, 6, 7)
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent + 3)
    table = make_table([entry(shape, strides, strides)])
    assert len(table) == 2 * 3
    assert [record["extents"].tolist() for record in table] == [[4, 5, 6, 7]] * 6
    assert sorted(int(r["src"]) - (1 << 20) for r in table) == sorted(
        4 * (i * strides[1] + j * strides[2]) for i in range(2) for j in range(3)
    )
    assert num_read_bytes(table) == num_written_bytes(table) == 4 * int(np.prod(shape))


def test_empty_entries_leave_no_record_and_a_scalar_leaves_one():
    table = make_table([entry((3, 0), (0, 1), (0, 1), src=0, dst=0), entry((), (), ())])
    assert [record["extents"].tolist() for record in table] == [[1, 1, 1, 1]]
    assert len(make_table([])) == 0
    assert make_table([]).dtype == COPY_RECORD


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (entry((2, 3), (3,), (3, 1)), "must have one number per dimension"),
        (entry((2, -3), (3, 1), (3, 1)), "negative extent"),
        (entry((2, 3), (-3, 1), (3, 1)), "must not be negative; flip the tensor first"),
        (entry((4,), (1,), (1,), dst_dtype=I64), "no cast from float32 to int64"),
        (entry((4,), (1,), (1,), dst_dtype=DType.FLOAT8_E4M3FN), "no cast from float32 to float8_e4m3fn"),
        (entry((4,), (1,), (1,), dst=0), "is a tensor on the meta device?"),
        (entry((4,), (1,), (0,)), "names a byte twice by shape (4,), strides (0,)"),
        (entry((4, 4), (4, 1), (2, 1)), "names a byte twice"),
        (entry((8,), (1,), (1,), dst=(1 << 20) + 16), "reads bytes that it writes"),
    ],
)
def test_refusals_say_what_came_and_what_to_do(bad: CopyEntry, words: str):
    named = CopyEntry(**{name: getattr(bad, name) for name in CopyEntry.__slots__ if name != "label"}, label="a.weight")
    with pytest.raises(PlanError, match=r"copy of 'a.weight'") as caught:
        make_table([named])
    assert words in str(caught.value)


def test_shapes_of_tensors_must_agree():
    with pytest.raises(PlanError, match=r"copy of 'w': destination shape \(2, 3\) and source shape \(3, 2\) differ"):
        CopyEntry.from_tensors(torch.zeros(2, 3), torch.zeros(3, 2), label="w")


def test_overlap_between_entries_names_both():
    entries = [
        entry((8,), (1,), (1,), label="q"),
        entry((8,), (1,), (1,), src=1 << 22, dst=(1 << 30) + 28, label="k"),
    ]
    with pytest.raises(PlanError, match=r"copy of 'q' \(entry 0\) and copy of 'k' \(entry 1\) write the same bytes"):
        make_table(entries)
    assert len(make_table(entries, check_overlap=False)) == 2


def test_reading_what_another_entry_writes_is_refused():
    entries = [entry((8,), (1,), (1,), label="a"), entry((8,), (1,), (1,), src=1 << 30, dst=1 << 31, label="b")]
    with pytest.raises(PlanError, match=r"copy of 'b' \(entry 1\) reads bytes that copy of 'a' \(entry 0\) writes"):
        make_table(entries)


def test_column_slices_of_one_matrix_are_disjoint_though_their_ranges_interleave():
    base = 1 << 30
    columns = [entry((64, 32), (32, 1), (128, 1), src=1 << (20 + i), dst=base + 4 * 32 * i) for i in range(4)]
    assert len(make_table(columns)) == 4
    wider = entry((64, 33), (33, 1), (128, 1), src=1 << 25, dst=base + 4 * 32)
    with pytest.raises(PlanError, match=r"\(entry 0\) and copy \(entry 1\) write the same bytes"):
        make_table([wider, columns[2]])


def test_sources_may_overlap():
    assert len(make_table([entry((8,), (1,), (1,)), entry((8,), (1,), (1,), dst=1 << 31)])) == 2


@st.composite
def small_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    strides, span = [], 1
    for extent in reversed(shape):
        strides.insert(0, span + draw(st.integers(0, 5)))
        span = strides[0] * extent
    return shape, tuple(strides), draw(st.integers(0, 40))


def elements_of(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> set[int]:
    return {offset + int(np.dot(index, strides)) for index in np.ndindex(*shape)}


@settings(max_examples=400, deadline=None)
@given(small_boxes(), small_boxes(), st.booleans())
def test_overlap_is_exact(a, b, with_source: bool):
    """Against the sets of bytes themselves, for destination with destination and source with destination."""
    far = iter(1 << shift for shift in range(40, 44))
    first = entry(a[0], a[1], a[1], src=next(far), dst=(1 << 30) + 4 * a[2])
    if with_source:
        second = entry(b[0], b[1], b[1], src=(1 << 30) + 4 * b[2], dst=next(far))
    else:
        second = entry(b[0], b[1], b[1], src=next(far), dst=(1 << 30) + 4 * b[2])
    table = make_table([first, second], check_overlap=False)
    found = _C.find_overlap(table)
    expected = bool(elements_of(*a) & elements_of(*b))
    assert (found is not None) == expected
    if found:
        assert found == ((1, 0, True) if with_source else (0, 1, False))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_drawn_case_makes_well_formed_records(case):
    made = make_table(
        [
            entry(
                case.shape,
                case.src.strides,
                case.dst.strides,
                src=(1 << 40) + case.src.offset_bytes,
                dst=(1 << 41) + case.dst.offset_bytes,
                src_dtype=case.src_dtype,
                dst_dtype=case.dst_dtype,
            )
        ]
    )
    _C.check_records(made)
    assert num_written_bytes(made) == int(np.prod(case.shape)) * case.dst_dtype.itemsize


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("extents", [1, 1, 0, 4], "extent 0 is below 1"),
        ("src_strides", [4, 4, 4, -4], "a stride is negative"),
        ("dst", 0, "an address is null"),
        ("dst_dtype", I64.code, "there is no cast from dtype code 0 to code 5"),
        ("dst_itemsize", 2, "item sizes 4 and 2 don't fit dtype codes 0 and 0"),
        ("reserved", 1, "a reserved field is not zero"),
        ("dst", 1 << 22, "its source and destination overlap"),
    ],
)
def test_the_extension_refuses_malformed_records(field: str, value: object, words: str):
    table = make_table([entry((4,), (1,), (1,)), entry((4,), (1,), (1,), src=1 << 22, dst=1 << 31)])
    table[field][1] = value
    with pytest.raises(ValueError, match=f"copy table record 1: {words}"):
        _C.check_records(table)


def test_the_extension_refuses_other_arrays():
    with pytest.raises(ValueError, match="expected a contiguous 1-d array of 128-byte copy records"):
        _C.copy_host(np.zeros((4, 4)))
    table = make_table([entry((4,), (1,), (1,)), entry((4,), (1,), (1,), dst=1 << 31)] * 1)
    with pytest.raises(ValueError, match="expected a contiguous 1-d array"):
        _C.check_records(np.concatenate([table, table])[::2])
