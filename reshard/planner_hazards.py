"""Plans within one memory: refuse copies that would overwrite source bytes which another copy, perhaps not yet run,
reads.
"""

import numpy as np
import numpy.typing as npt

from reshard.boxes import join
from reshard.copy_table import ITEMSIZES, CopyTable
from reshard.errors import PlanError
from reshard.pattern import IntArray

_NO_STEP = 1 << 56


def check_no_hazards(table: CopyTable) -> None:
    """Raise PlanError when a copy writes bytes that a copy reads from the source; both sides share one memory.

    Exact where both boxes have equal strides (an in-place gather has), cautious otherwise: whole byte spans count.
    """
    copied = np.flatnonzero(table.alias == 0)
    reads = copied[table.hop[copied] == 0]
    numel = table.stop - table.start
    src_low, src_high = spans(table.src_offset, table.src_strides, table.src_dtype, numel)
    dst_low, dst_high = spans(table.dst_offset, table.dst_strides, table.dst_dtype, numel)
    src_key = table.src_rank.astype(np.int64) * len(table.storages) + table.src_storage
    dst_key = table.dst_rank.astype(np.int64) * len(table.storages) + table.dst_storage
    first, second, _, _ = join(
        np.stack([src_key, src_low], axis=1)[reads],
        np.stack([src_key + 1, src_high], axis=1)[reads],
        np.stack([dst_key, dst_low], axis=1)[copied],
        np.stack([dst_key + 1, dst_high], axis=1)[copied],
    )
    read, write = reads[first], copied[second]
    clash = np.flatnonzero(_overlap(table, read, write))
    if len(clash):
        row, other = int(write[clash[0]]), int(read[clash[0]])
        raise PlanError(
            f"the plan overwrites {table.names[table.name_idx[row]]} on rank {table.dst_rank[row]} (storage "
            f"{table.storages[table.dst_storage[row]]!r}) before everything has been read: {len(clash)} pairs "
            f"of copies, "
            f"first with {table.names[table.name_idx[other]]}; give the destination its own storage, or drop "
            f"the common "
            "memory label and stage the bytes"
        )


def spans(
    offset: IntArray, strides: IntArray, dtype: npt.NDArray[np.integer], extents: IntArray
) -> tuple[IntArray, IntArray]:
    """First byte and last byte + 1 that a strided box touches."""
    itemsize = ITEMSIZES[dtype]
    reach = (np.maximum(extents - 1, 0) * strides).sum(axis=1) * itemsize
    return offset, offset + reach + itemsize


def _overlap(table: CopyTable, read: IntArray, write: IntArray) -> npt.NDArray[np.bool_]:
    strides = table.src_strides[read]
    comparable = (strides == table.dst_strides[write]).all(axis=1) & (table.src_dtype[read] == table.dst_dtype[write])
    extents = np.maximum(table.stop - table.start, 1)
    clear = are_apart(
        (table.src_offset[read], extents[read]),
        (table.dst_offset[write], extents[write]),
        strides,
        ITEMSIZES[table.src_dtype[read]],
    )
    found: npt.NDArray[np.bool_] = ~(comparable & clear)
    return found


def are_apart(
    first: tuple[IntArray, IntArray], second: tuple[IntArray, IntArray], strides: IntArray, itemsize: IntArray
) -> npt.NDArray[np.bool_]:
    """Pair by pair, whether two boxes of equal strides, given by byte offsets and extents, surely share no element.

    Boxes that run over the end of a row of the next wider dim are not sure.
    """
    single = (first[1] == 1) & (second[1] == 1)
    strides = np.where(single, 0, strides)
    first_at, first_rest = _coordinates(first[0], strides, itemsize)
    second_at, second_rest = _coordinates(second[0], strides, itemsize)
    first_to, second_to = first_at + first[1], second_at + second[1]
    low, high = np.maximum(first_at, second_at), np.minimum(first_to, second_to)
    step = np.where(strides > 0, strides, _NO_STEP).min(axis=1, initial=_NO_STEP)
    within = np.maximum(first_rest, second_rest) + itemsize <= step * itemsize
    apart = within & (((low >= high) & ~single).any(axis=1) | (np.abs(first_rest - second_rest) >= itemsize))
    order = np.argsort(-strides, axis=1, kind="stable")
    reach = np.take_along_axis(np.maximum(first_to, second_to) * strides, order, axis=1)
    wider = np.take_along_axis(strides, order, axis=1)
    found: npt.NDArray[np.bool_] = apart & (reach[:, 1:] <= wider[:, :-1]).all(axis=1)
    return found


def _coordinates(offset: IntArray, strides: IntArray, itemsize: IntArray) -> tuple[IntArray, IntArray]:
    """Offsets as coordinates along the strides, widest first, and what is left over in bytes."""
    rest, coordinates = offset.copy(), np.zeros_like(strides)
    each = np.arange(len(offset))
    order = np.argsort(-strides, axis=1, kind="stable")
    for column in range(strides.shape[1]):
        dim = order[:, column]
        step = np.maximum(strides[each, dim], 1) * itemsize
        used = strides[each, dim] > 0
        coordinates[each, dim] = np.where(used, rest // step, 0)
        rest = np.where(used, rest % step, rest)
    return coordinates, rest
