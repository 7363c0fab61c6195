"""The least bytes that ranks and nodes must receive, computed from patterns alone and apart from the planner's own
path.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from reshard.boxes import IntArray, ranges, union_volume, volumes
from reshard.copy_table import ITEMSIZES
from reshard.pattern import Pattern


class FloorCounter:
    """Adds up needed and held bytes per receiver, class by class. A receiver is a rank, or a node."""

    def __init__(self, receiver_of_rank: IntArray) -> None:
        self._receiver = receiver_of_rank
        num = int(receiver_of_rank.max(initial=-1)) + 1
        self.needed_bytes = np.zeros(num, np.int64)
        self.held_bytes = np.zeros(num, np.int64)
        self._have: dict[bytes, Owned] = {}
        self._want: dict[bytes, list[tuple[int, Owned, IntArray]]] = {}

    def add(self, source: Pattern, destination: Pattern, *, num_tensors: int) -> None:
        """Count ``num_tensors`` tensors of one class; the element types wanted are counted apart."""
        src_itemsize = ITEMSIZES[source.dtypes[0]]
        have = self._holders(source)
        for code, want, numel in self._wanted(destination):
            each = num_tensors * int(min(src_itemsize, ITEMSIZES[code]))
            self.needed_bytes += numel * each
            self.held_bytes += _union_volumes(_overlaps(want, have), len(self.held_bytes)) * each

    def _holders(self, source: Pattern) -> "Owned":
        if source.place_key not in self._have:
            owner = self._receiver[source.ranks]
            self._have[source.place_key] = _distinct(owner, source.starts(), source.stops())
        return self._have[source.place_key]

    def _wanted(self, destination: Pattern) -> "list[tuple[int, Owned, IntArray]]":
        """Per element type: what each receiver wants, and how many distinct elements those are."""
        if destination.place_key not in self._want:
            found = []
            for code in np.unique(destination.dtypes).tolist():
                chosen = destination.dtypes == code
                owner = self._receiver[destination.ranks[chosen]]
                want = _distinct(owner, destination.starts()[chosen], destination.stops()[chosen])
                found.append((code, want, _union_volumes(want, len(self.needed_bytes))))
            self._want[destination.place_key] = found
        return self._want[destination.place_key]


Owned = tuple[IntArray, IntArray, IntArray]


def _distinct(owner: IntArray, start: IntArray, stop: IntArray) -> Owned:
    ndim = start.shape[1]
    table = np.concatenate([owner[:, None], start, stop], axis=1)
    order = np.lexsort(table.T[::-1])
    table = table[order]
    fresh = np.ones(len(table), np.bool_)
    fresh[1:] = (table[1:] != table[:-1]).any(axis=1)
    table = table[fresh]
    return table[:, 0], table[:, 1 : 1 + ndim], table[:, 1 + ndim :]


def _overlaps(want: Owned, have: Owned) -> Owned:
    """Intersections of boxes of one owner, an owner's needs with what it holds."""
    low = np.searchsorted(have[0], want[0], "left")
    counts = np.searchsorted(have[0], want[0], "right") - low
    first, second = np.repeat(np.arange(len(want[0])), counts), ranges(low, counts)
    start, stop = np.maximum(want[1][first], have[1][second]), np.minimum(want[2][first], have[2][second])
    keep = (start < stop).all(axis=1)
    return want[0][first][keep], start[keep], stop[keep]


def _union_volumes(boxes: Owned, num: int) -> IntArray:
    """Distinct elements per owner."""
    owner, start, stop = boxes
    counts: npt.NDArray[np.int64] = np.bincount(owner, minlength=num)
    total = np.zeros(num, np.int64)
    single = counts[owner] == 1
    total[owner[single]] = volumes(start[single], stop[single])
    for several in np.flatnonzero(counts > 1).tolist():
        low = int(np.searchsorted(owner, several))
        chosen = slice(low, low + int(counts[several]))
        total[several] = _union(start[chosen].tobytes(), stop[chosen].tobytes(), start.shape[1])
    return total


@lru_cache(maxsize=4096)
def _union(start: bytes, stop: bytes, ndim: int) -> int:
    boxes = (np.frombuffer(side, np.int64).reshape(-1, ndim) for side in (start, stop))
    return union_volume(*boxes)
