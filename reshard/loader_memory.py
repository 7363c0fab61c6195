"""What a storage holds while a loader runs: boxes of checkpoint values, of constants, and of computed values.

A storage is seen as a dense row-major tensor of ``shape``. Checkpoint values are addressed in elements of the
checkpoint tensor, which is dense and row-major too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from reshard.boxes import join
from reshard.dtype import DType
from reshard.strided_view import Dim, boxes_of_view, dense_strides

Kind = Literal["values", "constant", "computed"]
_WIDER = {
    DType.BFLOAT16: frozenset({DType.FLOAT32, DType.FLOAT64}),
    DType.FLOAT16: frozenset({DType.FLOAT32, DType.FLOAT64}),
    DType.FLOAT32: frozenset({DType.FLOAT64}),
    DType.FLOAT64: frozenset[DType](),
}


@dataclass(frozen=True, slots=True)
class Content:
    """What a box or a view holds: its ``kind`` and, for values, the checkpoint tensor.

    ``rounded`` is the type that the values were rounded to on their way, if any cast lost precision.
    """

    kind: Kind
    name: str = ""
    rounded: DType | None = None

    def cast(self, old: DType, new: DType) -> "Content":
        """The same content after a conversion: computed once it is not one single rounding."""
        if self.kind != "values" or old is new or new in _WIDER.get(old, ()):
            return self
        if old in _WIDER and new in _WIDER and self.rounded in (None, new):
            return Content("values", self.name, new)
        return COMPUTED


CONSTANT = Content("constant")
COMPUTED = Content("computed")


@dataclass(frozen=True, slots=True)
class Loops:
    """A strided copy: ``dims`` read from element ``src_offset`` of a checkpoint tensor and write to ``dst_offset`` on
    of a storage.
    """

    content: Content
    dims: tuple[Dim, ...]
    src_offset: int
    dst_offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The box ``[start, stop)`` of a storage; values begin at element ``offset`` of their checkpoint tensor and run
    along ``strides``.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    content: Content
    offset: int = 0
    strides: tuple[int, ...] = ()

    def within(self, start: tuple[int, ...], stop: tuple[int, ...]) -> "Piece":
        """The part of this piece that fills a smaller box."""
        shift = sum((new - old) * step for new, old, step in zip(start, self.start, self.strides, strict=False))
        return Piece(start, stop, self.content, self.offset + shift, self.strides)

    def without(self, other: "Piece") -> list["Piece"]:
        """What is left of this piece once ``other``'s box is taken out."""
        if any(max(a, c) >= min(b, d) for a, b, c, d in zip(*self._sides(other), strict=True)):
            return [self]
        left, start, stop = [], list(self.start), list(self.stop)
        for dim in range(len(start)):
            low, high = max(start[dim], other.start[dim]), min(stop[dim], other.stop[dim])
            for first, last in ((start[dim], low), (high, stop[dim])):
                if first < last:
                    part = [*start[:dim], first, *start[dim + 1 :]], [*stop[:dim], last, *stop[dim + 1 :]]
                    left.append(self.within(tuple(part[0]), tuple(part[1])))
            start[dim], stop[dim] = low, high
        return left

    def _sides(self, other: "Piece") -> tuple[tuple[int, ...], ...]:
        return self.start, self.stop, other.start, other.stop


@dataclass(slots=True)
class Memory:
    """One storage: how it is seen, its element type, what was written to it (latest last), from which checkpoint
    tensors anything in it came.
    """

    shape: tuple[int, ...]
    dtype: DType
    pieces: list[Piece] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    whole: str = ""
    _num_resolved: int = field(default=0, init=False)

    @classmethod
    def of_checkpoint(cls, name: str, shape: tuple[int, ...], dtype: DType) -> "Memory":
        """The storage of a checkpoint tensor."""
        return cls(shape, dtype, sources={name}, whole=name)

    def write(self, loops: Loops) -> None:
        """Store what ``loops`` write; what the view of the storage hides makes all of it computed."""
        dims = tuple(Dim(dim.extent, dim.dst, dim.src) for dim in loops.dims)
        spans = boxes_of_view(self.shape, dims, src_offset=loops.dst_offset, dst_offset=loops.src_offset)
        self._forget_whole()
        if spans is None:
            self.write_everywhere(COMPUTED)
            return
        self.pieces += [Piece(s.start, s.stop, loops.content, s.dst_offset, s.dst_strides) for s in spans]

    def write_everywhere(self, content: Content) -> None:
        """Fill the whole storage with constants or computed values."""
        self.whole, self._num_resolved = "", 0
        self.pieces = [Piece((0,) * len(self.shape), self.shape, content)]

    def _forget_whole(self) -> None:
        if self.whole:
            content = Content("values", self.whole)
            self.pieces = [Piece((0,) * len(self.shape), self.shape, content, 0, dense_strides(self.shape))]
            self.whole = ""

    def read(self, dims: Sequence[Dim], *, src_offset: int, dst_offset: int) -> list[Loops]:
        """What the loops ``dims`` carry from element ``src_offset`` of this storage on to ``dst_offset`` of another;
        elements that were never written count as constants.
        """
        if self.whole:
            return [Loops(Content("values", self.whole), tuple(dims), src_offset, dst_offset)]
        spans = boxes_of_view(self.shape, dims, src_offset=src_offset, dst_offset=dst_offset)
        everything = tuple(Dim(dim.extent, 0, dim.dst) for dim in dims)
        if spans is None:
            return [Loops(COMPUTED, everything, 0, dst_offset)]
        found, covered = [], 0
        for span in spans:
            for piece in self.resolved():
                start = tuple(map(max, span.start, piece.start))
                stop = tuple(map(min, span.stop, piece.stop))
                if any(low >= high for low, high in zip(start, stop, strict=True)):
                    continue
                covered += math.prod(high - low for low, high in zip(start, stop, strict=True))
                part = piece.within(start, stop)
                shift = sum((new - old) * s for new, old, s in zip(start, span.start, span.dst_strides, strict=True))
                strides = part.strides or (0,) * len(start)
                loops = tuple(map(Dim, (h - lo for lo, h in zip(start, stop, strict=True)), strides, span.dst_strides))
                found.append(Loops(piece.content, loops, part.offset, span.dst_offset + shift))
        if covered < math.prod(dim.extent for dim in dims):
            found.insert(0, Loops(CONSTANT, everything, 0, dst_offset))
        return found

    def resolved(self) -> list[Piece]:
        """The pieces as they are now: disjoint, what was overwritten taken out."""
        if self._num_resolved != len(self.pieces) and len(self.pieces) > 1:
            self.pieces = _latest(self.pieces)
        self._num_resolved = len(self.pieces)
        return self.pieces


def _latest(pieces: Sequence[Piece]) -> list[Piece]:
    """Disjoint pieces that hold what the last writer of every element wrote."""
    shape = (len(pieces), len(pieces[0].start))
    start = np.array([piece.start for piece in pieces], np.int64).reshape(shape)
    stop = np.array([piece.stop for piece in pieces], np.int64).reshape(shape)
    first, second, _, _ = join(start, stop, start, stop)
    later: dict[int, list[int]] = {}
    for old, new in zip(first.tolist(), second.tolist(), strict=True):
        if old < new:
            later.setdefault(old, []).append(new)
    return [part for index, piece in enumerate(pieces) for part in _rest(piece, pieces, later.get(index, ()))]


def _rest(piece: Piece, pieces: Sequence[Piece], later: Iterable[int]) -> list[Piece]:
    parts = [piece]
    for index in later:
        parts = [rest for part in parts for rest in part.without(pieces[index])]
    return parts
