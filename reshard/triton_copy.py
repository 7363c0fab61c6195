"""The copy table by Triton, for installs whose ``reshard._C`` has no CUDA kernels.

One launch per pair of element types and kind of rows. The casts are integer arithmetic, so that they give the same bits
as every other executor, under Triton's interpreter too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from reshard import _C
from reshard.errors import PlanError
from reshard.table import COPY_RECORD, CopyTable
from reshard.triton_kernels import box_kernel, row_kernel

BLOCK = 1024
BLOCKS_PER_TILE = 8
MIN_ROW = 128  # contiguous rows of so many elements are moved row by row

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the records of one launch have in common."""

    by_rows: bool
    aligned: bool
    src_code: int
    dst_code: int
    src_itemsize: int
    dst_itemsize: int


@dataclass(frozen=True, slots=True)
class _Launch:
    """Records of one kind and their tiles, on the device."""

    kind: _Kind
    records: torch.Tensor
    tiles: torch.Tensor


class TritonTable:
    """A copy table on a device, uploaded once and launched any number of times on torch's current stream.

    Args:
        table: what ``make_table`` returns; addresses are kept, memory is borrowed.
        device: the torch device that runs it ("cpu" under TRITON_INTERPRET=1).

    Raises:
        PlanError: elements that are not aligned to the words they are moved in (of a cast, to their own size).
        ValueError: a malformed record.
    """

    def __init__(self, table: CopyTable, *, device: torch.device | str) -> None:
        _C.check_records(table)
        words = _in_words(table)
        kinds = [_kind_of(row) for row in words]
        self._launches: list[_Launch] = []
        for kind in dict.fromkeys(kinds):
            chosen = words[[other == kind for other in kinds]]
            records = torch.from_numpy(chosen.view(np.int64).reshape(-1, 16).copy()).to(device)
            tiles = torch.from_numpy(_tiles(chosen, by_rows=kind.by_rows)).to(device)
            self._launches.append(_Launch(kind, records, tiles))

    @property
    def num_launches(self) -> int:
        """Kernel launches of one run: one per pair of element types."""
        return len(self._launches)

    @property
    def device_bytes(self) -> int:
        """Device memory that the table holds."""
        return sum(launch.records.nbytes + launch.tiles.nbytes for launch in self._launches)

    def launch(self) -> None:
        """Queue one run on torch's current stream. Does not block; can be captured after a first run compiled it."""
        for launch in self._launches:
            kind = launch.kind
            kernel = row_kernel if kind.by_rows else box_kernel
            kernel[(len(launch.tiles),)](
                launch.records,
                launch.tiles,
                SRC_WORD=_WORDS[kind.src_itemsize],
                DST_WORD=_WORDS[kind.dst_itemsize],
                SRC_CODE=kind.src_code,
                DST_CODE=kind.dst_code,
                ALIGNED=kind.aligned,
                BLOCK=BLOCK,
                BLOCKS_PER_TILE=BLOCKS_PER_TILE,
            )


def _kind_of(row: np.void) -> _Kind:
    src_itemsize, dst_itemsize = int(row["src_itemsize"]), int(row["dst_itemsize"])
    is_cast = row["src_dtype"] != row["dst_dtype"]
    is_run = int(row["src_strides"][3]) == src_itemsize and int(row["dst_strides"][3]) == dst_itemsize
    by_rows = is_run and int(row["extents"][3]) >= MIN_ROW
    return _Kind(
        by_rows=by_rows,
        aligned=by_rows and not (_row_bits(row, "src") | _row_bits(row, "dst")) % 16,
        src_code=int(row["src_dtype"]) if is_cast else 0,
        dst_code=int(row["dst_dtype"]) if is_cast else 0,
        src_itemsize=src_itemsize,
        dst_itemsize=dst_itemsize,
    )


def _row_bits(row: np.void, side: str) -> int:
    """The bits of the address and of the strides between rows, of one side."""
    bits = int(row[side])
    for extent, stride in zip(row["extents"][:3], row[f"{side}_strides"][:3], strict=True):
        bits |= int(stride) if extent > 1 else 0
    return bits


def _tiles(records: CopyTable, *, by_rows: bool) -> npt.NDArray[np.int64]:
    """Tiles of all records, int64 ``[num_tiles, 3]``: the record's index, a row (0 unless by rows), a first element."""
    per_tile = BLOCK * BLOCKS_PER_TILE
    lengths = records["extents"][:, 3] if by_rows else records["extents"].prod(axis=1)
    per_row = -(-lengths // per_tile)
    counts = per_row * (records["extents"][:, :3].prod(axis=1) if by_rows else 1)
    owners = np.repeat(np.arange(len(records)), counts)
    within = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    return np.stack([owners, within // per_row[owners], within % per_row[owners] * per_tile], axis=1).astype(np.int64)


def _in_words(table: CopyTable) -> CopyTable:
    """The same copies with words of 1, 2, 4 or 8 bytes as elements; runs of one type as the widest words that fit."""
    rows: list[CopyTable] = []
    for row in table:
        if row["src_dtype"] == row["dst_dtype"]:
            rows.append(_same_type_in_words(row))
        elif _common_alignment(row, "src", int(row["src_itemsize"])) and _common_alignment(
            row, "dst", int(row["dst_itemsize"])
        ):
            rows.append(np.array([row], dtype=COPY_RECORD))
        else:
            raise PlanError(
                "a Triton copy can't cast elements that are not aligned to their own size; copy them on the host"
            )
    return np.concatenate(rows) if rows else table


def _same_type_in_words(row: np.void) -> CopyTable:
    itemsize = int(row["src_itemsize"])
    is_run = int(row["src_strides"][3]) == itemsize == int(row["dst_strides"][3])
    bits = int(row["extents"][3]) * itemsize if is_run else itemsize
    bits |= _row_bits(row, "src") | _row_bits(row, "dst")
    if not is_run:
        bits |= int(row["src_strides"][3]) | int(row["dst_strides"][3])
    word = min(8, bits & -bits)
    if not is_run and word < itemsize:
        return _split_items(row, word)
    made = np.array([row], dtype=COPY_RECORD)
    if is_run:
        made["extents"][0, 3] = int(row["extents"][3]) * itemsize // word
        made["src_strides"][0, 3] = made["dst_strides"][0, 3] = word
    made["src_itemsize"] = made["dst_itemsize"] = word
    return made


def _split_items(row: np.void, word: int) -> CopyTable:
    """One record per word of an item, for items of no word's size at strides of their own."""
    words = int(row["src_itemsize"]) // word
    made = np.repeat(np.array([row], dtype=COPY_RECORD), words)
    for name in ("src", "dst"):
        made[name] += (np.arange(words) * word).astype(np.uint64)
    made["src_itemsize"] = made["dst_itemsize"] = word
    return made


def _common_alignment(row: np.void, side: str, size: int) -> bool:
    return not (int(row[side]) % size or any(int(stride) % size for stride in row[f"{side}_strides"]))
