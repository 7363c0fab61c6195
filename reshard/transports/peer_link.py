"""How ranks of one host meet before a transition: each opens its destination memory to the ranks that will write there.

Every rank listens on a socket file of its own, ``<folder>/<rank>.sock``. A rank that sends connects to each of its
receivers and says its number and its Plan's digest; the receiver answers with its control page and the regions that
this sender's copies touch, and says where each storage lies in them. The connections stay open: a rank that dies closes
them, and its peers see it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.arena import (
    Arena,
    ArenaRegion,
    Channel,
    ImportedRegion,
    Listener,
    RegionShare,
    receive_region,
    send_region,
)
from reshard.errors import PlanError, TransportError

STORAGES_A_PACKET = 500


@dataclass(frozen=True, slots=True)
class Offer:
    """What a receiver opens to one sender: regions, and for each storage (index of its region, byte offset in it)."""

    regions: tuple[ArenaRegion, ...]
    places: Mapping[str, tuple[int, int]]


@dataclass(slots=True)
class IncomingLink:
    """One sender, as its receiver sees it."""

    rank: int
    channel: Channel
    shares: list[RegionShare]


@dataclass(slots=True)
class OutgoingLink:
    """One receiver, as its sender sees it: its control page and destination memory, mapped here."""

    rank: int
    channel: Channel
    control: ImportedRegion
    regions: list[ImportedRegion]
    places: dict[str, tuple[int, int]]

    def storage_address(self, storage: str) -> int:
        """Address in this process of the first byte of the peer's `storage`."""
        index, offset = self.places[storage]
        return self.regions[index].address + offset

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
        digest: the Plan's digest; a peer with another one is refused on both sides.
        arena: where this rank's destination memory is.
        control: the page of counters that is opened to every sender.
        control_arena: the arena that `control` belongs to.
    """

    def __init__(
        self, folder: Path, *, rank: int, digest: str, arena: Arena, control: ArenaRegion, control_arena: Arena
    ) -> None:
        self._folder, self._rank, self._digest = folder, rank, digest
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
        head: dict[str, object] = {"num_regions": len(offer.regions), "num_storages": len(offer.places)}
        channel.send("regions", head, timeout_s=timeout_s)
        for region in offer.regions:
            link.shares.append(send_region(channel, region, arena=self._arena, timeout_s=timeout_s))
        places = list(offer.places.items())
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
            num_regions, num_storages = _counts(head)
            regions = [receive_region(channel, arena=self._arena, timeout_s=timeout_s) for _ in range(num_regions)]
            places: dict[str, tuple[int, int]] = {}
            while len(places) < num_storages:
                body, _ = channel.receive("places", timeout_s=timeout_s)
                places.update(_read_places(body, regions))
        except TransportError as error:
            raise type(error)(f"rank {self._rank}, meeting its receiver rank {receiver}: {error}") from error
        return OutgoingLink(receiver, channel, control, regions, places)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[Listener]:
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = Listener(str(path))
    try:
        yield listener
    finally:
        listener.close()


def _counts(head: Mapping[str, object]) -> tuple[int, int]:
    match head:
        case {"num_regions": int(num_regions), "num_storages": int(num_storages)} if num_regions >= 0:
            return num_regions, num_storages
    raise TransportError(f"the peer announced its regions in a way that can't be read: {dict(head)}")


def _read_places(body: Mapping[str, object], regions: Sequence[ImportedRegion]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    entries = body.get("places")
    for entry in entries if isinstance(entries, list) else [None]:
        match entry:
            case [str(storage), [int(index), int(offset)]] if (
                0 <= index < len(regions) and 0 <= offset < regions[index].num_bytes
            ):
                found[storage] = (index, offset)
            case _:
                raise TransportError(f"the peer described a storage in a way that can't be read: {entry!r}")
    return found
