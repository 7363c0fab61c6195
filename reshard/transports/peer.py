"""The ``peer`` transport: ranks of one host write straight into each other's destination memory.

Each rank maps the destination memory of the ranks that it sends to (see `reshard.transports.peer_link`), so a
transition is one copy table a hop: the owner reads its shard once, casts in registers, and writes into the peer's
live tensors. Nothing is staged.

Counters on one shared page a rank carry the order of things. In transition number ``e``: a receiver stores ``e``
in its *ready* counter (its destination may be written), each sender waits for that, pushes, and stores ``e *
MAX_HOPS + hop + 1`` in the receiver's *done* counter for it. A rank whose peer dies sees the closed connection;
one whose peer stops waits until the deadline. Both errors name the rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reshard import _C
from reshard.arena import Arena, ArenaRegion, Channel
from reshard.errors import PeerTimeout, PlanError, StateError, TransportError
from reshard.parts import Parts
from reshard.plan import Copy, Plan
from reshard.table import CopyEntry, CopyTable, make_table
from reshard.transports.base import BoundTransfer, Endpoint, rank_copies, refuse_parts_and_graph, source_address
from reshard.transports.local import copy_entry, is_in_place
from reshard.transports.peer_link import IncomingLink, Meeting, Offer, OutgoingLink
from reshard.transports.runner import TableRunner, common_device, drain_stream

if TYPE_CHECKING:
    import torch

COUNTER_BYTES = 64
"""Counters lie a cache line apart."""
WAIT_SLICE_S = 0.02
CLOSE_TIMEOUT_S = 30.0
MAX_HOPS = 16


class PeerTransport:
    """Direct writes between processes of one host.

    Args:
        arena: the arena that this rank's destination tensors were allocated from (`Arena.host` or `Arena.cuda`).
        Borrowed. folder: a folder of this job's own, the same on every rank, for the socket files that ranks meet
        at; its path is short. num_threads: host threads for host memory.
        timeout_s: how long `bind` waits for the other ranks.
    """

    name = "peer"

    def __init__(
        self, arena: Arena, folder: Path | str, *, num_threads: int | None = None, timeout_s: float = 60.0
    ) -> None:
        self._arena, self._folder = arena, Path(folder)
        self._num_threads, self._timeout_s = num_threads, timeout_s
        self._num_binds = 0

    def bind(
        self,
        plan: Plan,
        *,
        rank: int,
        source: Endpoint,
        destination: Endpoint,
        parts: Parts | None = None,
        graph: bool | None = None,
    ) -> BoundTransfer:
        """Meet the peers, map their memory and build one table a hop.

        Every rank of the Plan calls it at about the same time, and as often as the others.

        Raises:
            PlanError: destination memory that others write lies outside the arena, or a peer has another Plan.
            PeerTimeout, TransportError: a peer did not come in time or is gone.
        """
        refuse_parts_and_graph(self.name, parts, graph)
        copies = rank_copies(plan, rank)
        senders = sorted({c.src_rank for c in copies if c.dst_rank == rank and not c.is_local})
        receivers = sorted({c.dst_rank for c in copies if c.src_rank == rank and not c.is_local})
        between = {
            pair: [c for c in copies if (c.src_rank, c.dst_rank) == pair]
            for pair in (*((s, rank) for s in senders), *((rank, r) for r in receivers))
        }
        offers = {s: self._offer(between[s, rank], destination) for s in senders}
        counters = _Counters.allocate(1 + max((*plan.source.ranks, *plan.destination.ranks, rank)))
        self._num_binds += 1
        meeting = Meeting(
            self._folder / str(self._num_binds),
            rank=rank,
            digest=plan.digest,
            arena=self._arena,
            control=counters.region,
            control_arena=counters.arena,
        )
        incoming, outgoing = meeting.hold(offers, receivers, timeout_s=self._timeout_s)
        tables = self._tables(copies, rank, source, destination, {link.rank: link for link in outgoing})
        hops_from = {s: sorted({c.hop for c in between[s, rank]}) for s in senders}
        hops_to = {r: sorted({c.hop for c in between[rank, r]}) for r in receivers}
        device = common_device(source, destination)
        runners = {hop: TableRunner(table, device, num_threads=self._num_threads) for hop, table in tables.items()}
        return _PeerTransfer(rank, device, counters, incoming, outgoing, runners, hops_from, hops_to)

    def _offer(self, copies: Sequence[Copy], destination: Endpoint) -> Offer:
        regions: dict[int, ArenaRegion] = {}
        places: dict[str, tuple[int, int]] = {}
        for storage in dict.fromkeys(c.dst.storage for c in copies):
            address = destination.tensors[storage].untyped_storage().data_ptr()
            region = self._arena.region_at(address)
            if region is None:
                raise PlanError(
                    f"destination tensor {storage!r} is written by other processes but its memory is not the "
                    "arena's: allocate it from the arena that this transport was given "
                    "(arena.allocate(...).tensor(...))"
                )
            regions.setdefault(region.id, region)
            places[storage] = (list(regions).index(region.id), address - region.address)
        return Offer(tuple(regions.values()), places)

    def _tables(
        self,
        copies: Sequence[Copy],
        rank: int,
        source: Endpoint,
        destination: Endpoint,
        links: Mapping[int, OutgoingLink],
    ) -> dict[int, CopyTable]:
        by_hop: dict[int, list[CopyEntry]] = {}
        for c in copies:
            if c.src_rank != rank or is_in_place(c, source, destination):
                continue
            src = source_address(c, source, destination)
            if c.is_local:
                dst = destination.base(c.dst)
            else:
                dst = links[c.dst_rank].storage_address(c.dst.storage) + c.dst.offset_bytes
            by_hop.setdefault(c.hop, []).append(copy_entry(c, src=src, dst=dst))
        return {hop: make_table(by_hop[hop]) for hop in sorted(by_hop)}


class _Counters:
    """This rank's page: *ready* first, then one *done* counter for each rank that may send."""

    def __init__(self, arena: Arena, region: ArenaRegion) -> None:
        self.arena, self.region = arena, region

    @classmethod
    def allocate(cls, num_ranks: int) -> _Counters:
        arena = Arena.host()
        region = arena.allocate("counters", (1 + num_ranks) * COUNTER_BYTES)
        region.tensor().zero_()
        return cls(arena, region)

    @property
    def ready(self) -> int:
        return self.region.address

    def done(self, sender: int) -> int:
        return _done_counter(self.region.address, sender)


def _done_counter(page: int, sender: int) -> int:
    return page + (1 + sender) * COUNTER_BYTES


class _PeerTransfer(BoundTransfer):
    """Counters, links and one table a hop."""

    staging_bytes = 0

    def __init__(
        self,
        rank: int,
        device: torch.device | None,
        counters: _Counters,
        incoming: list[IncomingLink],
        outgoing: list[OutgoingLink],
        runners: dict[int, TableRunner],
        hops_from: dict[int, list[int]],
        hops_to: dict[int, list[int]],
    ) -> None:
        self._rank, self._device, self._counters = rank, device, counters
        self._incoming, self._outgoing = incoming, outgoing
        self._runners, self._hops_from, self._hops_to = runners, hops_from, hops_to
        hops = {*runners, *(h for hops in (*hops_from.values(), *hops_to.values()) for h in hops)}
        self._hops = sorted(hops)
        self._num_hops = 1 + max(hops, default=0)
        self._epoch, self._pushed_hop = 0, -1
        self._closed = False
        self.num_launches = sum(runner.num_launches for runner in runners.values())
        self.staging_bytes = sum(runner.device_bytes for runner in runners.values())

    def begin(self, *, stream: int | None) -> None:
        """Open this rank's destination.

        On a GPU it first waits for what is queued on the stream: the destination may still be read there.
        """
        if self._closed:
            raise StateError("this transfer is closed")
        if self._incoming:
            drain_stream(self._device, stream)
        self._epoch += 1
        self._stream, self._pushed_hop = stream, -1
        _C.counter_store(self._counters.ready, self._epoch)

    def push(self, part: int, *, stream: int | None) -> None:
        """Push the first hop at once where every receiver is ready already."""
        self._stream = stream
        if self._hops and self._hops[0] == 0 and self._awaited_ready(0.0) is None:
            self._push(0)

    def wait(self, *, deadline_s: float) -> None:
        """Push every hop in order and wait until all of this rank's bytes have arrived."""
        deadline = time.monotonic() + deadline_s
        if self._pushed_hop < 0:
            self._await(self._awaited_ready, deadline, deadline_s, "to open its destination")
        for hop in self._hops:
            if hop > 0:
                arrived = partial(self._awaited_done, before_hop=hop)
                self._await(arrived, deadline, deadline_s, f"to send hop {hop - 1}")
            if hop > self._pushed_hop:
                self._push(hop)
            self._settle(hop, deadline, deadline_s)
        arrived = partial(self._awaited_done, before_hop=self._num_hops)
        self._await(arrived, deadline, deadline_s, "to send its last bytes")

    def _push(self, hop: int) -> None:
        if hop in self._runners:
            self._runners[hop].launch(self._stream)
        self._pushed_hop = hop

    def _settle(self, hop: int, deadline: float, deadline_s: float) -> None:
        """Wait for this rank's own writes of a hop, then tell each receiver."""
        if hop in self._runners:
            left = max(deadline - time.monotonic(), 0.001)
            self._runners[hop].synchronize(left, what=f"rank {self._rank}'s writes of hop {hop}")
        for link in self._outgoing:
            if hop in self._hops_to[link.rank]:
                _C.counter_store(_done_counter(link.control.address, self._rank), self._done_value(hop))

    def _done_value(self, hop: int) -> int:
        return self._epoch * MAX_HOPS + hop + 1

    def _awaited_ready(self, seconds: float) -> int | None:
        addresses = [link.control.address for link in self._outgoing]
        index = _C.counters_wait(addresses, self._epoch, seconds)
        return None if index < 0 else self._outgoing[index].rank

    def _awaited_done(self, seconds: float, *, before_hop: int) -> int | None:
        """The first sender whose last hop before `before_hop` has not arrived within `seconds`; None when all have."""
        end = time.monotonic() + seconds
        for link in self._incoming:
            hops = [hop for hop in self._hops_from[link.rank] if hop < before_hop]
            if not hops:
                continue
            left = max(end - time.monotonic(), 0.0)
            if _C.counters_wait([self._counters.done(link.rank)], self._done_value(hops[-1]), left) >= 0:
                return link.rank
        return None

    def _await(self, missing: Callable[[float], int | None], deadline: float, deadline_s: float, what: str) -> None:
        """Wait in slices until nobody is `missing`, looking at each slice's end whether the one that is still lives."""
        while (peer := missing(WAIT_SLICE_S)) is not None:
            if self._channel(peer).peer_has_closed and missing(0.0) == peer:
                raise TransportError(
                    f"rank {self._rank}, transition {self._epoch}: rank {peer} is gone; it had {what}. This rank's "
                    "training weights are intact; bind again once the rank is back"
                )
            if time.monotonic() >= deadline:
                raise PeerTimeout(
                    f"rank {self._rank}, transition {self._epoch}: waited {deadline_s:g} s for rank {peer} {what}; "
                    "check that it is alive and that every rank runs the same number of transitions, or allow more time"
                )

    def _channel(self, peer: int) -> Channel:
        links = {link.rank: link.channel for link in self._incoming} | {k.rank: k.channel for k in self._outgoing}
        return links[peer]

    def close(self) -> None:
        """Unmap the peers' memory, wait until the peers have unmapped this rank's, and take it back."""
        if self._closed:
            return
        self._closed = True
        for runner in self._runners.values():
            runner.close()
        for receiver in self._outgoing:
            receiver.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for link in self._incoming:
            while not link.channel.peer_has_closed:
                if time.monotonic() >= deadline:
                    raise PeerTimeout(
                        f"rank {link.rank} still has memory of rank {self._rank} mapped after {CLOSE_TIMEOUT_S:g} s: "
                        "close the transfer on every rank"
                    )
                time.sleep(WAIT_SLICE_S / 10)
            for share in link.shares:
                share.end()
            link.channel.close()
        self._counters.arena.close()
