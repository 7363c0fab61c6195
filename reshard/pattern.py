"""Pattern: how one tensor lies across ranks, in arrays, shared by every tensor that lies the same way.

A model of 46,000 tensors on 1,024 ranks has a few hundred patterns; a Layout keeps those and one small integer per
tensor.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reshard.errors import LayoutError

IntArray = npt.NDArray[np.int64]
Row = tuple[int, tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...], int]


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """``num`` holdings of a tensor with ``ndim`` dims, sorted by rank, then box.

    Row ``h`` says that rank ``ranks[h]`` holds the box ``[boxes_start[box_of[h]], boxes_stop[box_of[h]])`` in its
    storage number ``slots[h]`` (each tensor lists its own storage names), from byte ``offsets[h]`` on, with
    ``strides[h]`` in elements of the type with code ``dtypes[h]``. Boxes are distinct and not empty.

    ``key`` digests all of it, ``place_key`` shape, ranks, boxes and dtypes (patterns that agree in it differ at most in
    addresses), ``boxes_key`` shape and boxes.
    """

    shape: tuple[int, ...]
    ranks: IntArray
    box_of: IntArray
    boxes_start: IntArray
    boxes_stop: IntArray
    slots: IntArray
    offsets: IntArray
    strides: IntArray
    dtypes: IntArray
    key: bytes = field(default=b"")
    place_key: bytes = field(default=b"")
    boxes_key: bytes = field(default=b"")

    @property
    def num(self) -> int:
        """Number of holdings."""
        return len(self.ranks)

    @property
    def ndim(self) -> int:
        """Number of dims of the tensor."""
        return len(self.shape)

    def starts(self) -> IntArray:
        """Box starts per holding, [num, ndim]."""
        return self.boxes_start[self.box_of]

    def stops(self) -> IntArray:
        """Box stops per holding, [num, ndim]."""
        return self.boxes_stop[self.box_of]


def make_pattern(
    shape: tuple[int, ...],
    *,
    ranks: IntArray,
    starts: IntArray,
    stops: IntArray,
    slots: IntArray,
    offsets: IntArray,
    strides: IntArray,
    dtypes: IntArray,
) -> Pattern:
    """A Pattern from unsorted holdings; empty boxes are dropped. Arrays are [num] or [num, ndim].

    Raises LayoutError when a box leaves the tensor.
    """
    num, ndim = len(ranks), len(shape)
    if num and ((starts < 0).any() or (stops > np.array(shape, np.int64)).any() or (starts > stops).any()):
        bad = int(np.flatnonzero(((starts < 0) | (stops > np.array(shape)) | (starts > stops)).any(axis=1))[0])
        raise LayoutError(
            f"rank {int(ranks[bad])} holds the box {starts[bad].tolist()}..{stops[bad].tolist()}, outside shape {shape}"
        )
    table = np.concatenate(
        [ranks[:, None], starts, stops, slots[:, None], offsets[:, None], strides, dtypes[:, None]], axis=1
    ).astype(np.int64)
    table = table[(stops > starts).all(axis=1)]
    table = table[np.lexsort(table.T[::-1])] if table.size else table
    boxes, box_of = np.unique(table[:, 1 : 1 + 2 * ndim], axis=0, return_inverse=True)
    boxes = np.ascontiguousarray(boxes)
    placed = np.concatenate([table[:, : 1 + 2 * ndim], table[:, -1:]], axis=1)
    pattern = Pattern(
        shape=shape,
        ranks=table[:, 0].copy(),
        box_of=box_of.reshape(-1).astype(np.int64),
        boxes_start=boxes[:, :ndim].copy(),
        boxes_stop=boxes[:, ndim:].copy(),
        slots=table[:, 1 + 2 * ndim].copy(),
        offsets=table[:, 2 + 2 * ndim].copy(),
        strides=table[:, 3 + 2 * ndim : 3 + 3 * ndim].copy(),
        dtypes=table[:, -1].copy(),
        key=hashlib.sha256(repr(shape).encode() + table.tobytes()).digest()[:16],
        place_key=hashlib.sha256(repr(shape).encode() + placed.tobytes()).digest()[:16],
        boxes_key=hashlib.sha256(repr(shape).encode() + boxes.tobytes()).digest()[:16],
    )
    for array in (pattern.ranks, pattern.box_of, pattern.boxes_start, pattern.boxes_stop, pattern.offsets):
        array.setflags(write=False)
    return pattern


def pattern_from_rows(shape: tuple[int, ...], rows: Iterable[Row]) -> Pattern:
    """A Pattern from rows (rank, start, stop, slot, offset_bytes, strides, dtype code)."""
    columns: Sequence[Sequence[object]] = list(zip(*rows, strict=True)) or [()] * 7
    num, ndim = len(columns[0]), len(shape)

    def vector(column: int) -> IntArray:
        return np.array(columns[column], np.int64).reshape(num)

    def matrix(column: int) -> IntArray:
        return np.array(columns[column], np.int64).reshape(num, ndim)

    return make_pattern(
        shape,
        ranks=vector(0),
        starts=matrix(1),
        stops=matrix(2),
        slots=vector(3),
        offsets=vector(4),
        strides=matrix(5),
        dtypes=vector(6),
    )


def pattern_rows(pattern: Pattern, rank: int | None = None) -> list[Row]:
    """Inverse of ``pattern_from_rows``: rows sorted by rank, then box; those of one rank if given."""
    low, high = (0, pattern.num) if rank is None else np.searchsorted(pattern.ranks, [rank, rank + 1]).tolist()
    starts, stops = pattern.starts(), pattern.stops()
    return [
        (
            int(pattern.ranks[row]),
            tuple(starts[row].tolist()),
            tuple(stops[row].tolist()),
            int(pattern.slots[row]),
            int(pattern.offsets[row]),
            tuple(pattern.strides[row].tolist()),
            int(pattern.dtypes[row]),
        )
        for row in range(low, high)
    ]
