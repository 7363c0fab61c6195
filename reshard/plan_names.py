"""Which source tensor feeds which destination tensor: names, ties, shapes, dtypes. Every complaint lists its names."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from reshard.dtype import DType
from reshard.errors import PlanError
from reshard.layout import Entry, Layout

Casts = Collection[tuple[DType, DType]] | Literal["floating"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A destination tensor and the source tensor that feeds it."""

    source: Entry
    destination: Entry


def expand_casts(casts: Casts) -> frozenset[tuple[DType, DType]]:
    """Allowed (from, to) pairs; ``"floating"`` is every pair of float32, bfloat16 and float16."""
    if casts == "floating":
        kinds = [dtype for dtype in DType if dtype.is_castable]
        return frozenset((a, b) for a in kinds for b in kinds if a is not b)
    return frozenset((a, b) for a, b in casts if not isinstance(a, str))


def match_names(source: Layout, destination: Layout, *, ignore: Sequence[str]) -> list[Pair]:
    """A pair per destination tensor, sorted by name.

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
    _check_missing([name for name, found in chosen.items() if not found])
    _check_ambiguous({name: found for name, found in chosen.items() if len(found) > 1})
    pairs = [Pair(have[found[0]], wanted[name]) for name, found in chosen.items()]
    used = {pair.source.spec.name for pair in pairs}
    _check_unused([n for n in have if n not in used and not any(fnmatchcase(n, p) for p in ignore)])
    _check_shapes(pairs)
    return pairs


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
            refused += [f"{pair.destination.spec.name} ({a.value} to {b.value})" for pair in group]
    if conflicts:
        raise PlanError(f"source replicas conflict in dtype: {_some(conflicts)}; which one is the truth is not known")
    if refused:
        raise PlanError(
            f"dtype changes that are not allowed: {_some(refused)}; pass them in allow_casts, or match the dtypes"
        )


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
            f"in the source layout "
            "(ties=), or leave all but one name out of it"
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
