"""What goes into each round of the `collective` transport and where in staging it lies, before any memory exists.

Note: ways of gathers
    A regular gather (`reshard.plan_gather`) travels in one of four ways, the same on every rank. ``IN_PLACE``: the own
    part is put into its place in the destination, and an all-gather, many of them in one call, fills in the others.
    ``DIRECT``: as before, but each member sends its part straight from its destination into the others'. ``STAGED``: a
    gather whose parts are not one run of the destination; each part is packed once, whatever the number of members,
    gathered in staging and unpacked. ``None``: as packed messages between pairs, like all other copies.

    With NCCL every gather that can be is IN_PLACE, and among three ranks or more the others are STAGED. Gloo's own
    all-gather copies through buffers of its own and was the slowest of all ways, so there gathers of large parts are
    DIRECT, and among three ranks or more the others are STAGED by messages (docs/transports.md has the figures).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from reshard.plan import Copies, Copy, Plan
from reshard.plan_gather import Gather
from reshard.schedule import ALIGNMENT_BYTES, Message, pack_pair

NUM_BUFFERS = 2
MIN_DIRECT_BYTES = 256 * 1024
"""Parts below this cost less in packed messages than as messages of their own."""
GATHERS_A_CALL = 256

GatherMode = Literal["auto", "all_gather", "messages", "off"]
"""``all_gather``: collectives of smaller groups; ``messages``: between pairs of ranks; ``auto``: the former with NCCL,
the latter with gloo; ``off``: no gather is treated as one."""


class Way(enum.Enum):
    """How a gather travels (see the note)."""

    IN_PLACE = "in place"
    DIRECT = "direct"
    STAGED = "staged"


@dataclass(frozen=True, slots=True)
class Place:
    """A message and its first byte in the round's staging."""

    message: Message
    is_outgoing: bool
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A round: messages to pack and unpack. `gather` has the members where it is a staged gather, else nobody."""

    hop: int
    places: tuple[Place, ...]
    gather: tuple[int, ...]
    num_bytes: int


def choose_way(gather: Gather, mode: GatherMode, groups: Collection[tuple[int, ...]]) -> Way | None:
    """How `gather` travels; `groups` are the sets of ranks, ascending, that can gather among themselves."""
    members = tuple(sorted(gather.ranks))
    if mode == "off" or members not in groups:
        return None
    if mode == "all_gather" and gather.in_place and gather.is_ascending:
        return Way.IN_PLACE
    if mode == "messages" and gather.in_place and gather.part_bytes >= MIN_DIRECT_BYTES:
        return Way.DIRECT
    return Way.STAGED if gather.same_shape and len(members) > 2 else None


def own_rows(plan: Plan, gather: Gather, rank: int) -> dict[tuple[int, int], Copy]:
    """The copies of `gather` that `rank` sends, receives or makes itself, by (source rank, destination rank)."""
    rows = np.array(gather.rows, np.int64)
    src, dst = plan.table.src_rank[rows], plan.table.dst_rank[rows]
    copies = Copies(plan.table, rows[(src == rank) | (dst == rank)])
    return {(copy.src_rank, copy.dst_rank): copy for copy in copies}


def staged_drafts(
    gathers: Mapping[tuple[int, ...], Sequence[Mapping[tuple[int, int], Copy]]], rank: int, *, set_bytes: int
) -> list[Draft]:
    """Rounds of staged gathers by members: slot ``i`` of a round is the part of the ``i``-th member, ascending."""
    drafts: list[Draft] = []
    for members in sorted(gathers):
        other = next(m for m in members if m != rank)
        streams: dict[int, tuple[Message, ...]] = {}
        slot_bytes = set_bytes // len(members) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        for member in members:
            pair = (rank, other) if member == rank else (member, rank)
            streams[member] = pack_pair([found[pair] for found in gathers[members]], budget_bytes=slot_bytes)
        for parts in zip(*streams.values(), strict=True):
            sizes = {message.num_bytes for message in parts}
            assert len(sizes) == 1, "parts of one shape pack alike"
            (size,) = sizes
            places = [Place(message, message.src_rank == rank, i * size) for i, message in enumerate(parts)]
            drafts.append(Draft(0, tuple(places), members, size * len(members)))
    return drafts


def exchange_drafts(traffic: Sequence[Copy], rank: int, *, pair_bytes: int) -> list[Draft]:
    """Rounds of packed messages, at most one a peer and direction in each; by hop."""
    pairs: dict[tuple[int, int, int], list[Copy]] = {}
    for copy in traffic:
        pairs.setdefault((copy.hop, copy.src_rank, copy.dst_rank), []).append(copy)
    rounds: dict[tuple[int, int], list[Message]] = {}
    for hop, src, dst in sorted(pairs):
        for index, message in enumerate(pack_pair(pairs[hop, src, dst], budget_bytes=pair_bytes)):
            rounds.setdefault((hop, index), []).append(message)
    return [_exchange(hop, rounds[hop, index], rank) for hop, index in sorted(rounds)]


def num_peers(traffic: Sequence[Copy], rank: int) -> int:
    """How many ranks this one sends to or receives from, whichever are more."""
    sends = {c.dst_rank for c in traffic if c.src_rank == rank}
    receives = {c.src_rank for c in traffic if c.dst_rank == rank}
    return max(len(sends), len(receives))


def _exchange(hop: int, messages: Sequence[Message], rank: int) -> Draft:
    places, at = [], 0
    for message in messages:
        places.append(Place(message, message.src_rank == rank, at))
        at += -(-message.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Draft(hop, tuple(places), (), at)
