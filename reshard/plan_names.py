"""Which source tensor feeds which destination tensor: names, ties, shapes, dtypes. Every complaint lists its names."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from reshard.dtype import DType
from reshard.errors import PlanError
from reshard.layout import Entry, Layout
from reshard.pattern import Row, pattern_from_rows, pattern_rows

Casts = Collection[tuple[DType, DType]] | Literal["floating"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A destination tensor and the source tensor that feeds it.

    Where one source tensor feeds several of the destination's, which are tied in the source, they are one pair, so
    that a rank which has them all receives the bytes once: ``destination`` has the holdings of all, and ``slot_names``
    says of which tensor each of its slots is. Else that is empty.
    """

    source: Entry
    destination: Entry
    slot_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The destination tensors, without repetition."""
        return tuple(dict.fromkeys(self.slot_names)) or (self.destination.spec.name,)

    def name_of(self, slot: int) -> str:
        """The destination tensor that a slot of ``destination`` is of."""
        return self.slot_names[slot] if self.slot_names else self.destination.spec.name


def expand_casts(casts: Casts) -> frozenset[tuple[DType, DType]]:
    """Allowed (from, to) pairs; ``"floating"`` is every pair of float32, bfloat16 and float16."""
    if casts == "floating":
        kinds = [dtype for dtype in DType if dtype.is_castable]
        return frozenset((a, b) for a in kinds for b in kinds if a is not b)
    return frozenset((a, b) for a, b in casts if not isinstance(a, str))


def match_names(source: Layout, destination: Layout, *, ignore: Sequence[str]) -> list[Pair]:
    """The destination's tensors with what feeds them, sorted by name.

    Raises PlanError when a destination tensor has no source, when the source holds tensors that nobody wants and
    ``ignore`` (names or shell patterns) does not cover, when a tied destination has several different sources, or
    shapes differ.
    """
    further: dict[str, list[str]] = {}
    for name, target in destination.ties.items():
        further.setdefault(target, []).append(name)
    have, wanted = source.entries, destination.entries
    chosen = {
        name: [name] if name in have and name not in further else _sources_of(source, [name, *further.get(name, ())])
        for name in wanted
    }
    for name, found in chosen.items():
        if len(found) > 1:
            chosen[name] = [n for n in found if not _is_ignored(n, ignore)] or found
    _check_missing([name for name, found in chosen.items() if not found])
    _check_ambiguous({name: found for name, found in chosen.items() if len(found) > 1})
    pairs = [Pair(have[found[0]], wanted[name]) for name, found in chosen.items()]
    used = {pair.source.spec.name for pair in pairs}
    _check_unused([name for name in have if name not in used and not _is_ignored(name, ignore)])
    _check_shapes(pairs)
    return pairs if len(used) == len(pairs) else _joined(pairs)


def check_dtypes(groups: Sequence[Sequence[Pair]], casts: frozenset[tuple[DType, DType]]) -> None:
    """PlanError when replicas of a source tensor differ in dtype, or a dtype change is not allowed.

    The pairs of one group have equal patterns.
    """
    conflicts: list[str] = []
    refused: list[str] = []
    for group in groups:
        held = [DType.from_code(code) for code in np.unique(group[0].source.pattern.dtypes).tolist()]
        wanted = [DType.from_code(code) for code in np.unique(group[0].destination.pattern.dtypes).tolist()]
        if len(held) > 1:
            told = ", ".join(dtype.value for dtype in held)
            conflicts += [f"{pair.source.spec.name} ({told})" for pair in group]
        for a, b in ((a, b) for a in held for b in wanted if a is not b and (a, b) not in casts):
            refused += [f"{', '.join(pair.names)} ({a.value} to {b.value})" for pair in group]
    if conflicts:
        raise PlanError(f"source replicas conflict in dtype: {_some(conflicts)}; which one is the truth is not known")
    if refused:
        raise PlanError(
            f"dtype changes that are not allowed: {_some(refused)}; pass them in allow_casts, or match the dtypes"
        )


def _joined(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs with those of one source tensor made one."""
    by_source: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_source.setdefault(pair.source.spec.name, []).append(pair)
    return [members[0] if len(members) == 1 else _join(members) for members in by_source.values()]


def _join(pairs: Sequence[Pair]) -> Pair:
    rows: list[Row] = []
    storages: list[str] = []
    names: list[str] = []
    for pair in pairs:
        entry, first = pair.destination, len(storages)
        rows += [(*row[:3], row[3] + first, *row[4:]) for row in pattern_rows(entry.pattern)]
        storages += entry.storages
        names += [entry.spec.name] * len(entry.storages)
    spec = pairs[0].destination.spec
    joined = Entry(spec, pattern_from_rows(spec.shape, rows), tuple(storages))
    return Pair(pairs[0].source, joined, tuple(names))


def _is_ignored(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _sources_of(source: Layout, names: Sequence[str]) -> list[str]:
    found = (source.resolve(name) for name in names)
    return list(dict.fromkeys(name for name in found if name is not None))


def _check_missing(names: Sequence[str]) -> None:
    if names:
        raise PlanError(
            f"the source has none of these tensors that the destination needs: {_some(names)}; give them "
            f"their canonical names "
            "on both sides, or leave them out of the destination layout"
        )


def _check_ambiguous(found: dict[str, list[str]]) -> None:
    if found:
        told = [f"{name} <- {', '.join(sources)}" for name, sources in found.items()]
        raise PlanError(
            f"the destination ties tensors that the source holds separately: {_some(told)}; declare the tie "
            f"in the source layout (ties=), or pass all but one name in ignore="
        )


def _check_unused(names: Sequence[str]) -> None:
    if names:
        raise PlanError(
            f"the source holds tensors that the destination does not know: {_some(names)}; rename them, or "
            f"pass them in ignore= "
            "if they are not meant to travel"
        )


def _check_shapes(pairs: Sequence[Pair]) -> None:
    wrong = [
        f"{pair.destination.spec.name} {list(pair.source.spec.shape)} to {list(pair.destination.spec.shape)}"
        for pair in pairs
        if pair.source.spec.shape != pair.destination.spec.shape
    ]
    if wrong:
        raise PlanError(
            f"global shapes differ: {_some(wrong)}; both layouts must use the checkpoint's own shape (padding "
            f"is no part of it)"
        )


def _some(items: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
