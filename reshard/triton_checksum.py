"""Checksums of a copy table's records by Triton, for installs whose ``reshard._C`` has no CUDA kernels.

The same sums as ``_C.checksum_host`` gives: words of 8 bytes (of a shorter element: the element), each mixed with its
number in the record's row-major order, added modulo 2**64. Words are read in units as wide as their alignment lets.
"""

# Triton gives its kernels' parameters their types at compile time.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
import triton
import triton.language as tl

from reshard import _C
from reshard.table import CopyTable, Integers
from reshard.triton_copy import BLOCK, BLOCKS_PER_TILE, WORDS, refuse_misaligned, tiles_of
from reshard.triton_kernels import cast_words, row_offset

_SRC, _DST, _EXTENTS, _SRC_STRIDES, _RECORD = (
    tl.constexpr(0),
    tl.constexpr(1),
    tl.constexpr(2),
    tl.constexpr(6),
    tl.constexpr(16),
)


def checksum_records(table: CopyTable, device: torch.device | str, *, of_destination: bool) -> torch.Tensor:
    """The checksum of each record, int64 ``[num_records]`` on the device, queued on torch's current stream.

    Args:
        table: records as ``make_table`` returns them; only the side that is asked for is read.
        device: the torch device where that memory is ("cpu" under TRITON_INTERPRET=1).
        of_destination: of the destinations as they are, or of what a run would write there.

    Raises:
        PlanError: elements to be cast are not aligned to their own size.
        ValueError: a malformed record.
    """
    _C.check_records(table)
    read = _read_side(table, of_destination=of_destination)
    sums = torch.zeros(len(table), dtype=torch.int64, device=device)
    kinds, kind_of = np.unique(_kinds_of(read), axis=0, return_inverse=True)
    with nullcontext() if sums.device.type == "cpu" else torch.cuda.device(sums.device):
        for idx, (src_code, dst_code, dst_itemsize, unit) in enumerate(kinds.tolist()):
            chosen = read[kind_of.reshape(-1) == idx]
            records = torch.from_numpy(chosen.view(np.int64).reshape(-1, 16).copy()).to(sums.device)
            tiles = torch.from_numpy(tiles_of(chosen, by_rows=False)).to(sums.device)
            checksum_kernel[(len(tiles),)](
                records,
                tiles,
                sums,
                UNIT=WORDS[unit],
                UNIT_BYTES=unit,
                DST_WORD=WORDS.get(dst_itemsize, tl.int64),
                SRC_CODE=src_code,
                DST_CODE=dst_code,
                WORD_BYTES=min(dst_itemsize, 8),
                ITEM_BYTES=dst_itemsize,
                BLOCK=BLOCK,
                BLOCKS_PER_TILE=BLOCKS_PER_TILE,
            )
    return sums


def _read_side(table: CopyTable, *, of_destination: bool) -> CopyTable:
    """Records whose source is the side to read, and whose destination is the number of their sum."""
    read = table.copy()
    if of_destination:
        for field in ("", "_strides", "_dtype", "_itemsize"):
            read[f"src{field}"] = read[f"dst{field}"]
    refuse_misaligned(read[read["src_dtype"] != read["dst_dtype"]], ("src",))
    read["dst"] = np.arange(len(read), dtype=np.uint64)
    return read


def _kinds_of(read: CopyTable) -> Integers:
    """One row of integers a record: codes of a cast or zeros, itemsize as summed, bytes that are loaded at once."""
    is_cast = read["src_dtype"] != read["dst_dtype"]
    itemsize = read["src_itemsize"].astype(np.int64)
    strides = np.where(read["extents"] > 1, read["src_strides"], 0)
    bits = np.bitwise_or.reduce(strides, axis=1) | read["src"].astype(np.int64) | itemsize
    columns = [
        np.where(is_cast, read["src_dtype"], 0),
        np.where(is_cast, read["dst_dtype"], 0),
        read["dst_itemsize"],
        np.where(is_cast, itemsize, np.minimum(8, bits & -bits)),
    ]
    return np.stack([np.asarray(column, dtype=np.int64) for column in columns], axis=1)


@triton.jit
def _mix(word, index):
    """A checksum's term; the numbers are those of csrc/convert.h."""
    x = (word ^ (index * 0x9E3779B97F4A7C15)) + 0x2545F4914F6CDD1D
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93
    return x ^ (x >> 29)


@triton.jit
def checksum_kernel(
    records,
    tiles,
    sums,
    UNIT: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    DST_WORD: tl.constexpr,
    SRC_CODE: tl.constexpr,
    DST_CODE: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PER_TILE: tl.constexpr,
):
    """One tile: the terms of consecutive elements of one record, added to its sum."""
    tile = tl.program_id(0).to(tl.int64)
    record = records + tl.load(tiles + 3 * tile) * _RECORD
    first = tl.load(tiles + 3 * tile + 2)
    extent3 = tl.load(record + _EXTENTS + 3)
    count = tl.load(record + _EXTENTS) * tl.load(record + _EXTENTS + 1) * tl.load(record + _EXTENTS + 2) * extent3
    terms = tl.zeros((BLOCK,), dtype=tl.uint64)
    for block in range(BLOCKS_PER_TILE):
        element = first + block * BLOCK + tl.arange(0, BLOCK)
        inside = element < count
        row = element // extent3
        at = tl.load(record + _SRC) + row_offset(row, record, _SRC_STRIDES)
        at += (element - row * extent3) * tl.load(record + _SRC_STRIDES + 3)
        if SRC_CODE != DST_CODE:
            bits = cast_words(tl.load(at.to(tl.pointer_type(UNIT)), mask=inside), SRC_CODE, DST_CODE, DST_WORD)
            word = bits.to(tl.uint64) & ((1 << (8 * WORD_BYTES)) - 1)
            terms += tl.where(inside, _mix(word, element.to(tl.uint64)), 0)
        else:
            for number in tl.static_range((ITEM_BYTES + 7) // 8):
                word = tl.zeros((BLOCK,), dtype=tl.uint64)
                for unit in tl.static_range(WORD_BYTES // UNIT_BYTES):
                    if number * 8 + unit * UNIT_BYTES < ITEM_BYTES:
                        place = (at + (number * 8 + unit * UNIT_BYTES)).to(tl.pointer_type(UNIT))
                        bits = tl.load(place, mask=inside, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
                        if UNIT_BYTES < 8:
                            bits = (bits & ((1 << (8 * UNIT_BYTES)) - 1)) << (8 * UNIT_BYTES * unit)
                        word |= bits
                index = element.to(tl.uint64) * ((ITEM_BYTES + 7) // 8) + number
                terms += tl.where(inside, _mix(word, index), 0)
    total = tl.sum(terms.to(tl.int64, bitcast=True), axis=0)
    tl.atomic_add(sums + tl.load(record + _DST), total)
