"""Turn the copies of each class, given by holding and box, into one CopyTable with addresses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from reshard.copy_table import COLUMN_TYPES, ITEMSIZES, WIDE_COLUMNS, CopyTable
from reshard.pattern import IntArray, Pattern
from reshard.plan_names import Pair
from reshard.planner_class import ClassCopies


@dataclass(frozen=True, slots=True, eq=False)
class _Addresses:
    """Per copy: storage number, byte offset, strides [num, ndim], dtype code, rank."""

    storage: IntArray
    offset: IntArray
    strides: IntArray
    dtype: IntArray
    rank: IntArray


@dataclass(slots=True)
class TableBuilder:
    """Collects classes; ``finish`` sorts and numbers. ``same_memory``: equal addresses of both sides are the same
    bytes.
    """

    same_memory: bool
    _names: list[str] = field(default_factory=list)
    _storages: dict[str, int] = field(default_factory=dict)
    _parts: list[dict[str, IntArray]] = field(default_factory=list)

    def add(self, pairs: Sequence[Pair], source: Pattern, destination: Pattern, copies: ClassCopies) -> None:
        """Append the copies of one class."""
        first_name = len(self._names)
        self._names += [pair.destination.spec.name for pair in pairs]
        if not len(copies.tensor):
            return
        sources = self._storage_table([pair.source.storages for pair in pairs])
        destinations = self._storage_table([pair.destination.storages for pair in pairs])
        dst = _addresses(destination, destinations, copies, copies.dst)
        src = _addresses(source, sources, copies, np.where(copies.hop == 0, copies.src, 0))
        if (copies.hop > 0).any():
            passed_on = _addresses(destination, destinations, copies, np.where(copies.hop > 0, copies.src, 0))
            src = _choose(copies.hop > 0, passed_on, src)
        aliases = self._aliases(copies, src, dst)
        first_dtype = int(source.dtypes[0])
        self._parts.append(_columns(first_name + copies.tensor, copies, src, dst, aliases, first_dtype))

    def _storage_table(self, storages: Sequence[Sequence[str]]) -> IntArray:
        """Storage numbers per tensor and slot."""
        numbers = self._storages
        rows = [[numbers.setdefault(name, len(numbers)) for name in names] for names in storages]
        width = max(map(len, rows))
        return np.array([row + [0] * (width - len(row)) for row in rows], np.int64).reshape(len(rows), width)

    def _aliases(self, copies: ClassCopies, src: _Addresses, dst: _Addresses) -> IntArray:
        if not self.same_memory:
            return np.zeros(len(copies.hop), np.int64)
        same = (copies.hop == 0) & (src.rank == dst.rank) & (src.storage == dst.storage)
        same &= (src.offset == dst.offset) & (src.dtype == dst.dtype)
        single = copies.stop - copies.start == 1
        alias: IntArray = (same & (single | (src.strides == dst.strides)).all(axis=1)).astype(np.int64)
        return alias

    def finish(self) -> CopyTable:
        """The table: by hop, destination rank, name, box; names and storages sorted, so that equal plans have equal
        columns.
        """
        columns = _stack(self._parts)
        names, name_of = _sorted_numbers(self._names)
        storages, storage_of = _sorted_numbers(list(self._storages))
        columns["name_idx"] = name_of[columns["name_idx"]]
        columns["src_storage"] = storage_of[columns["src_storage"]]
        columns["dst_storage"] = storage_of[columns["dst_storage"]]
        order = _order(columns)
        typed = {
            name: np.ascontiguousarray(columns.pop(name)[order].astype(kind)) for name, kind in COLUMN_TYPES.items()
        }
        return CopyTable(names=names, storages=storages, **typed)


def _addresses(pattern: Pattern, storages: IntArray, copies: ClassCopies, row: IntArray) -> _Addresses:
    dtype, strides = pattern.dtypes[row], pattern.strides[row]
    steps = copies.start - pattern.boxes_start[pattern.box_of[row]]
    offset = pattern.offsets[row] + (steps * strides).sum(axis=1) * ITEMSIZES[dtype]
    return _Addresses(storages[copies.tensor, pattern.slots[row]], offset, strides, dtype, pattern.ranks[row])


def _choose(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], yes: _Addresses, no: _Addresses) -> _Addresses:
    return _Addresses(
        storage=np.where(mask, yes.storage, no.storage),
        offset=np.where(mask, yes.offset, no.offset),
        strides=np.where(mask[:, None], yes.strides, no.strides),
        dtype=np.where(mask, yes.dtype, no.dtype),
        rank=np.where(mask, yes.rank, no.rank),
    )


def _columns(
    name_idx: IntArray, copies: ClassCopies, src: _Addresses, dst: _Addresses, alias: IntArray, first_dtype: int
) -> dict[str, IntArray]:
    narrow = ITEMSIZES[first_dtype] < ITEMSIZES[dst.dtype]
    return {
        "name_idx": name_idx,
        "ndim": np.full(len(name_idx), copies.start.shape[1], np.int64),
        "src_rank": src.rank,
        "dst_rank": dst.rank,
        "hop": copies.hop,
        "alias": alias,
        "start": copies.start,
        "stop": copies.stop,
        "src_storage": src.storage,
        "src_offset": src.offset,
        "src_strides": src.strides,
        "src_dtype": src.dtype,
        "dst_storage": dst.storage,
        "dst_offset": dst.offset,
        "dst_strides": dst.strides,
        "dst_dtype": dst.dtype,
        "wire_dtype": np.where(narrow, first_dtype, dst.dtype),
    }


def _stack(parts: Sequence[dict[str, IntArray]]) -> dict[str, IntArray]:
    width = max((part["start"].shape[1] for part in parts), default=0)
    columns: dict[str, IntArray] = {}
    for name in COLUMN_TYPES:
        if name in WIDE_COLUMNS:
            padded = [np.pad(part[name], ((0, 0), (0, width - part[name].shape[1]))) for part in parts]
            columns[name] = np.concatenate([np.zeros((0, width), np.int64), *padded])
        else:
            columns[name] = np.concatenate([np.zeros(0, np.int64), *(part[name] for part in parts)])
        for part in parts:
            del part[name]
    return columns


def _sorted_numbers(items: Sequence[str]) -> tuple[tuple[str, ...], IntArray]:
    order = sorted(range(len(items)), key=items.__getitem__)
    number = np.zeros(len(items), np.int64)
    number[order] = np.arange(len(items))
    return tuple(items[index] for index in order), number


def _order(columns: dict[str, IntArray]) -> IntArray:
    start = columns["start"]
    boxes = [start[:, dim] for dim in reversed(range(start.shape[1]))]
    keys = [columns["dst_offset"], columns["dst_storage"], *boxes, columns["name_idx"], columns["dst_rank"]]
    order: IntArray = np.lexsort((*keys, columns["hop"]))
    return order
