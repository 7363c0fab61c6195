"""Refuse a destination that holds different elements at the same bytes: what is written last would win."""

from collections.abc import Sequence

import numpy as np

from reshard.boxes import ranges
from reshard.copy_table import ITEMSIZES
from reshard.errors import PlanError
from reshard.layout import Entry, Layout
from reshard.pattern import IntArray, Pattern
from reshard.planner_class import BoolArray
from reshard.planner_hazards import are_apart, spans

Part = tuple[Pattern, int]
MOST_ELEMENTS = 1 << 22


def check_no_overlaps(destination: Layout, scope: BoolArray | None = None) -> None:
    """Raise PlanError that names tensors of which a rank holds elements at common bytes of one storage.

    Looks at the ranks in ``scope`` (a mask over ranks; None is every rank). Exact, but for boxes of unlike strides or
    types and more than four million elements that interleave in one storage: those pass.
    """
    touched = [scope is None or bool(scope[pattern.ranks].any()) for pattern in destination.patterns]
    by_storage: dict[str, list[tuple[Entry, int, int]]] = {}
    for entry, index in zip(destination.entries.values(), destination.pattern_of.tolist(), strict=True):
        if touched[index]:
            for slot, storage in enumerate(entry.storages):
                by_storage.setdefault(storage, []).append((entry, index, slot))
    known: dict[tuple[tuple[int, int], ...], tuple[int, int, int] | None] = {}
    found = []
    for storage, parts in by_storage.items():
        key = tuple((index, slot) for _, index, slot in parts)
        if key not in known:
            known[key] = _clash([(entry.pattern, slot) for entry, _, slot in parts], scope)
        clash = known[key]
        if clash is not None:
            first, second, rank = clash
            names = dict.fromkeys((parts[first][0].spec.name, parts[second][0].spec.name))
            found.append(f"{' and '.join(names)} (storage {storage!r} of rank {rank})")
    if found:
        raise PlanError(
            f"the destination holds different elements at the same bytes: {', '.join(found[:8])}"
            f"{'' if len(found) <= 8 else f' and {len(found) - 8} more'}; give each tensor bytes of its own, or, where "
            "they are one tensor, declare a tie (ties=)"
        )


def _clash(parts: Sequence[Part], scope: BoolArray | None) -> tuple[int, int, int] | None:
    """Numbers of two parts of one storage that share bytes on a rank, and the rank; None when there are none."""
    everywhere: BoolArray = np.ones(max(int(pattern.ranks.max(initial=0)) for pattern, _ in parts) + 1, np.bool_)
    chosen = everywhere if scope is None else scope
    rows = [np.flatnonzero((pattern.slots == slot) & chosen[pattern.ranks]) for pattern, slot in parts]
    counts = [len(own) for own in rows]
    if sum(counts) < 2:
        return None
    part = np.repeat(np.arange(len(parts)), counts)
    rank, offset, dtype = (_join(parts, rows, name) for name in ("ranks", "offsets", "dtypes"))
    strides = _wide([pattern.strides for pattern, _ in parts], rows, 0)
    extents = _wide([pattern.stops() - pattern.starts() for pattern, _ in parts], rows, 1)
    low, high = spans(offset, strides, dtype, extents)
    first, second = _meeting(rank, low, high)
    same_kind = (strides[first] == strides[second]).all(axis=1) & (dtype[first] == dtype[second])
    itemsize = ITEMSIZES[dtype]
    clear = same_kind & are_apart(
        (offset[first], extents[first]), (offset[second], extents[second]), strides[first], itemsize[first]
    )
    numel = extents.prod(axis=1)
    for pair in np.flatnonzero(~clear).tolist():
        both = [int(first[pair]), int(second[pair])]
        if max(numel[both]) > MOST_ELEMENTS:
            clashes = bool(same_kind[pair])
        else:
            one, other = (_bytes(offset[row], strides[row], extents[row], itemsize[row]) for row in both)
            clashes = bool(np.isin(one, other).any())
        if clashes:
            return int(part[both[0]]), int(part[both[1]]), int(rank[both[0]])
    return None


def _bytes(offset: np.int64, strides: IntArray, extents: IntArray, itemsize: np.int64) -> IntArray:
    """Every byte of a strided box."""
    found = offset + np.arange(itemsize)
    for stride, extent in zip(strides.tolist(), extents.tolist(), strict=True):
        found = (found[:, None] + np.arange(extent) * stride * itemsize).reshape(-1)
    return found


def _meeting(rank: IntArray, low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs of rows of one rank whose byte spans meet, the one that begins earlier first."""
    order = np.lexsort((high, low, rank))
    rank, low, high = rank[order], low[order], high[order]
    reach = int(high.max(initial=0)) + 1
    ends = np.searchsorted(rank * reach + low, rank * reach + high, side="left")
    counts = np.maximum(ends - np.arange(len(order)) - 1, 0)
    first = np.repeat(np.arange(len(order)), counts)
    second = ranges(np.arange(len(order)) + 1, counts)
    return order[first], order[second]


def _join(parts: Sequence[Part], rows: Sequence[IntArray], name: str) -> IntArray:
    columns = {"ranks": [p.ranks for p, _ in parts], "offsets": [p.offsets for p, _ in parts]}
    columns["dtypes"] = [p.dtypes for p, _ in parts]
    return np.concatenate([column[own] for column, own in zip(columns[name], rows, strict=True)])


def _wide(columns: Sequence[IntArray], rows: Sequence[IntArray], fill: int) -> IntArray:
    """The chosen rows of columns of unlike width, below one another, filled up on the right."""
    width = max(column.shape[1] for column in columns)
    wide = np.full((sum(map(len, rows)), width), fill, np.int64)
    at = 0
    for column, own in zip(columns, rows, strict=True):
        wide[at : at + len(own), : column.shape[1]] = column[own]
        at += len(own)
    return wide
