"""Strided copies for the executors of a copy table: drawn by Hypothesis, built in labelled memory, and the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from reshard.dtype import DType
from reshard.oracle import copy_reference
from reshard.table import CopyEntry, CopyTable, make_table

FLOATS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
PAIRS = [(a, b) for a in FLOATS for b in FLOATS if a is not b]
SAME = [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.INT64, DType.COMPLEX64, DType.UINT8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Where a box lies in a buffer of its own: offset in bytes, strides in elements, size of the buffer."""

    offset_bytes: int
    strides: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One strided copy, still without memory."""

    shape: tuple[int, ...]
    src: Side
    dst: Side
    src_dtype: DType
    dst_dtype: DType


@dataclass(frozen=True, slots=True)
class Built:
    """Cases with memory on a device; the table points into the buffers."""

    src_buffers: list[torch.Tensor]
    dst_buffers: list[torch.Tensor]
    table: CopyTable


@st.composite
def sides(draw: st.DrawFn, shape: tuple[int, ...], itemsize: int, *, is_source: bool) -> Side:
    """A side with any order of dimensions, gaps between them, and any offset that keeps elements aligned."""
    order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else list(range(len(shape)))
    strides = [0] * len(shape)
    span = 1
    for dim in reversed(order):
        if is_source and draw(st.integers(0, 15)) == 0:
            continue
        strides[dim] = span + draw(st.sampled_from([0, 0, 0, 1, 5, 8]))
        span = strides[dim] * max(1, shape[dim])
    offset = draw(st.sampled_from([0, 0, 1, 2, 4, 8, 13])) * itemsize
    return Side(offset_bytes=offset, strides=tuple(strides), num_bytes=offset + (span + 16) * itemsize)


@st.composite
def cases(draw: st.DrawFn, *, max_numel: int = 20_000, max_dims: int = 6) -> Case:
    """A copy of any dtype pair that a table may hold."""
    pairs = PAIRS + [(dtype, dtype) for dtype in SAME]
    src_dtype, dst_dtype = draw(st.sampled_from(pairs))
    shape: list[int] = []
    for _ in range(draw(st.integers(0, max_dims))):
        room = max_numel // math.prod(max(1, extent) for extent in shape)
        shape.append(draw(st.one_of(st.integers(0, min(9, room)), st.integers(1, max(1, min(room, 700))))))
    return Case(
        shape=tuple(shape),
        src=draw(sides(tuple(shape), src_dtype.itemsize, is_source=True)),
        dst=draw(sides(tuple(shape), dst_dtype.itemsize, is_source=False)),
        src_dtype=src_dtype,
        dst_dtype=dst_dtype,
    )


@st.composite
def fans(draw: st.DrawFn, *, max_numel: int = 5000) -> list[Case]:
    """One source box to several destinations, some of them laid out alike, so that a table gathers those."""
    first = draw(cases(max_numel=max_numel))
    specs = [first]
    for _ in range(draw(st.integers(1, 10))):
        if draw(st.integers(0, 2)) == 0:
            dst = draw(sides(first.shape, first.dst_dtype.itemsize, is_source=False))
        else:
            dst = draw(st.sampled_from(specs)).dst
        specs.append(replace(first, dst=dst))
    return specs


def labelled(num_bytes: int, *, seed: int) -> torch.Tensor:
    """Bytes in which every 16-bit word of a run of 65,536 differs, so that a misplaced element shows."""
    words = (np.arange(num_bytes // 2 + 1, dtype=np.uint64) * 40503 + seed).astype(np.uint16)
    return torch.from_numpy(words.view(np.uint8)[:num_bytes].copy())


def build(specs: Sequence[Case], *, device: str = "cpu", one_source: bool = False) -> Built:
    """Allocate and label both sides of every case, and make their table; with ``one_source`` all read the first's."""
    src_buffers = [labelled(case.src.num_bytes, seed=i).to(device) for i, case in enumerate(specs)]
    if one_source:
        src_buffers = [src_buffers[0]] * len(specs)
    dst_buffers = [labelled(case.dst.num_bytes, seed=77 + i).to(device) for i, case in enumerate(specs)]
    entries = [
        CopyEntry(
            src=src.data_ptr() + case.src.offset_bytes,
            dst=dst.data_ptr() + case.dst.offset_bytes,
            shape=case.shape,
            src_strides=case.src.strides,
            dst_strides=case.dst.strides,
            src_dtype=case.src_dtype,
            dst_dtype=case.dst_dtype,
        )
        for case, src, dst in zip(specs, src_buffers, dst_buffers, strict=True)
    ]
    return Built(src_buffers, dst_buffers, make_table(entries))


def assert_same_as_oracle(
    specs: Sequence[Case], run: Callable[[CopyTable], object], *, device: str = "cpu", one_source: bool = False
) -> None:
    """Run a table through ``run`` on ``device`` and through the oracle: all bytes of all buffers must agree."""
    expected = build(specs, one_source=one_source)
    copy_reference(expected.table)
    found = build(specs, device=device, one_source=one_source)
    run(found.table)
    for i, case in enumerate(specs):
        assert_same_bytes(found.dst_buffers[i].cpu(), expected.dst_buffers[i], what=f"destination of {case}")
        assert_same_bytes(found.src_buffers[i].cpu(), expected.src_buffers[i], what=f"source of {case}")


def assert_same_bytes(found: torch.Tensor, expected: torch.Tensor, *, what: str) -> None:
    """Compare bit for bit; the message has the first byte that differs."""
    a = found.contiguous().view(-1).view(torch.uint8)
    b = expected.contiguous().view(-1).view(torch.uint8)
    assert a.shape == b.shape, f"{what}: {a.numel()} bytes, expected {b.numel()}"
    if not torch.equal(a, b):
        first = int((a != b).nonzero()[0])
        raise AssertionError(
            f"{what}: {int((a != b).sum())} bytes differ, first byte {first}: {int(a[first])}, expected {int(b[first])}"
        )


def every_half_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit type."""
    return torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16).copy()).view(dtype)


def rounding_edges() -> torch.Tensor:
    """Floats around every bf16 and fp16 value and halfway point, with infinities, NaNs and subnormals, both signs."""
    high = np.arange(65536, dtype=np.uint32) << 16
    bf16 = np.concatenate([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).astype(np.uint32)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    midpoints = (halves[:-1] + halves[1:]) / 2
    top = np.array([65504, 65519.996, 65520, 65520.004, 65536, 2**-25, 2**-24, 2**-14], dtype=np.float32)
    exact = np.concatenate([halves, midpoints, top]).view(np.uint32)
    fp16 = np.concatenate([exact, exact + 1, np.maximum(exact, 1) - 1])
    return torch.from_numpy(np.concatenate([bf16, fp16, fp16 | 0x80000000]).astype(np.uint32).view(np.float32).copy())
