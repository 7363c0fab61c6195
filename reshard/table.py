"""The copy table: strided copies as 128-byte records, which the host, CUDA and Triton executors and the oracle read.

A record is a box of at most four dimensions, in bytes, between absolute addresses; ``COPY_RECORD`` mirrors
``CopyRecord`` of csrc/copy_table.h. Executors may run records in any order and in parallel, so a table is refused if a
byte is written twice, or written by one record and read by another.

A source box that several destinations need is a *fan*: records side by side, each complete in itself, whose first one
says how many followers it has. Executors read and cast it once and write it to all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard import _C
from reshard.dtype import ITEMSIZE_BY_CODE, DType
from reshard.errors import PlanError

if TYPE_CHECKING:
    import torch

NUM_DIMS = 4
MAX_TARGETS = 8
"""Destinations that one read of a source box serves at most: a fan's first record and its followers."""

COPY_RECORD = np.dtype(
    [
        ("src", np.uint64),
        ("dst", np.uint64),
        ("extents", np.int64, NUM_DIMS),
        ("src_strides", np.int64, NUM_DIMS),
        ("dst_strides", np.int64, NUM_DIMS),
        ("src_dtype", np.uint8),
        ("dst_dtype", np.uint8),
        ("src_itemsize", np.uint16),
        ("dst_itemsize", np.uint16),
        ("num_followers", np.uint16),
        ("reserved", np.uint64),
    ]
)

CopyTable = npt.NDArray[np.void]
Integers = npt.NDArray[np.int64]
_Columns = tuple[Integers, Integers, Integers, Integers, Integers, Integers, Integers, Integers]
_CODES = {dtype: dtype.code for dtype in DType}
_ITEMSIZES = np.array(ITEMSIZE_BY_CODE, dtype=np.int64)
_IS_CASTABLE = np.array([dtype.is_castable for dtype in DType])


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEntry:
    """One box to copy, cast on the way where the dtypes differ.

    Attributes:
        src: absolute address of the box's first source element.
        dst: absolute address of its first destination element.
        shape: extents of the box; any number of dimensions, a zero makes the entry empty.
        src_strides: source strides in elements, at least 0 (0 repeats an element).
        dst_strides: destination strides in elements.
        src_dtype: type of the source elements.
        dst_dtype: type of the destination elements: the same, or any two of float32, bfloat16, float16.
        label: name for error messages.
    """

    src: int
    dst: int
    shape: Sequence[int]
    src_strides: Sequence[int]
    dst_strides: Sequence[int]
    src_dtype: DType
    dst_dtype: DType
    label: str = ""

    @classmethod
    def from_tensors(cls, dst: torch.Tensor, src: torch.Tensor, *, label: str = "") -> CopyEntry:
        """The entry for ``dst.copy_(src)``: equal shapes, any strides. Both tensors must outlive the table's use.

        Raises:
            PlanError: the shapes differ.
        """
        if dst.shape != src.shape:
            raise PlanError(
                f"{_named(label)}: destination shape {tuple(dst.shape)} and source shape {tuple(src.shape)} differ; "
                "narrow or expand the source first"
            )
        return cls(
            src=src.data_ptr(),
            dst=dst.data_ptr(),
            shape=tuple(dst.shape),
            src_strides=src.stride(),
            dst_strides=dst.stride(),
            src_dtype=DType.parse(str(src.dtype)),
            dst_dtype=DType.parse(str(dst.dtype)),
            label=label,
        )


def make_table(
    entries: Iterable[CopyEntry], *, check_overlap: bool = True, max_targets: int = MAX_TARGETS
) -> CopyTable:
    """Return the copy table of ``entries``: a 1-d array of ``COPY_RECORD``.

    Dimensions of extent 1 go, the rest are ordered so that the innermost has the smallest destination stride,
    neighbours that form one run are merged, and a box that still has more than four is split into several records.
    Empty entries leave no record. Records are in the order of their entries, except that entries of one source box and
    cast, to destinations that can be written in the same way, are gathered into fans at the place of the first.

    Args:
        entries: what to copy.
        check_overlap: also prove that no byte is written twice, or both read and written. About 1 us a record.
        max_targets: destinations of a fan at most, up to ``MAX_TARGETS``; 1 keeps every entry for itself.

    Raises:
        PlanError: names the entry: no cast between the dtypes, shapes and strides of different lengths, a negative
            extent or stride, a null address, or an overlap.
    """
    given = list(entries)
    columns = _columns(given)
    records, owners = _C.build_table(*columns, _ITEMSIZES, max_targets=max_targets)
    table: CopyTable = np.frombuffer(records, dtype=COPY_RECORD)
    if check_overlap:
        _refuse_overlap(table, given, np.frombuffer(owners, dtype=np.int64))
    return table


def num_written_bytes(table: CopyTable) -> int:
    """Bytes that one run of ``table`` writes."""
    return int((table["extents"].prod(axis=1) * table["dst_itemsize"]).sum())


def num_read_bytes(table: CopyTable) -> int:
    """Bytes that one run of ``table`` reads: a fan's source once; an element repeated by a zero stride each time."""
    fan_sizes = table["num_followers"].astype(np.int64)
    heads = np.ones(len(table), dtype=bool)
    for head in np.flatnonzero(fan_sizes):
        heads[head + 1 : head + 1 + fan_sizes[head]] = False
    return int((table["extents"].prod(axis=1) * table["src_itemsize"])[heads].sum())


def _named(label: str) -> str:
    return f"copy of {label!r}" if label else "copy"


def _check_entry(entry: CopyEntry) -> None:
    name = _named(entry.label)
    if not len(entry.shape) == len(entry.src_strides) == len(entry.dst_strides):
        raise PlanError(
            f"{name}: shape {tuple(entry.shape)}, source strides {tuple(entry.src_strides)} and destination strides "
            f"{tuple(entry.dst_strides)} must have one number per dimension each"
        )
    if any(extent < 0 for extent in entry.shape):
        raise PlanError(f"{name}: shape {tuple(entry.shape)} has a negative extent")
    if any(stride < 0 for stride in (*entry.src_strides, *entry.dst_strides)):
        raise PlanError(
            f"{name}: strides {tuple(entry.src_strides)} -> {tuple(entry.dst_strides)} must not "
            "be negative; flip the tensor first"
        )
    if entry.src_dtype is not entry.dst_dtype and not (entry.src_dtype.is_castable and entry.dst_dtype.is_castable):
        raise PlanError(
            f"{name}: there is no cast from {entry.src_dtype.value} to {entry.dst_dtype.value}; a table casts between "
            "float32, bfloat16 and float16, and copies equal types of any kind"
        )
    if 0 not in entry.shape and (entry.src <= 0 or entry.dst <= 0):
        raise PlanError(
            f"{name}: addresses {entry.src} -> {entry.dst} must be real memory (is a tensor on the meta device?)"
        )


def _columns(entries: Sequence[CopyEntry]) -> _Columns:
    """The entries as ``_C.build_table`` takes them; PlanError for the first that is wrong."""
    shapes = [entry.shape for entry in entries]
    strides = [entry.src_strides for entry in entries], [entry.dst_strides for entry in entries]
    num_dims, *num_strides = (_integers(map(len, side)) for side in (shapes, *strides))
    if not all(np.array_equal(num_dims, num) for num in num_strides):
        for entry in entries:
            _check_entry(entry)
    first_dims = np.concatenate([np.zeros(1, np.int64), np.cumsum(num_dims)])
    src, dst = _integers(entry.src for entry in entries), _integers(entry.dst for entry in entries)
    extents, src_strides, dst_strides = (_integers(itertools.chain.from_iterable(side)) for side in (shapes, *strides))
    src_dtypes = _integers(_CODES[entry.src_dtype] for entry in entries)
    dst_dtypes = _integers(_CODES[entry.dst_dtype] for entry in entries)
    owners = np.repeat(np.arange(len(entries)), num_dims)
    is_empty = np.zeros(len(entries), dtype=bool)
    is_empty[owners[extents == 0]] = True
    wrong = (src_dtypes != dst_dtypes) & ~(_IS_CASTABLE[src_dtypes] & _IS_CASTABLE[dst_dtypes])
    wrong |= ~is_empty & ((src <= 0) | (dst <= 0))
    wrong[owners[(extents < 0) | (src_strides < 0) | (dst_strides < 0)]] = True
    for idx in np.flatnonzero(wrong):
        _check_entry(entries[int(idx)])
    return src, dst, first_dims, extents, src_strides, dst_strides, src_dtypes, dst_dtypes


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, dtype=np.int64)


def _refuse_overlap(table: CopyTable, entries: Sequence[CopyEntry], owners: Integers) -> None:
    overlap = _C.find_overlap(table)
    if overlap is None:
        return
    first_idx, second_idx, with_source = overlap
    first, second = entries[owners[first_idx]], entries[owners[second_idx]]
    first_name = f"{_named(first.label)} (entry {owners[first_idx]})"
    second_name = f"{_named(second.label)} (entry {owners[second_idx]})"
    if with_source:
        what = f"{first_name} reads bytes that {'it' if first is second else second_name} writes"
    elif first_idx == second_idx:
        what = f"{first_name} names a byte twice by shape {tuple(first.shape)}, strides {tuple(first.dst_strides)}"
    else:
        what = f"{first_name} and {second_name} write the same bytes"
    raise PlanError(f"{what}; copies run in any order, so the result would be undefined: make the boxes disjoint")
