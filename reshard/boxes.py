"""Arrays of half-open boxes: disjoint refinement, intersection joins, volumes, merging of neighbours.

A set of ``n`` boxes is a pair of int64 arrays ``start`` and ``stop``, both [n, ndim]. ``ndim`` may be 0: such a box
holds one element.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """Disjoint boxes that refine a set of boxes: atom ``a`` lies inside exactly the boxes ``members[ptr[a]:ptr[a +
    1]]``.
    """

    start: IntArray
    stop: IntArray
    ptr: IntArray
    members: IntArray

    @property
    def num(self) -> int:
        """Number of atoms."""
        return len(self.start)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Non-empty intersections of atoms of two sides: ``[start, stop)`` lies in atom ``src`` of one and ``dst`` of the
    other.
    """

    start: IntArray
    stop: IntArray
    src: IntArray
    dst: IntArray


def volumes(start: IntArray, stop: IntArray) -> IntArray:
    """Number of elements of every box."""
    extents: IntArray = np.maximum(stop - start, 0)
    found: IntArray = extents.prod(axis=1, dtype=np.int64)
    return found


def ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """The integers ``starts[i] .. starts[i] + counts[i]`` of all ``i``, concatenated."""
    total = int(counts.sum())
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + np.arange(total, dtype=np.int64) - before


def widest_dim(start: IntArray) -> int:
    """The dim along which most distinct starts lie; 0 for boxes without dims."""
    counts = [len(np.unique(start[:, dim])) for dim in range(start.shape[1])]
    return int(np.argmax(counts)) if counts else 0


def join(
    first_start: IntArray, first_stop: IntArray, second_start: IntArray, second_stop: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """All pairs of one box of each set that overlap: (index in first, index in second, start, stop), second-major."""
    if len(first_start) == 0 or len(second_start) == 0:
        none = np.zeros(0, np.int64)
        return none, none, first_start[:0], first_stop[:0]
    low, count, order = _candidate_ranges(first_start, first_stop, second_start, second_stop)
    second = np.repeat(np.arange(len(second_start), dtype=np.int64), count)
    first = order[ranges(low, count)]
    start = np.maximum(first_start[first], second_start[second])
    stop = np.minimum(first_stop[first], second_stop[second])
    keep = (start < stop).all(axis=1)
    return first[keep], second[keep], start[keep], stop[keep]


def _candidate_ranges(
    first_start: IntArray, first_stop: IntArray, second_start: IntArray, second_stop: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Per second box, a range of an ordering of the first boxes that holds all that may overlap it."""
    num_first, num_second = len(first_start), len(second_start)
    everything = np.zeros(num_second, np.int64), np.full(num_second, num_first, np.int64), np.arange(num_first)
    if first_start.shape[1] == 0:
        return everything
    dim = widest_dim(first_start)
    order = np.lexsort((first_stop[:, dim], first_start[:, dim]))
    starts, stops = first_start[order, dim], first_stop[order, dim]
    if (np.diff(stops) < 0).any():
        return everything
    low = np.searchsorted(stops, second_start[:, dim], side="right")
    high = np.searchsorted(starts, second_stop[:, dim], side="left")
    return low.astype(np.int64), np.maximum(high - low, 0).astype(np.int64), order


def refine(start: IntArray, stop: IntArray) -> Atoms:
    """Disjoint atoms of a set of distinct, non-empty boxes; the boxes themselves when they are disjoint already."""
    num = len(start)
    if are_disjoint(start, stop):
        index = np.arange(num + 1, dtype=np.int64)
        return Atoms(start, stop, index, index[:num])
    cuts = [np.unique(np.concatenate([start[:, dim], stop[:, dim]])) for dim in range(start.shape[1])]
    corners = np.stack(np.meshgrid(*(cut[:-1] for cut in cuts), indexing="ij"), axis=-1).reshape(-1, len(cuts))
    ends = np.stack(np.meshgrid(*(cut[1:] for cut in cuts), indexing="ij"), axis=-1).reshape(-1, len(cuts))
    box, cell, _, _ = join(start, stop, corners.astype(np.int64), ends.astype(np.int64))
    order = np.lexsort((box, cell))
    box, cell = box[order], cell[order]
    used, first = np.unique(cell, return_index=True)
    ptr = np.append(first, len(cell)).astype(np.int64)
    return _merge_cells(corners[used], ends[used], ptr, box)


def _merge_cells(start: IntArray, stop: IntArray, ptr: IntArray, members: IntArray) -> Atoms:
    """Cells joined with neighbours that lie in the same boxes."""
    numbers: dict[bytes, int] = {}
    labels = [
        numbers.setdefault(members[low:high].tobytes(), len(numbers))
        for low, high in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)
    ]
    label = np.array(labels, np.int64)
    kept, start, stop = merge_adjacent(label, start, stop)
    example = {label: index for index, label in enumerate(labels)}
    chosen = np.array([example[int(value)] for value in kept], np.int64)
    counts = ptr[chosen + 1] - ptr[chosen]
    return Atoms(start, stop, np.concatenate([[0], np.cumsum(counts)]), members[ranges(ptr[chosen], counts)])


def are_disjoint(start: IntArray, stop: IntArray) -> bool:
    """Whether no two of the non-empty boxes share an element."""
    if len(start) <= 1:
        return True
    if start.shape[1] == 0:
        return False
    for dim in range(start.shape[1]):
        order = np.argsort(start[:, dim], kind="stable")
        if (stop[order[:-1], dim] <= start[order[1:], dim]).all():
            return True
    first, second, _, _ = join(start, stop, start, stop)
    return bool((first == second).all())


def union_volume(start: IntArray, stop: IntArray) -> int:
    """Number of distinct elements in a set of boxes, which may repeat and overlap."""
    keep = (start < stop).all(axis=1)
    if are_disjoint(start[keep], stop[keep]):
        return int(volumes(start[keep], stop[keep]).sum())
    boxes = np.unique(np.concatenate([start[keep], stop[keep]], axis=1), axis=0)
    ndim = start.shape[1]
    atoms = refine(boxes[:, :ndim], boxes[:, ndim:])
    return int(volumes(atoms.start, atoms.stop).sum())


def merge_adjacent(label: IntArray, start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Disjoint boxes with neighbours of one label joined into larger boxes, sorted by label and start.

    Deterministic; repeated over the dims, last first, until nothing joins. Returns labels, starts and stops.
    """
    ndim = start.shape[1]
    changed = ndim > 0 and len(label) > 1
    while changed:
        before = len(label)
        for dim in reversed(range(ndim)):
            label, start, stop = _merge_along(dim, label, start, stop)
        changed = len(label) < before
    order = np.lexsort((*(start[:, dim] for dim in reversed(range(ndim))), label))
    return label[order], start[order], stop[order]


def _merge_along(dim: int, label: IntArray, start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    others = [d for d in range(start.shape[1]) if d != dim]
    keys = [label, *(start[:, d] for d in others), *(stop[:, d] for d in others)]
    order = np.lexsort((start[:, dim], *keys))
    label, start, stop = label[order], start[order], stop[order]
    joins = (label[1:] == label[:-1]) & (start[1:, dim] == stop[:-1, dim])
    for d in others:
        joins &= (start[1:, d] == start[:-1, d]) & (stop[1:, d] == stop[:-1, d])
    heads = np.flatnonzero(np.concatenate([[True], ~joins]))
    tails = np.append(heads[1:], len(label)) - 1
    merged_stop = stop[heads].copy()
    merged_stop[:, dim] = stop[tails, dim]
    return label[heads], start[heads], merged_stop
