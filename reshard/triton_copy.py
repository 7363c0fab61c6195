"""The copy table by Triton, for installs whose ``reshard._C`` has no CUDA kernels (see ``reshard.transports.kernels``).

One launch per pair of element types and kind of rows. The casts are integer arithmetic, so that they give the same bits
as every other executor, under Triton's interpreter too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from reshard import _C
from reshard.errors import PlanError
from reshard.table import MAX_TARGETS, CopyTable, Integers
from reshard.triton_kernels import box_kernel, row_kernel

BLOCK = 1024
BLOCKS_PER_TILE = 8
MIN_ROW = 128  # contiguous rows of so many elements are moved row by row

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the fans of one launch have in common; as integers, in the order of ``_kinds_of``."""

    by_rows: int
    aligned: int
    src_code: int
    dst_code: int
    src_itemsize: int
    dst_itemsize: int
    num_targets: int


@dataclass(frozen=True, slots=True)
class _Launch:
    """Records of one kind and their tiles, on the device."""

    kind: _Kind
    records: torch.Tensor
    tiles: torch.Tensor


class TritonTable:
    """A copy table on a device: compiled and uploaded once, launched any number of times.

    Dropping the last reference gives its memory back to torch; wait for queued launches first.

    Args:
        table: what ``make_table`` returns; addresses are kept, memory is borrowed.
        device: the torch device that runs it ("cpu" under TRITON_INTERPRET=1). Blocks; not inside a graph capture.

    Raises:
        PlanError: elements that are not aligned to the words they are moved in (of a cast, to their own size).
        ValueError: a malformed record.
    """

    def __init__(self, table: CopyTable, *, device: torch.device | str) -> None:
        _C.check_records(table)
        words = _in_words(table)
        heads = _heads(words)
        kinds, kind_of_fan = np.unique(_kinds_of(words, heads), axis=0, return_inverse=True)
        self._device = torch.empty(0, device=device).device
        self._launches: list[_Launch] = []
        for idx, row in enumerate(kinds):
            kind = _Kind(*row.tolist())
            chosen = heads[kind_of_fan.reshape(-1) == idx]
            members = (chosen[:, None] + np.arange(kind.num_targets)).reshape(-1)
            records = torch.from_numpy(words[members].view(np.int64).reshape(-1, 16).copy()).to(self._device)
            tiles = torch.from_numpy(tiles_of(words[chosen], by_rows=bool(kind.by_rows))).to(self._device)
            self._launches.append(_Launch(kind, records, tiles))
        if self._device.type != "cpu":
            self._load_kernels()

    @property
    def num_launches(self) -> int:
        """Kernel launches of one run: one per pair of element types, kind of rows and number of targets."""
        return len(self._launches)

    @property
    def device_bytes(self) -> int:
        """Device memory that the table holds."""
        return sum(launch.records.nbytes + launch.tiles.nbytes for launch in self._launches)

    def launch(self, stream: int | None = None) -> None:
        """Queue one run on a raw stream of the device, torch's current one where None. Does not block; capturable."""
        with self._on_stream(stream):
            for launch in self._launches:
                _run(launch, launch.tiles)

    def _load_kernels(self) -> None:
        """Compile and load every kernel, which a capture could not do, by a run on a tile that lies past any box."""
        with self._on_stream(None):
            past_the_end = torch.tensor([[0, 0, 1 << 40]], dtype=torch.int64).to(self._device)
            for launch in self._launches:
                _run(launch, past_the_end)

    def _on_stream(self, stream: int | None) -> AbstractContextManager[object]:
        if self._device.type == "cpu":
            return nullcontext()
        current = torch.cuda.current_stream(self._device)
        if stream is None or stream == current.cuda_stream:
            return torch.cuda.stream(current)
        # torch makes a new stream of the handle 0, which is the default one's.
        other = torch.cuda.ExternalStream(stream, self._device) if stream else torch.cuda.default_stream(self._device)
        return torch.cuda.stream(other)


def _run(launch: _Launch, tiles: torch.Tensor) -> None:
    kind = launch.kind
    kernel = row_kernel if kind.by_rows else box_kernel
    kernel[(len(tiles),)](
        launch.records,
        tiles,
        SRC_WORD=WORDS[kind.src_itemsize],
        DST_WORD=WORDS[kind.dst_itemsize],
        SRC_CODE=kind.src_code,
        DST_CODE=kind.dst_code,
        ALIGNED=bool(kind.aligned),
        NUM_TARGETS=kind.num_targets,
        BLOCK=BLOCK,
        BLOCKS_PER_TILE=BLOCKS_PER_TILE,
    )


def _heads(table: CopyTable) -> Integers:
    """The positions of the records that follow no other."""
    is_head = np.ones(len(table), dtype=bool)
    followers = table["num_followers"].astype(np.int64)
    for distance in range(1, MAX_TARGETS):
        is_head[np.flatnonzero(followers >= distance) + distance] = False
    return np.flatnonzero(is_head)


def _over_fans(bits: Integers, heads: Integers) -> Integers:
    """For every record the bits of all members of its fan."""
    joined = np.bitwise_or.reduceat(bits, heads) if len(heads) else bits
    return np.repeat(joined, np.diff(np.append(heads, len(bits))))


def _row_bits(table: CopyTable, side: str) -> Integers:
    """The bits of the addresses and of the strides between rows, of one side."""
    strides = np.where(table["extents"][:, :3] > 1, table[f"{side}_strides"][:, :3], 0)
    bits: Integers = np.bitwise_or.reduce(strides, axis=1) | table[side].astype(np.int64)
    return bits


def _is_run(table: CopyTable) -> npt.NDArray[np.bool_]:
    src_is_run = table["src_strides"][:, 3] == table["src_itemsize"]
    found: npt.NDArray[np.bool_] = src_is_run & (table["dst_strides"][:, 3] == table["dst_itemsize"])
    return found


def _kinds_of(table: CopyTable, heads: Integers) -> Integers:
    """One row of integers a fan: the fields of ``_Kind``."""
    bits = _over_fans(_row_bits(table, "src") | _row_bits(table, "dst") | np.where(_is_run(table), 0, 1), heads)
    fans = table[heads]
    is_cast = fans["src_dtype"] != fans["dst_dtype"]
    by_rows = (_over_fans((~_is_run(table)).astype(np.int64), heads)[heads] == 0) & (fans["extents"][:, 3] >= MIN_ROW)
    columns = [
        by_rows,
        by_rows & (bits[heads] % 16 == 0),
        np.where(is_cast, fans["src_dtype"], 0),
        np.where(is_cast, fans["dst_dtype"], 0),
        fans["src_itemsize"],
        fans["dst_itemsize"],
        1 + fans["num_followers"].astype(np.int64),
    ]
    return np.stack([np.asarray(column, dtype=np.int64) for column in columns], axis=1)


def tiles_of(fans: CopyTable, *, by_rows: bool) -> Integers:
    """Tiles of all fans, int64 ``[num_tiles, 3]``: the fan's index, a row (0 unless by rows), a first element."""
    per_tile = BLOCK * BLOCKS_PER_TILE
    lengths = fans["extents"][:, 3] if by_rows else fans["extents"].prod(axis=1)
    per_row = -(-lengths // per_tile)
    counts = per_row * (fans["extents"][:, :3].prod(axis=1) if by_rows else 1)
    owners = np.repeat(np.arange(len(fans)), counts)
    within = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    return np.stack([owners, within // per_row[owners], within % per_row[owners] * per_tile], axis=1).astype(np.int64)


def _in_words(table: CopyTable) -> CopyTable:
    """The same copies with words of 1, 2, 4 or 8 bytes as elements; runs of one type as the widest words that fit."""
    heads = _heads(table)
    is_cast = table["src_dtype"] != table["dst_dtype"]
    refuse_misaligned(table[is_cast])
    itemsize = table["src_itemsize"].astype(np.int64)
    runs = _over_fans((~_is_run(table)).astype(np.int64), heads) == 0
    bits = _row_bits(table, "src") | _row_bits(table, "dst")
    bits |= np.where(runs, table["extents"][:, 3] * itemsize, itemsize)
    bits |= np.where(runs, 0, table["src_strides"][:, 3] | table["dst_strides"][:, 3])
    bits = _over_fans(bits, heads)
    word = np.where(is_cast, itemsize, np.minimum(8, bits & -bits))
    made = table.copy()
    widened = ~is_cast & runs
    made["extents"][widened, 3] = (table["extents"][:, 3] * itemsize // word)[widened]
    for side in ("src", "dst"):
        made[f"{side}_strides"][widened, 3] = word[widened]
        made[f"{side}_itemsize"][~is_cast] = word[~is_cast]
    return _split_items(made, np.where(runs, 1, itemsize // word))


def refuse_misaligned(casts: CopyTable, sides: Sequence[str] = ("src", "dst")) -> None:
    """PlanError unless every element of these records lies at a multiple of its size on the sides named."""
    for side in sides:
        bits = np.bitwise_or.reduce(casts[f"{side}_strides"], axis=1) | casts[side].astype(np.int64)
        if (bits % casts[f"{side}_itemsize"]).any():
            raise PlanError(
                "a Triton copy can't cast elements that are not aligned to their own size; copy them on the host"
            )


def _split_items(table: CopyTable, num_words: Integers) -> CopyTable:
    """One record per word of an item, for items of no word's size at strides of their own; these leave their fans."""
    if not (num_words > 1).any():
        return table
    made = np.repeat(table, num_words)
    word = np.arange(len(made)) - np.repeat(np.cumsum(num_words) - num_words, num_words)
    for side in ("src", "dst"):
        made[side] += (word * made[f"{side}_itemsize"]).astype(np.uint64)
    made["num_followers"][np.repeat(num_words > 1, num_words)] = 0
    return made
