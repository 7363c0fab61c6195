"""The ``peer`` transport: ranks of one host write straight into each other's destination memory.

Each rank maps the destination memory of the ranks that it sends to (see `reshard.transports.peer_link`), so a
transition is one copy table a part and hop: the owner reads its shard once, casts in registers, and writes into the
peer's live tensors. Nothing is staged. How a transition runs is in `reshard.transports.peer_transfer`.

Note "one memory, two processes". A receiver may keep its destination in memory that it imported from the sender
(`reshard.arena.receive_region`, `reshard.arena.borrow_tensors`). Where box, place and dtype then agree on both sides,
the two names mean the same bytes and there is nothing to copy: the sender tells the receiver at bind, the Resharder
counts them as aliased, and while the sender trains the receiver must not generate (`Resharder.train` sees to it).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reshard.arena import Arena, ArenaRegion, ImportedRegion, RegionOrigin
from reshard.arena.ipc import DeviceMemory
from reshard.errors import PlanError, StateError
from reshard.parts import Parts
from reshard.plan import Copy, Plan
from reshard.table import CopyEntry, make_table
from reshard.transports.base import BoundTransfer, Endpoint, rank_copies, source_address
from reshard.transports.local import copy_entry, is_same_place
from reshard.transports.peer_link import IncomingLink, Meeting, Offer, OutgoingLink, receive_numbers, send_numbers
from reshard.transports.peer_page import OwnPage
from reshard.transports.peer_transfer import Leg, PeerTransfer, Route
from reshard.transports.runner import Launches, common_device


class PeerTransport:
    """Direct writes between processes of one host.

    Args:
        arena: the arena that this rank's destination tensors were allocated from (`Arena.host` or `Arena.cuda`).
            Borrowed. On a GPU they may also be plain tensors, which peers open by CUDA IPC (see `reshard.arena.ipc`).
        folder: a folder of this job's own, the same on every rank, for the socket files that ranks meet at; its path is
            short.
        imports: memory of other ranks that this rank's destination tensors, or those of its receivers, lie in.
            Borrowed: close it after the transfer.
        num_threads: host threads for host memory.
        timeout_s: how long `bind` waits for the other ranks.
    """

    name = "peer"

    def __init__(
        self,
        arena: Arena,
        folder: Path | str,
        *,
        imports: Sequence[ImportedRegion] = (),
        num_threads: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._arena, self._folder, self._imports = arena, Path(folder), tuple(imports)
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
        """Meet the peers, map their memory and build one table a part and hop.

        Every rank of the Plan calls it at about the same time, and as often as the others.

        Raises:
            PlanError: destination memory that others write lies outside the arena, a peer has another Plan or other
                parts, or a rank would write into memory that a third one imported.
            PeerTimeout, TransportError: a peer did not come in time or is gone.
        """
        parts = parts if parts is not None else Parts.whole(plan.destination.specs)
        traffic = _Traffic.of(plan, rank, parts)
        offers = {s: self._offer(traffic.between[s, rank], destination) for s in traffic.senders}
        own = OwnPage.allocate(1 + max((*plan.source.ranks, *plan.destination.ranks, rank)), parts.num)
        self._num_binds += 1
        meeting = Meeting(
            self._folder / str(self._num_binds),
            rank=rank,
            digest=hashlib.sha256((plan.digest + parts.digest).encode()).hexdigest(),
            arena=self._arena,
            resolve=self._resolve,
            control=own.region,
            control_arena=own.arena,
        )
        incoming, outgoing = meeting.hold(offers, traffic.receivers, timeout_s=self._timeout_s)
        try:
            tables = _Tables.of(traffic, source, destination, {link.rank: link for link in outgoing})
            in_place = self._agree_in_place(traffic, tables.in_place, incoming, outgoing)
            device = common_device(source, destination)
            legs = {
                (part, hop): Leg(
                    Launches(
                        [make_table(tables.entries.get((part, hop), ()))],
                        device,
                        num_threads=self._num_threads,
                        graph=graph,
                    ),
                    tuple(sorted(traffic.receivers_of.get((part, hop), ()))),
                )
                for part, hop in sorted(traffic.sent)
            }
        except BaseException:
            for channel in (*(sender.channel for sender in incoming), *(link.channel for link in outgoing)):
                channel.close()
            raise
        route = Route(parts.num, legs, traffic.last_hops, in_place)
        return PeerTransfer(rank, device, own, incoming, outgoing, route)

    def _offer(self, copies: Mapping[int, Copy], destination: Endpoint) -> Offer:
        regions: dict[tuple[str, int], ArenaRegion | DeviceMemory] = {}
        places: dict[str, tuple[int, int]] = {}
        imported: dict[str, tuple[RegionOrigin, int]] = {}
        for storage in dict.fromkeys(c.dst.storage for c in copies.values()):
            address = destination.tensors[storage].untyped_storage().data_ptr()
            region = self._arena.region_at(address)
            foreign = next((i for i in self._imports if i.address <= address < i.address + i.num_bytes), None)
            if region is None and foreign is not None:
                imported[storage] = (foreign.origin, address - foreign.address)
                continue
            memory = region if region is not None else self._device_memory(storage, address)
            key = ("arena", memory.id) if isinstance(memory, ArenaRegion) else ("device", memory.address)
            regions.setdefault(key, memory)
            places[storage] = (list(regions).index(key), address - memory.address)
        return Offer(tuple(regions.values()), places, imported, owner=destination)

    def _device_memory(self, storage: str, address: int) -> DeviceMemory:
        """The allocation of another allocator on this arena's GPU that a storage lies in."""
        what = (
            f"destination tensor {storage!r} is written by other processes but its memory is not the arena's: "
            "allocate it from the arena that this transport was given (arena.allocate(...).tensor(...)), or pass the "
            "region that it was imported with in imports="
        )
        if self._arena.device < 0:
            raise PlanError(what)
        try:
            return DeviceMemory.at(address)
        except StateError as error:
            raise PlanError(f"{what}; {error}") from error

    def _resolve(self, origin: RegionOrigin) -> int | None:
        if origin.arena != self._arena.id:
            return next((region.address for region in self._imports if region.origin == origin), None)
        try:
            return ArenaRegion(self._arena.core, origin.region).address
        except StateError:
            return None

    def _agree_in_place(
        self,
        traffic: _Traffic,
        found: frozenset[int],
        incoming: Sequence[IncomingLink],
        outgoing: Sequence[OutgoingLink],
    ) -> dict[int, frozenset[int]]:
        """Positions of copies that have nothing to do, by the other rank; senders find them, receivers are told."""
        agreed: dict[int, frozenset[int]] = {traffic.rank: found}
        for link in outgoing:
            pair = list(traffic.between[traffic.rank, link.rank])
            numbers = [number for number, position in enumerate(pair) if position in found]
            send_numbers(link.channel, numbers, timeout_s=self._timeout_s)
            agreed[link.rank] = frozenset(pair[number] for number in numbers)
        for sender in incoming:
            pair = list(traffic.between[sender.rank, traffic.rank])
            told = receive_numbers(sender.channel, timeout_s=self._timeout_s)
            agreed[sender.rank] = agreed.get(sender.rank, frozenset()) | {pair[number] for number in told}
        return agreed


@dataclass(slots=True)
class _Traffic:
    """A rank's copies by position in `rank_copies`, sorted out in one pass."""

    rank: int
    copies: Sequence[Copy]
    number: dict[str, int]
    between: dict[tuple[int, int], dict[int, Copy]] = field(default_factory=dict)
    sent: set[tuple[int, int]] = field(default_factory=set)
    """(part, hop) of the copies that this rank makes."""
    receivers_of: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    last_hops: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """By part and sender, the hops that bring something."""

    @classmethod
    def of(cls, plan: Plan, rank: int, parts: Parts) -> _Traffic:
        traffic = cls(rank, rank_copies(plan, rank), parts.numbers())
        for position, c in enumerate(traffic.copies):
            part = traffic.number[c.region.name]
            if not c.is_local:
                traffic.between.setdefault((c.src_rank, c.dst_rank), {})[position] = c
            if c.src_rank == rank:
                traffic.sent.add((part, c.hop))
                if not c.is_local:
                    traffic.receivers_of.setdefault((part, c.hop), set()).add(c.dst_rank)
            elif c.hop not in (hops := traffic.last_hops.setdefault(part, {}).setdefault(c.src_rank, [])):
                hops.append(c.hop)
        return traffic

    @property
    def senders(self) -> list[int]:
        return sorted(src for src, dst in self.between if dst == self.rank)

    @property
    def receivers(self) -> list[int]:
        return sorted(dst for src, dst in self.between if src == self.rank)


@dataclass(slots=True)
class _Tables:
    """What this rank writes, by part and hop, and the positions of copies that have nothing to do."""

    entries: dict[tuple[int, int], list[CopyEntry]]
    in_place: frozenset[int]

    @classmethod
    def of(
        cls, traffic: _Traffic, source: Endpoint, destination: Endpoint, links: Mapping[int, OutgoingLink]
    ) -> _Tables:
        entries: dict[tuple[int, int], list[CopyEntry]] = {}
        in_place: set[int] = set()
        for position, c in enumerate(traffic.copies):
            if c.src_rank != traffic.rank:
                continue
            src = source_address(c, source, destination)
            if c.is_local:
                dst = destination.base(c.dst)
            else:
                dst = links[c.dst_rank].addresses[c.dst.storage] + c.dst.offset_bytes
            if c.is_alias or is_same_place(c, src=src, dst=dst):
                in_place.add(position)
            else:
                entries.setdefault((traffic.number[c.region.name], c.hop), []).append(copy_entry(c, src=src, dst=dst))
        if any(link.shared for link in links.values()):
            # What one part writes into memory that both sides share must not be what another part has yet to read.
            make_table(entry for (_, hop), several in entries.items() if hop == 0 for entry in several)
        return cls(entries, frozenset(in_place))
