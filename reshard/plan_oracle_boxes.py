"""The plan oracle's view of layouts and plans: strided boxes as rows of arrays, and every element of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard.copy_table import ITEMSIZES
from reshard.layout import Layout
from reshard.plan import Plan

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """A strided box a row. Bounds and strides are [num, width]; dims beyond a tensor's own have extent 1.

    ``tensor`` numbers a side's tensors, ``place`` storages of ranks; ``offset`` is in bytes, ``dtype`` a code.
    """

    tensor: IntArray
    rank: IntArray
    place: IntArray
    offset: IntArray
    dtype: IntArray
    start: IntArray
    stop: IntArray
    strides: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """Every element of some boxes: its box's row, its place within the box [num, width]."""

    row: IntArray
    steps: IntArray

    @classmethod
    def of(cls, boxes: Boxes) -> "Elements":
        """All elements, box by box, in row-major order."""
        extents = boxes.stop - boxes.start
        counts = extents.prod(axis=1)
        row = np.repeat(np.arange(len(counts)), counts)
        rest = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        steps = np.zeros((len(row), extents.shape[1]), np.int64)
        for dim in reversed(range(extents.shape[1])):
            steps[:, dim] = rest % extents[row, dim]
            rest //= extents[row, dim]
        return cls(row, steps)

    def flat(self, boxes: Boxes, steps_of: IntArray) -> IntArray:
        """Number of every element in its tensor; ``steps_of`` are [tensor, width] elements per step along a dim."""
        index = boxes.start[self.row] + self.steps
        found: IntArray = (index * steps_of[boxes.tensor[self.row]]).sum(axis=1)
        return found

    def offsets(self, boxes: Boxes) -> IntArray:
        """Byte offset of every element in its storage."""
        reach = (self.steps * boxes.strides[self.row]).sum(axis=1) * ITEMSIZES[boxes.dtype[self.row]]
        found: IntArray = boxes.offset[self.row] + reach
        return found


class Numbers:
    """Numbers storages of ranks. Both sides share them only where their layouts carry one memory label."""

    def __init__(self, plan: Plan) -> None:
        self._shared = plan.source.memory is not None and plan.source.memory == plan.destination.memory
        self._storages: dict[str, int] = {}
        self.num_ranks = max(*plan.source.ranks, *plan.destination.ranks, -1) + 1
        for layout in (plan.source, plan.destination):
            for entry in layout.entries.values():
                for name in entry.storages:
                    self.storage(name)
        for name in plan.table.storages:
            self.storage(name)

    def storage(self, name: str) -> int:
        """Number of a storage's name."""
        return self._storages.setdefault(name, len(self._storages))

    def places(self, storage: IntArray, rank: IntArray, is_destination: BoolArray) -> IntArray:
        """Number of the storage on a rank, on the side that it belongs to."""
        side = np.zeros(len(rank), np.int64) if self._shared else is_destination.astype(np.int64)
        return (side * len(self._storages) + storage) * self.num_ranks + rank

    def name(self, place: int) -> str:
        """What a number stands for, as text."""
        side, rest = divmod(place, len(self._storages) * self.num_ranks)
        storage, rank = divmod(rest, self.num_ranks)
        side_name = "both layouts" if self._shared else ("the source", "the destination")[side]
        return f"{list(self._storages)[storage]!r} of rank {rank} in {side_name}"


def layout_boxes(layout: Layout, numbers: Numbers, width: int, *, is_destination: bool) -> Boxes:
    """Every holding of a layout, tensors numbered in its order."""
    entries = list(layout.entries.values())
    patterns = [entry.pattern for entry in entries]
    counts = [pattern.num for pattern in patterns]
    rank = _join(pattern.ranks for pattern in patterns)
    names = [np.array([numbers.storage(name) for name in entry.storages] or [0], np.int64) for entry in entries]
    storage = _join(own[pattern.slots] for own, pattern in zip(names, patterns, strict=True))
    return Boxes(
        tensor=np.repeat(np.arange(len(entries)), counts),
        rank=rank,
        place=numbers.places(storage, rank, np.full(len(rank), is_destination)),
        offset=_join(pattern.offsets for pattern in patterns),
        dtype=_join(pattern.dtypes for pattern in patterns),
        start=_join((_padded(pattern.starts(), width, 0) for pattern in patterns), width),
        stop=_join((_padded(pattern.stops(), width, 1) for pattern in patterns), width),
        strides=_join((_padded(pattern.strides, width, 0) for pattern in patterns), width),
    )


def copy_boxes(plan: Plan, numbers: Numbers, tensor_of: Mapping[str, int], width: int) -> tuple[Boxes, Boxes]:
    """Both ends of every copy, tensors numbered by ``tensor_of`` their destination names."""
    table = plan.table
    tensor = np.array([tensor_of[name] for name in table.names], np.int64)[table.name_idx]
    storage = np.array([numbers.storage(name) for name in table.storages], np.int64)
    outside = np.arange(table.start.shape[1]) >= table.ndim[:, None]
    start = _padded(np.where(outside, 0, table.start), width, 0)
    stop = _padded(np.where(outside, 1, table.stop), width, 1)

    wide = {name: array.astype(np.int64) for name, array in table.columns().items()}

    def end(side: str, is_destination: BoolArray) -> Boxes:
        rank = wide[f"{side}_rank"]
        place = numbers.places(storage[wide[f"{side}_storage"]], rank, is_destination)
        strides = _padded(wide[f"{side}_strides"], width, 0)
        return Boxes(tensor, rank, place, wide[f"{side}_offset"], wide[f"{side}_dtype"], start, stop, strides)

    return end("src", table.hop > 0), end("dst", np.ones(table.num, np.bool_))


def row_major_steps(shapes: Sequence[Sequence[int]], width: int) -> IntArray:
    """Per shape, elements per step along each dim, [num, width]; dims beyond a shape's own have 0."""
    found = np.zeros((len(shapes), width), np.int64)
    for number, shape in enumerate(shapes):
        step = 1
        for dim in reversed(range(len(shape))):
            found[number, dim] = step
            step *= shape[dim]
    return found


def _padded(array: IntArray, width: int, value: int) -> IntArray:
    missing = width - array.shape[1]
    return array if not missing else np.pad(array, ((0, 0), (0, missing)), constant_values=value)


def _join(arrays: Iterable[IntArray], width: int | None = None) -> IntArray:
    empty = np.zeros(0 if width is None else (0, width), np.int64)
    return np.concatenate([empty, *arrays])
