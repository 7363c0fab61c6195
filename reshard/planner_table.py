"""Turn the copies of each class, given by holding and box, into one CopyTable with addresses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reshard.copy_table import COLUMN_TYPES, ITEMSIZES, WIDE_COLUMNS, CopyTable
from reshard.layout import Entry
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


@dataclass(frozen=True, slots=True, eq=False)
class _SideEntries:
    """One side of a class: its distinct patterns, which of them each tensor has, and storage numbers [tensor, slot]."""

    patterns: tuple[Pattern, ...]
    pattern_of: IntArray
    storages: IntArray

    def slots_of(self, tensor: IntArray, row: IntArray) -> IntArray:
        """Slots of holdings, given by tensor and row of its pattern."""
        found: IntArray = np.stack([pattern.slots for pattern in self.patterns])[self.pattern_of[tensor], row]
        return found

    def stacked(self) -> tuple[IntArray, IntArray, IntArray]:
        """Slots, byte offsets [pattern, holding] and strides [pattern, holding, ndim]."""
        return (
            np.stack([pattern.slots for pattern in self.patterns]),
            np.stack([pattern.offsets for pattern in self.patterns]),
            np.stack([pattern.strides for pattern in self.patterns]),
        )


@dataclass(slots=True)
class TableBuilder:
    """Collects classes; ``finish`` sorts and numbers. ``same_memory``: equal addresses of both sides are the same
    bytes.
    """

    same_memory: bool
    _names: list[str] = field(default_factory=list)
    _storages: dict[str, int] = field(default_factory=dict)
    _parts: list[dict[str, IntArray]] = field(default_factory=list)

    def add(self, pairs: Sequence[Pair], copies: ClassCopies) -> None:
        """Append the copies of one class, whose pairs differ at most in addresses."""
        names = self._name_table(pairs)
        if not len(copies.tensor):
            return
        sources = self._side([pair.source for pair in pairs])
        destinations = self._side([pair.destination for pair in pairs])
        dst = _addresses(destinations, copies, copies.dst)
        src = _addresses(sources, copies, np.where(copies.hop == 0, copies.src, 0))
        if (copies.hop > 0).any():
            passed_on = _addresses(destinations, copies, np.where(copies.hop > 0, copies.src, 0))
            src = _choose(copies.hop > 0, passed_on, src)
        aliases = self._aliases(copies, src, dst)
        first_dtype = int(sources.patterns[0].dtypes[0])
        name_idx = names[copies.tensor, 0 if names.shape[1] == 1 else destinations.slots_of(copies.tensor, copies.dst)]
        self._parts.append(_columns(name_idx, copies, src, dst, aliases, first_dtype))

    def _name_table(self, pairs: Sequence[Pair]) -> IntArray:
        """Name numbers per tensor and slot; one column where no tensor has several names."""
        first = len(self._names)
        if not any(pair.slot_names for pair in pairs):
            self._names += [pair.destination.spec.name for pair in pairs]
            return np.arange(first, len(self._names), dtype=np.int64)[:, None]
        self._names += [name for pair in pairs for name in pair.names]
        number = {name: first + index for index, name in enumerate(self._names[first:])}
        width = max(len(pair.destination.storages) for pair in pairs)
        rows = [
            [number[pair.name_of(min(slot, len(pair.destination.storages) - 1))] for slot in range(width)]
            for pair in pairs
        ]
        return np.array(rows, np.int64)

    def _side(self, entries: Sequence[Entry]) -> "_SideEntries":
        patterns = {entry.pattern.key: entry.pattern for entry in entries}
        number = {key: index for index, key in enumerate(patterns)}
        return _SideEntries(
            patterns=tuple(patterns.values()),
            pattern_of=np.array([number[entry.pattern.key] for entry in entries], np.int64),
            storages=self._storage_table([entry.storages for entry in entries]),
        )

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
        typed: dict[str, Any] = {
            name: np.ascontiguousarray(columns.pop(name)[order], dtype=kind) for name, kind in COLUMN_TYPES.items()
        }
        return CopyTable(names=names, storages=storages, **typed)


def _addresses(side: _SideEntries, copies: ClassCopies, row: IntArray) -> _Addresses:
    first = side.patterns[0]
    which = side.pattern_of[copies.tensor]
    slots, offsets, strides = side.stacked()
    dtype, own_strides = first.dtypes[row], strides[which, row]
    steps = copies.start - first.boxes_start[first.box_of[row]]
    offset = offsets[which, row] + (steps * own_strides).sum(axis=1) * ITEMSIZES[dtype]
    return _Addresses(side.storages[copies.tensor, slots[which, row]], offset, own_strides, dtype, first.ranks[row])


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
    """All parts in one set of columns; the parts are emptied as they go, to keep the peak of memory low."""
    width = max((part["start"].shape[1] for part in parts), default=0)
    total = sum(len(part["name_idx"]) for part in parts)
    columns: dict[str, IntArray] = {}
    for name, kind in COLUMN_TYPES.items():
        column = np.zeros((total, width) if name in WIDE_COLUMNS else total, kind)
        at = 0
        for part in parts:
            values = part.pop(name)
            if values.ndim == 2:
                column[at : at + len(values), : values.shape[1]] = values
            else:
                column[at : at + len(values)] = values
            at += len(values)
        columns[name] = column
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
