"""Region: a half-open box of one canonical tensor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Region:
    """Elements ``start[d] <= i[d] < stop[d]`` of the tensor ``name``, in the coordinates of its global shape.

    A region with ``start[d] == stop[d]`` for some ``d`` is empty, which is an ordinary value. A zero-dimensional region
    holds one element. Raises LayoutError when a bound is negative or a stop precedes its start.
    """

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise LayoutError(f"region of {self.name!r}: start {self.start} and stop {self.stop} differ in length")
        if any(low < 0 or high < low for low, high in zip(self.start, self.stop, strict=True)):
            raise LayoutError(
                f"region of {self.name!r}: expected 0 <= start <= stop, got start {self.start} and stop {self.stop}"
            )

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> "Region":
        """The region that is all of a tensor of that shape."""
        return cls(name, (0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dim, in elements."""
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_empty(self) -> bool:
        """Whether it holds no element."""
        return self.numel == 0

    def intersect(self, other: "Region") -> "Region":
        """The common part; an empty region where there is none. Both must be of one tensor (LayoutError)."""
        self._check_comparable(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(max(low, high) for low, high in zip(start, map(min, self.stop, other.stop), strict=True))
        return Region(self.name, start, stop)

    def subtract(self, other: "Region") -> tuple["Region", ...]:
        """What ``other`` leaves of this region, as at most two disjoint boxes per dim, none of them empty."""
        common = self.intersect(other)
        if common.is_empty:
            return () if self.is_empty else (self,)
        parts = []
        start, stop = list(self.start), list(self.stop)
        for dim, (low, high) in enumerate(zip(common.start, common.stop, strict=True)):
            if start[dim] < low:
                parts.append(Region(self.name, tuple(start), (*stop[:dim], low, *stop[dim + 1 :])))
            if high < stop[dim]:
                parts.append(Region(self.name, (*start[:dim], high, *start[dim + 1 :]), tuple(stop)))
            start[dim], stop[dim] = low, high
        return tuple(parts)

    def contains(self, other: "Region") -> bool:
        """Whether every element of ``other`` is in this region; true for an empty ``other``."""
        self._check_comparable(other)
        return other.is_empty or self.intersect(other).shape == other.shape

    def _check_comparable(self, other: "Region") -> None:
        if self.name != other.name or len(self.start) != len(other.start):
            raise LayoutError(f"regions of different tensors don't compare: {self} and {other}")

    def __str__(self) -> str:
        bounds = ", ".join(f"{low}:{high}" for low, high in zip(self.start, self.stop, strict=True))
        return f"{self.name}[{bounds}]"
