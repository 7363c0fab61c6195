"""How ranks of one host meet before a transition: each opens its destination memory to the ranks that will write there.

Every rank listens on a socket file of its own, ``<folder>/<rank>.sock``. A rank that sends connects to each of its
receivers and says its number and its Plan's digest; the receiver answers with its control page and the regions that
this sender's copies touch, and says where each storage lies in them. A storage in memory that the receiver imported
itself is named by that memory's origin. The connections stay open: a rank that dies closes them, and its peers see it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from reshard.arena import (
    Arena,
    ArenaRegion,
    Channel,
    ImportedRegion,
    Listener,
    RegionOrigin,
    RegionShare,
    receive_region,
    send_region,
)
from reshard.arena.ipc import DeviceMemory, ImportedMemory, MemoryShare, receive_memory, send_memory
from reshard.errors import PlanError, TransportError

STORAGES_A_PACKET = 500
RANGES_A_PACKET = 4000


@dataclass(frozen=True, slots=True)
class Offer:
    """What a receiver opens to one sender: regions, of its arena or of another allocator on its GPU; for each storage
    in them (index of its region, byte offset); for each storage in memory that the receiver itself imported (where
    that comes from, byte offset).
    """

    regions: tuple[ArenaRegion | DeviceMemory, ...]
    places: Mapping[str, tuple[int, int]]
    imported: Mapping[str, tuple[RegionOrigin, int]]
    owner: object
    """Keeps memory of other allocators allocated."""


Resolve: TypeAlias = Callable[[RegionOrigin], int | None]
"""Address in this process of a region that is this process's own, or imported by it; None where it is neither."""


@dataclass(slots=True)
class IncomingLink:
    """One sender, as its receiver sees it."""

    rank: int
    channel: Channel
    shares: list[RegionShare | MemoryShare]


@dataclass(slots=True)
class OutgoingLink:
    """One receiver, as its sender sees it: its control page and destination memory, mapped here."""

    rank: int
    channel: Channel
    control: ImportedRegion
    regions: list[ImportedRegion | ImportedMemory]
    addresses: dict[str, int]
    """In this process, of the first byte of each of the peer's storages."""
    shared: frozenset[str]
    """Storages of the peer that lie in memory which this process had already."""

    def close(self) -> None:
        """Unmap, then hang up: the receiver takes the closed connection for leave to use its memory otherwise."""
        for region in (*self.regions, self.control):
            region.close()
        self.channel.close()


class Meeting:
    """One bind: serves this rank's senders in a thread while it connects to its receivers.

    Args:
        folder: where the socket files are; the same for all ranks, short (a socket path has at most 107 bytes).
        rank: this rank.
        digest: of the Plan and its parts; a peer with another one is refused on both sides.
        arena: where this rank's destination memory is.
        resolve: finds memory that a receiver imported.
        control: the page of counters that is opened to every sender.
        control_arena: the arena that `control` belongs to.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        digest: str,
        arena: Arena,
        resolve: Resolve,
        control: ArenaRegion,
        control_arena: Arena,
    ) -> None:
        self._folder, self._rank, self._digest, self._resolve = folder, rank, digest, resolve
        self._arena, self._control, self._control_arena = arena, control, control_arena

    def hold(
        self, offers: Mapping[int, Offer], receivers: Sequence[int], *, timeout_s: float
    ) -> tuple[list[IncomingLink], list[OutgoingLink]]:
        """Meet every sender (keys of `offers`) and every receiver.

        Raises:
            PeerTimeout, TransportError: a peer did not come or is gone; the message names the ranks that were missing.
            PlanError: a peer has another Plan.
            After an error every connection is closed, so that no peer waits for this rank; memory that a peer has
            mapped already stays pinned until that peer is gone.
        """
        incoming: list[IncomingLink] = []
        outgoing: list[OutgoingLink] = []
        failure: list[TransportError | PlanError] = []
        with _listening(self._folder / f"{self._rank}.sock") as listener:
            server = threading.Thread(target=self._serve, args=(listener, offers, incoming, failure, timeout_s))
            server.start()
            try:
                for receiver in receivers:
                    outgoing.append(self._join(receiver, timeout_s))
            except (TransportError, PlanError) as error:
                failure.append(error)
            finally:
                server.join()
        if failure:
            for link in outgoing:
                link.close()
            for sender in incoming:
                sender.channel.close()
            raise failure[0]
        return sorted(incoming, key=lambda link: link.rank), outgoing

    def _serve(
        self,
        listener: Listener,
        offers: Mapping[int, Offer],
        incoming: list[IncomingLink],
        failure: list[TransportError | PlanError],
        timeout_s: float,
    ) -> None:
        end = time.monotonic() + timeout_s
        while len(incoming) < len(offers):
            try:
                channel = listener.accept(timeout_s=max(end - time.monotonic(), 0.001))
                incoming.append(self._admit(channel, offers, max(end - time.monotonic(), 0.001)))
            except (TransportError, PlanError) as error:
                missing = sorted(set(offers) - {link.rank for link in incoming})
                where = f"rank {self._rank}, meeting the senders {sorted(offers)}, missing {missing}"
                failure.append(type(error)(f"{where}: {error}"))
                return

    def _admit(self, channel: Channel, offers: Mapping[int, Offer], timeout_s: float) -> IncomingLink:
        hello, _ = channel.receive("hello", timeout_s=timeout_s)
        sender, digest = hello.get("rank"), hello.get("digest")
        if digest != self._digest:
            message = f"rank {sender} has Plan {str(digest)[:12]}, rank {self._rank} has {self._digest[:12]}"
            channel.send_error(message, timeout_s=timeout_s)
            raise PlanError(f"{message}: make the Plan from the same merged Layouts on every rank")
        if not isinstance(sender, int) or sender not in offers:
            message = f"rank {self._rank} expects nothing from rank {sender}"
            channel.send_error(message, timeout_s=timeout_s)
            raise TransportError(f"{message}; the senders are {sorted(offers)}")
        offer = offers[sender]
        link = IncomingLink(sender, channel, [])
        link.shares.append(send_region(channel, self._control, arena=self._control_arena, timeout_s=timeout_s))
        places: list[list[object]] = [[name, list(place)] for name, place in offer.places.items()]
        places += [[name, [o.arena, o.region, offset]] for name, (o, offset) in offer.imported.items()]
        are_memory = [isinstance(region, DeviceMemory) for region in offer.regions]
        channel.send("regions", {"are_memory": are_memory, "num_storages": len(places)}, timeout_s=timeout_s)
        for region in offer.regions:
            if isinstance(region, DeviceMemory):
                link.shares.append(send_memory(channel, region, owner=offer.owner, timeout_s=timeout_s))
            else:
                link.shares.append(send_region(channel, region, arena=self._arena, timeout_s=timeout_s))
        for start in range(0, len(places), STORAGES_A_PACKET):
            channel.send("places", {"places": places[start : start + STORAGES_A_PACKET]}, timeout_s=timeout_s)
        return link

    def _join(self, receiver: int, timeout_s: float) -> OutgoingLink:
        path = str(self._folder / f"{receiver}.sock")
        try:
            channel = Channel.connect(path, timeout_s=timeout_s)
            channel.send("hello", {"rank": self._rank, "digest": self._digest}, timeout_s=timeout_s)
            control = receive_region(channel, arena=self._control_arena, timeout_s=timeout_s)
            head, _ = channel.receive("regions", timeout_s=timeout_s)
            are_memory, num_storages = _read_head(head)
            regions = [self._receive(channel, is_memory, timeout_s) for is_memory in are_memory]
            places: list[Place] = []
            while len(places) < num_storages:
                body, _ = channel.receive("places", timeout_s=timeout_s)
                places += _read_places(body, regions)
        except TransportError as error:
            raise type(error)(f"rank {self._rank}, meeting its receiver rank {receiver}: {error}") from error
        link = OutgoingLink(receiver, channel, control, regions, {}, frozenset(p.storage for p in places if p.origin))
        try:
            link.addresses = {place.storage: self._address(place, regions, receiver) for place in places}
        except PlanError as error:
            channel.send_error(str(error), timeout_s=timeout_s)
            link.close()
            raise
        return link

    def _receive(self, channel: Channel, is_memory: bool, timeout_s: float) -> ImportedRegion | ImportedMemory:
        if is_memory:
            return receive_memory(channel, device=self._arena.device, timeout_s=timeout_s)
        return receive_region(channel, arena=self._arena, timeout_s=timeout_s)

    def _address(self, place: Place, regions: Sequence[ImportedRegion | ImportedMemory], receiver: int) -> int:
        if place.origin is None:
            return regions[place.index].address + place.offset
        base = self._resolve(place.origin)
        if base is None:
            raise PlanError(
                f"rank {receiver} keeps {place.storage!r} in memory that it imported from a third process, and the "
                f"Plan has rank {self._rank} write there: pass that region in imports= of this rank's PeerTransport "
                "too, or give the Plan a topology that makes the memory's owner the nearest source"
            )
        return base + place.offset


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[Listener]:
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = Listener(str(path))
    try:
        yield listener
    finally:
        listener.close()


def _read_head(head: Mapping[str, object]) -> tuple[list[bool], int]:
    match head:
        case {"are_memory": list(are_memory), "num_storages": int(num_storages)}:
            return [bool(is_memory) for is_memory in are_memory], num_storages
    raise TransportError(f"the peer announced its regions in a way that can't be read: {dict(head)}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a receiver's storage begins: in a region that it sent (`index`), or in one that has another `origin`."""

    storage: str
    index: int
    offset: int
    origin: RegionOrigin | None


def _read_places(body: Mapping[str, object], regions: Sequence[ImportedRegion | ImportedMemory]) -> list[Place]:
    found: list[Place] = []
    entries = body.get("places")
    for entry in entries if isinstance(entries, list) else [None]:
        match entry:
            case [str(storage), [int(index), int(offset)]] if (
                0 <= index < len(regions) and 0 <= offset < regions[index].num_bytes
            ):
                found.append(Place(storage, index, offset, None))
            case [str(storage), [str(arena), int(region), int(offset)]] if offset >= 0:
                found.append(Place(storage, -1, offset, RegionOrigin(arena, region)))
            case _:
                raise TransportError(f"the peer described a storage in a way that can't be read: {entry!r}")
    return found


def send_numbers(channel: Channel, numbers: Sequence[int], *, timeout_s: float) -> None:
    """Send a rising sequence of numbers; cheap where they are mostly consecutive."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] = number + 1
        else:
            ranges.append([number, number + 1])
    for start in range(0, len(ranges), RANGES_A_PACKET):
        channel.send("ranges", {"ranges": ranges[start : start + RANGES_A_PACKET]}, timeout_s=timeout_s)
    channel.send("ranges", {"ranges": []}, timeout_s=timeout_s)


def receive_numbers(channel: Channel, *, timeout_s: float) -> list[int]:
    """Receive what `send_numbers` sent."""
    found: list[int] = []
    while True:
        body, _ = channel.receive("ranges", timeout_s=timeout_s)
        ranges = body.get("ranges")
        if not isinstance(ranges, list):
            raise TransportError(f"{channel.peer} sent ranges that can't be read: {body}")
        if not ranges:
            return found
        for entry in ranges:
            match entry:
                case [int(first), int(end)] if 0 <= first < end:
                    found += range(first, end)
                case _:
                    raise TransportError(f"{channel.peer} sent ranges that can't be read: {entry!r}")
