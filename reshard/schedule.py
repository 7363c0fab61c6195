"""Schedule: a Plan's copies cut into rounds under a staging budget, for transports that pack bytes before they
send them.

Both ends of a pair of ranks derive the same rounds from the copies between them alone, so no rank needs the
others' Plans: the copies of a pair, in Plan order, form one stream of bytes, and round ``k`` carries what lies
between ``k`` and ``k + 1`` times the pair's budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reshard.dtype import DType
from reshard.errors import PlanError
from reshard.plan import Copy
from reshard.region import Region

ALIGNMENT_BYTES = 16
"""Each box starts at a multiple of this in the packed stream, so that wide loads and stores apply to it."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A box in a packed message: the Copy (cut to what this round carries) and its byte offset in the pair's
    message.
    """

    copy: Copy
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends another in one round: `num_bytes` from the first slot's start to the last one's end."""

    src_rank: int
    dst_rank: int
    slots: tuple[Slot, ...]
    num_bytes: int


def wire_dtype(copy: Copy) -> DType:
    """Element type that travels: the smaller of the first source's and the destination's, so that the owner casts what
    shrinks, and what a later hop passes on is no wider than what came.
    """
    return copy.wire


def wire_bytes(copy: Copy) -> int:
    """Bytes of the box in a message."""
    return copy.region.numel * wire_dtype(copy).itemsize


def pack_pair(copies: Sequence[Copy], *, budget_bytes: int) -> tuple[Message, ...]:
    """Cut the copies between one pair of ranks into messages of at most `budget_bytes` each.

    Boxes are packed densely in C order with their `wire_dtype`, each aligned to `ALIGNMENT_BYTES`.

    Raises:
        PlanError: the copies are not all of one pair, or the budget is below `ALIGNMENT_BYTES`.
    """
    if not copies:
        return ()
    if budget_bytes < ALIGNMENT_BYTES:
        raise PlanError(
            f"a staging budget of {budget_bytes} bytes a pair is too small: give at least {ALIGNMENT_BYTES}"
        )
    src_rank, dst_rank = copies[0].src_rank, copies[0].dst_rank
    if any((c.src_rank, c.dst_rank) != (src_rank, dst_rank) for c in copies):
        raise PlanError(f"pack_pair takes the copies of one pair of ranks, got others beside {src_rank} -> {dst_rank}")
    messages: list[Message] = []
    slots: list[Slot] = []
    filled = end = 0
    rest = [c for c in reversed(copies) if not c.region.is_empty]
    while rest:
        copy = rest.pop()
        head, tail = _split(copy, room=budget_bytes - filled, budget=budget_bytes)
        if tail is not None:
            rest.append(tail)
        if head is None:
            messages.append(Message(src_rank, dst_rank, tuple(slots), end))
            slots, filled = [], 0
        elif wire_bytes(head) > budget_bytes - filled:
            rest.append(head)
        else:
            slots.append(Slot(head, filled))
            end = filled + wire_bytes(head)
            filled = min(_aligned(end), budget_bytes)
    if slots:
        messages.append(Message(src_rank, dst_rank, tuple(slots), end))
    return tuple(messages)


def _split(copy: Copy, *, room: int, budget: int) -> tuple[Copy | None, Copy | None]:
    """What goes next and what stays of `copy` when `room` of `budget` bytes are left in a message.

    (copy, None) where all of it fits; (some slices, the rest) where some do; (None, copy) to begin a new message
    first; (one slice, the rest), the slice larger than `room`, where not even a whole message holds a slice and
    the slice must be cut in turn.
    """
    if wire_bytes(copy) <= room:
        return copy, None
    dim = next((d for d, extent in enumerate(copy.region.shape) if extent > 1), None)
    if dim is None:
        if wire_bytes(copy) > budget:
            raise PlanError(f"one element of {copy.region.name!r} exceeds the staging budget of {budget} bytes a pair")
        return None, copy
    slice_bytes = wire_bytes(copy) // copy.region.shape[dim]
    if slice_bytes > budget:
        return _cut(copy, dim, 1)
    if slice_bytes > room:
        return None, copy
    return _cut(copy, dim, room // slice_bytes)


def sub_copy(copy: Copy, region: Region) -> Copy:
    """`copy` narrowed to `region`, which lies inside its region."""
    delta = tuple(a - b for a, b in zip(region.start, copy.region.start, strict=True))
    return replace(copy, region=region, src=copy.src.advance(delta), dst=copy.dst.advance(delta))


def _cut(copy: Copy, dim: int, count: int) -> tuple[Copy, Copy]:
    region = copy.region
    middle = region.start[dim] + count
    head_stop = (*region.stop[:dim], middle, *region.stop[dim + 1 :])
    tail_start = (*region.start[:dim], middle, *region.start[dim + 1 :])
    return (
        sub_copy(copy, Region(region.name, region.start, head_stop)),
        sub_copy(copy, Region(region.name, tail_start, region.stop)),
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
