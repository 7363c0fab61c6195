"""Decompose strided views into boxes: which box of a dense tensor does a view of its storage cover?"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product


@dataclass(frozen=True, slots=True)
class Dim:
    """One loop of a copy: ``extent`` steps, ``src`` elements apart in the source's storage, ``dst`` in the
    destination's.
    """

    extent: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Span:
    """A box ``[start, stop)`` of a dense tensor, and where it goes: element offset and strides per dim of that
    tensor.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def merge_dims(dims: Sequence[Dim]) -> list[Dim]:
    """The same loops with as few dims as can be: widest source stride first, extents of 1 dropped, collinear ones
    joined.
    """
    merged: list[Dim] = []
    for dim in sorted((d for d in dims if d.extent != 1), key=lambda d: -d.src):
        outer = merged[-1] if merged else None
        if outer and outer.src == dim.src * dim.extent and outer.dst == dim.dst * dim.extent:
            merged[-1] = Dim(outer.extent * dim.extent, dim.src, dim.dst)
        else:
            merged.append(dim)
    return merged


def boxes_of_view(
    shape: Sequence[int], dims: Sequence[Dim], *, src_offset: int, dst_offset: int
) -> tuple[Span, ...] | None:
    """The boxes of a dense tensor of ``shape`` that the loops read from element ``src_offset`` on, and where they
    write.

    None when the loops don't run along its dims: overlapping or diagonal views, or views across its edges.
    """
    spans = _boxes(tuple(shape), tuple(dims), src_offset)
    if spans is None or not dst_offset:
        return spans
    return tuple(Span(span.start, span.stop, span.dst_offset + dst_offset, span.dst_strides) for span in spans)


@functools.lru_cache(maxsize=1 << 14)
def _boxes(shape: tuple[int, ...], dims: tuple[Dim, ...], src_offset: int) -> tuple[Span, ...] | None:
    """``boxes_of_view`` to offset 0: most tensors of a model are cut alike."""
    strides = dense_strides(shape)
    split = _split_at_edges(shape, strides, merge_dims(dims), src_offset)
    if split is None:
        return None
    along: dict[int, Dim] = {}
    repeated: list[tuple[int, Dim]] = []
    for dim in split:
        axis = _axis(shape, strides, dim.src)
        if axis is None:
            return None
        if dim.src == strides[axis] and axis not in along:
            along[axis] = dim
        else:
            repeated.append((axis, dim))
    return _spans(shape, strides, along, repeated, src_offset)


def _axis(shape: Sequence[int], strides: Sequence[int], step: int) -> int | None:
    """The dim that a step of so many elements runs along."""
    fitting = (axis for axis, stride in enumerate(strides) if shape[axis] > 1 and step >= stride and step % stride == 0)
    return next(fitting, None)


def _split_at_edges(
    shape: Sequence[int], strides: Sequence[int], dims: Sequence[Dim], src_offset: int
) -> list[Dim] | None:
    """Loops that run through several dims of the tensor at once, split so that each stays within one."""
    found: list[Dim] = []
    pending = list(dims)
    while pending:
        dim = pending.pop()
        axis = _axis(shape, strides, dim.src)
        if axis is None:
            return None
        first = src_offset // strides[axis] % shape[axis]
        steps = dim.src // strides[axis]
        if first + steps * (dim.extent - 1) < shape[axis]:
            found.append(dim)
        elif first == 0 and shape[axis] % steps == 0 and dim.extent % (shape[axis] // steps) == 0:
            inner = shape[axis] // steps
            found.append(Dim(inner, dim.src, dim.dst))
            if axis == 0:
                return None
            pending.append(Dim(dim.extent // inner, dim.src * inner, dim.dst * inner))
        else:
            return None
    return found


def _spans(
    shape: Sequence[int],
    strides: Sequence[int],
    along: dict[int, Dim],
    repeated: Sequence[tuple[int, Dim]],
    src_offset: int,
) -> tuple[Span, ...] | None:
    spans = []
    for place in product(*(range(dim.extent) for _, dim in repeated)):
        src = src_offset + sum(index * dim.src for index, (_, dim) in zip(place, repeated, strict=True))
        dst = sum(index * dim.dst for index, (_, dim) in zip(place, repeated, strict=True))
        start = tuple(src // stride % extent for stride, extent in zip(strides, shape, strict=True))
        extents = [along[axis].extent if axis in along else 1 for axis in range(len(shape))]
        stop = tuple(low + extent for low, extent in zip(start, extents, strict=True))
        if any(high > extent for high, extent in zip(stop, shape, strict=True)):
            return None
        moved = tuple(along[axis].dst if axis in along else 0 for axis in range(len(shape)))
        spans.append(Span(start, stop, dst, moved))
    return tuple(spans) if _disjoint(spans) else None


def _disjoint(spans: Sequence[Span]) -> bool:
    return not any(_overlap(first, second) for first, second in combinations(spans, 2))


def _overlap(first: Span, second: Span) -> bool:
    return all(
        max(a, c) < min(b, d) for a, b, c, d in zip(first.start, first.stop, second.start, second.stop, strict=True)
    )
