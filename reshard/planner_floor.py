"""The least bytes that ranks and nodes must receive, computed from patterns alone and apart from the planner's own
path.
"""

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

    def add(self, source: Pattern, destination: Pattern, *, num_tensors: int) -> None:
        """Count ``num_tensors`` tensors of one class; the element types wanted are counted apart."""
        src_itemsize = ITEMSIZES[source.dtypes[0]]
        have = _distinct(self._receiver[source.ranks], source.starts(), source.stops())
        for code in np.unique(destination.dtypes).tolist():
            chosen = destination.dtypes == code
            receiver = self._receiver[destination.ranks[chosen]]
            want = _distinct(receiver, destination.starts()[chosen], destination.stops()[chosen])
            each = num_tensors * int(min(src_itemsize, ITEMSIZES[code]))
            self.needed_bytes += _union_volumes(want, len(self.needed_bytes)) * each
            self.held_bytes += _union_volumes(_overlaps(want, have), len(self.held_bytes)) * each


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
    known: dict[bytes, int] = {}
    for several in np.flatnonzero(counts > 1).tolist():
        low = int(np.searchsorted(owner, several))
        chosen = slice(low, low + int(counts[several]))
        key = start[chosen].tobytes() + stop[chosen].tobytes()
        if key not in known:
            known[key] = union_volume(start[chosen], stop[chosen])
        total[several] = known[key]
    return total
