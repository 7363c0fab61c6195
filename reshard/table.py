"""The copy table: strided copies as 128-byte records, which the host, CUDA and Triton executors and the oracle read.

A record is a box of at most four dimensions, in bytes, between absolute addresses; ``COPY_RECORD`` mirrors
``CopyRecord`` of csrc/copy_table.h. Executors may run records in any order and in parallel, so a table is refused if a
byte is written twice, or written by one record and read by another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard import _C
from reshard.dtype import DType
from reshard.errors import PlanError

if TYPE_CHECKING:
    import torch

NUM_DIMS = 4

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
        ("reserved0", np.uint16),
        ("reserved1", np.uint64),
    ]
)

CopyTable = npt.NDArray[np.void]


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


@dataclass(frozen=True, slots=True)
class _Dim:
    extent: int
    src_bytes: int
    dst_bytes: int

    def steps_over(self, inner: _Dim) -> bool:
        """Whether one step of this dimension is a whole run of ``inner`` on both sides, so that the two are one."""
        return self.src_bytes == inner.extent * inner.src_bytes and self.dst_bytes == inner.extent * inner.dst_bytes


def make_table(entries: Iterable[CopyEntry], *, check_overlap: bool = True) -> CopyTable:
    """Return the copy table of ``entries``, in order: a 1-d array of ``COPY_RECORD``.

    Dimensions of extent 1 go, the rest are ordered so that the innermost has the smallest destination stride,
    neighbours that form one run are merged, and a box that still has more than four is split into several records.
    Empty entries leave no record.

    Args:
        entries: what to copy.
        check_overlap: also prove that no byte is written twice, or both read and written. About 1 us a record.

    Raises:
        PlanError: names the entry: no cast between the dtypes, shapes and strides of different lengths, a negative
            extent or stride, a null address, or an overlap.
    """
    given = list(entries)
    owners: list[int] = []
    rows: list[tuple[object, ...]] = []
    for idx, entry in enumerate(given):
        _check_entry(entry)
        records = [] if 0 in entry.shape else list(_records(entry))
        owners += [idx] * len(records)
        rows += records
    table: CopyTable = np.array(rows, dtype=COPY_RECORD)
    if check_overlap:
        _refuse_overlap(table, given, owners)
    return table


def num_written_bytes(table: CopyTable) -> int:
    """Bytes that one run of ``table`` writes."""
    return int((table["extents"].prod(axis=1) * table["dst_itemsize"]).sum())


def num_read_bytes(table: CopyTable) -> int:
    """Bytes that one run of ``table`` reads; a source element repeated by a zero stride counts each time."""
    return int((table["extents"].prod(axis=1) * table["src_itemsize"]).sum())


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


def _dims(entry: CopyEntry) -> list[_Dim]:
    src_itemsize, dst_itemsize = entry.src_dtype.itemsize, entry.dst_dtype.itemsize
    dims = [
        _Dim(extent, src * src_itemsize, dst * dst_itemsize)
        for extent, src, dst in zip(entry.shape, entry.src_strides, entry.dst_strides, strict=True)
        if extent != 1
    ]
    dims.sort(key=lambda dim: (dim.dst_bytes, dim.src_bytes), reverse=True)
    merged: list[_Dim] = []
    for dim in dims:
        if merged and merged[-1].steps_over(dim):
            dim = _Dim(merged.pop().extent * dim.extent, dim.src_bytes, dim.dst_bytes)
        merged.append(dim)
    return merged


def _records(entry: CopyEntry) -> Iterator[tuple[object, ...]]:
    dims = _dims(entry)
    outer = sorted(dims, key=lambda dim: dim.extent)[: max(0, len(dims) - NUM_DIMS)]
    inner = list(dims)
    for dim in outer:
        inner.remove(dim)
    one = _Dim(1, entry.src_dtype.itemsize, entry.dst_dtype.itemsize)
    box = [one] * (NUM_DIMS - len(inner)) + inner
    types = (entry.src_dtype.code, entry.dst_dtype.code, entry.src_dtype.itemsize, entry.dst_dtype.itemsize, 0, 0)
    extents = tuple(dim.extent for dim in box)
    src_strides = tuple(dim.src_bytes for dim in box)
    dst_strides = tuple(dim.dst_bytes for dim in box)
    for index in itertools.product(*(range(dim.extent) for dim in outer)):
        src = entry.src + sum(i * dim.src_bytes for i, dim in zip(index, outer, strict=True))
        dst = entry.dst + sum(i * dim.dst_bytes for i, dim in zip(index, outer, strict=True))
        yield (src, dst, extents, src_strides, dst_strides, *types)


def _refuse_overlap(table: CopyTable, entries: Sequence[CopyEntry], owners: Sequence[int]) -> None:
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
