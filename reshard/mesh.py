"""Mesh: named axes over ranks, in a stated order. It holds no process group."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from reshard.errors import LayoutError


class Mesh:
    """Ranks arranged along named axes; the last axis varies fastest (C order).

    ``Mesh({"pp": 2, "dp": 2, "tp": 2})`` puts ranks 0 and 1 in one tp group. ``ranks`` permutes or offsets them; they
    must be distinct and fill the axes exactly (LayoutError names those left over). Values are immutable and comparable.
    """

    __slots__ = ("_axes", "_coordinates", "_ranks")

    def __init__(self, axes: Mapping[str, int], *, ranks: Sequence[int] | None = None) -> None:
        for axis, size in axes.items():
            if size < 1:
                raise LayoutError(f"mesh axis {axis!r} has size {size}: expected at least 1")
        self._axes = dict(axes)
        size = math.prod(self._axes.values())
        self._ranks = tuple(range(size)) if ranks is None else tuple(ranks)
        self._check_filled(size)
        coordinates = itertools.product(*(range(extent) for extent in self._axes.values()))
        self._coordinates = dict(zip(self._ranks, coordinates, strict=True))
        if len(self._coordinates) != size:
            twice = sorted({rank for rank in self._ranks if self._ranks.count(rank) > 1})
            raise LayoutError(f"mesh {self}: ranks {twice} appear more than once")

    def _check_filled(self, size: int) -> None:
        if len(self._ranks) > size:
            raise LayoutError(
                f"mesh {self} has {size} places for {len(self._ranks)} ranks: "
                f"left over are {list(self._ranks[size:])}; enlarge an axis or pass fewer ranks"
            )
        if len(self._ranks) < size:
            raise LayoutError(
                f"mesh {self} has {size} places but only {len(self._ranks)} ranks: {size - len(self._ranks)} "
                f"are missing"
            )

    @classmethod
    def parse(cls, text: str, *, ranks: Sequence[int] | None = None) -> "Mesh":
        """From ``"pp=2,dp=2,tp=4"``, slowest axis first; LayoutError on anything else."""
        axes: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            axis, equals, size = (word.strip() for word in part.partition("="))
            if not (axis and equals and size.isdecimal()) or axis in axes:
                raise LayoutError(f"mesh {text!r}: expected distinct 'axis=size' parts like 'pp=1,tp=8', got {part!r}")
            axes[axis] = int(size)
        return cls(axes, ranks=ranks)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axis names, slowest first."""
        return tuple(self._axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of ``axes``."""
        return tuple(self._axes.values())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank, in mesh order."""
        return self._ranks

    def axis_size(self, axis: str) -> int:
        """Size of an axis; 1 for an axis that this mesh does not name."""
        return self._axes.get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Index of the rank along every axis; LayoutError when the rank is not in the mesh."""
        if rank not in self._coordinates:
            raise LayoutError(f"rank {rank} is not in mesh {self}, whose ranks are {_brief(self._ranks)}")
        return dict(zip(self._axes, self._coordinates[rank], strict=True))

    def index(self, rank: int, axis: str) -> int:
        """Index of the rank along one axis; 0 for an axis that this mesh does not name."""
        return self.coordinate(rank).get(axis, 0)

    def rank(self, **coordinate: int) -> int:
        """The rank at a full coordinate; axes left out count as 0."""
        self._check_axes(coordinate)
        flat = 0
        for axis, size in self._axes.items():
            index = coordinate.get(axis, 0)
            if not 0 <= index < size:
                raise LayoutError(f"index {index} is outside axis {axis!r} of mesh {self}")
            flat = flat * size + index
        return self._ranks[flat]

    def slice(self, **fixed: int) -> "Mesh":
        """The sub-mesh at the given indices; the fixed axes are dropped."""
        self._check_axes(fixed)
        keep = {axis: size for axis, size in self._axes.items() if axis not in fixed}
        places = itertools.product(*(range(size) for size in keep.values()))
        ranks = [self.rank(**fixed, **dict(zip(keep, place, strict=True))) for place in places]
        return Mesh(keep, ranks=ranks)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups whose members differ only along ``axes``, in mesh order of their first member."""
        self._check_axes(axes)
        fixed = [axis for axis in self._axes if axis not in axes]
        return tuple(self.slice(**place).ranks for place in self._places(fixed))

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of ``groups(*axes)`` that the rank belongs to."""
        self._check_axes(axes)
        place = {axis: index for axis, index in self.coordinate(rank).items() if axis not in axes}
        return self.slice(**place).ranks

    def _places(self, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        for place in itertools.product(*(range(self._axes[axis]) for axis in axes)):
            yield dict(zip(axes, place, strict=True))

    def _check_axes(self, axes: Mapping[str, int] | Sequence[str]) -> None:
        for axis in axes:
            if axis not in self._axes:
                raise LayoutError(f"mesh {self} has no axis {axis!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self.axes == other.axes and self.shape == other.shape and self._ranks == other._ranks

    def __hash__(self) -> int:
        return hash((self.axes, self.shape, self._ranks))

    def __str__(self) -> str:
        return "(" + ", ".join(f"{axis}={size}" for axis, size in self._axes.items()) + ")"

    def __repr__(self) -> str:
        return f"Mesh{self}"


def _brief(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"{ranks[0]}..{ranks[-1]} ({len(ranks)} of them)"
