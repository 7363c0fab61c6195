"""Parts: a Plan's tensors cut into groups that travel one by one, in the order in which generation needs them.

A part may be pushed as soon as its own training weights are final, and is waited for alone. Tensors belong to one part
whole, so whatever one part's copies pass on was brought by the same part.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from reshard.errors import PlanError

_LAYER = re.compile(r"^(.*?)(?:^|\.)(\d+)(?:\.|$)")
_FIRST = "embed"


@dataclass(frozen=True, slots=True)
class Parts:
    """The canonical tensor names of each part. Equal on every rank of a transition."""

    names: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, tensors: Iterable[str], patterns: Sequence[Sequence[str]]) -> Parts:
        """Sort `tensors` into a part for each entry of `patterns`: names, or shell patterns such as ``*.layers.0.*``.

        Raises:
            PlanError: a tensor is in no part or in several, or a pattern fits no tensor; each is named.
        """
        tensors = sorted(tensors)
        parts = tuple(tuple(n for n in tensors if any(fnmatchcase(n, p) for p in part)) for part in patterns)
        idle = [p for part in patterns for p in part if not any(fnmatchcase(n, p) for n in tensors)]
        if idle:
            raise PlanError(f"parts: {_some(idle)} fit no tensor of the Plan (it has {_some(tensors)})")
        homes: dict[str, list[int]] = {name: [] for name in tensors}
        for index, part in enumerate(parts):
            for name in part:
                homes[name].append(index)
        lost = [name for name, found in homes.items() if not found]
        if lost:
            raise PlanError(f"parts: {_some(lost)} are in no part; add them to one")
        shared = [f"{name} in {found}" for name, found in homes.items() if len(found) > 1]
        if shared:
            raise PlanError(f"parts: a tensor travels with one part, but there are {_some(shared)}")
        return cls(parts)

    @classmethod
    def by_layer(cls, tensors: Iterable[str]) -> Parts:
        """Embeddings, then each layer (by the first number in a name), then what has no number: norms, the head."""
        keyed: dict[tuple[int, str, int], list[str]] = {}
        for name in sorted(tensors):
            layer = _LAYER.match(name)
            last = (0 if _FIRST in name else 2, "", 0)
            keyed.setdefault(last if layer is None else (1, layer[1], int(layer[2])), []).append(name)
        return cls(tuple(tuple(keyed[key]) for key in sorted(keyed)))

    @classmethod
    def whole(cls, tensors: Iterable[str]) -> Parts:
        """One part with everything in it."""
        return cls((tuple(sorted(tensors)),))

    @property
    def num(self) -> int:
        """Number of parts."""
        return len(self.names)

    @property
    def digest(self) -> str:
        """SHA-256 of the names, as hex."""
        return hashlib.sha256(repr(self.names).encode()).hexdigest()

    def numbers(self) -> dict[str, int]:
        """The part of each tensor."""
        return {name: index for index, part in enumerate(self.names) for name in part}


def _some(names: Sequence[str]) -> str:
    head = ", ".join(map(repr, names[:3]))
    return head if len(names) <= 3 else f"{head} and {len(names) - 3} more"
