"""One region, two processes: the owner sends a region's chunks, the other maps the same physical pages.

Note "who may do what with a shared region". The owner keeps the region BACKED while a share is out: releasing or
freeing it is refused, because the other process would go on writing into memory that is someone else's by then. The
other process closes its ImportedRegion, says so by whatever protocol the two have, and the owner ends the share. A
process that dies gives its mapping up by dying; an owner that dies leaves the importer's mapping valid until it is
closed. Neither side synchronises the other's work.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from reshard import _C
from reshard.arena.arena import Arena, ArenaRegion
from reshard.arena.channel import MAX_DESCRIPTORS, Channel, Credentials, Deadline
from reshard.arena.mapped import MappedMemory
from reshard.errors import DeviceError, StateError, TransportError

_MAX_CHUNKS: Final = 1 << 20
_KINDS: Final = ("host", "cuda")


@dataclass(frozen=True, slots=True)
class RegionOrigin:
    """Which region of which arena, in whatever process: equal origins are the same physical memory."""

    arena: str
    region: int


class RegionShare:
    """A region that another process has mapped; it pins the region until ``end``."""

    def __init__(self, region: ArenaRegion, core: _C.ArenaCore, peer: Credentials) -> None:
        """Made by ``send_region``."""
        self.region = region
        self.peer = peer
        self._core: _C.ArenaCore | None = core

    def end(self) -> None:
        """Let the region go again, once the peer has closed its mapping or is dead. StateError the second time."""
        if self._core is None:
            raise StateError(f"the share of {self.region.name!r} with {self.peer} has ended already")
        self._core.unpin(self.region.id)
        self._core = None


class ImportedRegion(MappedMemory):
    """Another process's region, mapped at an address of this one: the same pages, for as long as it is open."""

    def __init__(
        self, core: _C.ImportedCore, *, name: str, device: int, peer: Credentials, origin: RegionOrigin
    ) -> None:
        """Made by ``receive_region``."""
        super().__init__(core, device=device, peer=peer)
        self.name = name
        self.origin = origin


def send_region(channel: Channel, region: ArenaRegion, *, arena: Arena, timeout_s: float) -> RegionShare:
    """Send a BACKED region to the peer and wait until it has mapped it.

    Raises:
        StateError: the region is not BACKED.
        DeviceError: a chunk can't be exported, for example at the limit of open files.
        PeerTimeout, TransportError: the peer did not map it; the region is not shared then.

    """
    deadline = Deadline(timeout_s)
    core = arena.core
    chunks = core.export_region(region.id)
    try:
        header: dict[str, object] = {
            "name": region.name,
            "arena": arena.id,
            "region": region.id,
            "memory": _KINDS[region.device >= 0],
            "num_chunks": len(chunks),
            "num_bytes": region.num_bytes,
        }
        what = f"{channel.peer} to map region {region.name!r}"
        channel.send("region", header, timeout_s=deadline.remaining_s(what))
        for start in range(0, len(chunks), MAX_DESCRIPTORS):
            part = chunks[start : start + MAX_DESCRIPTORS]
            body: dict[str, object] = {"chunk_bytes": [num_bytes for _, num_bytes in part]}
            descriptors = [descriptor for descriptor, _ in part]
            channel.send("chunks", body, descriptors=descriptors, timeout_s=deadline.remaining_s(what))
        channel.receive("mapped", timeout_s=deadline.remaining_s(what))
    except BaseException:
        core.unpin(region.id)
        raise
    finally:
        for descriptor, _ in chunks:
            os.close(descriptor)
    return RegionShare(region, core, channel.peer)


def receive_region(channel: Channel, *, arena: Arena, timeout_s: float) -> ImportedRegion:
    """Receive a region that the peer sends and map it; ``arena`` says on which device, its budget is not charged.

    Raises:
        PeerTimeout: the peer sent nothing, or not all, in time.
        TransportError: the peer is gone, sent something else, or its memory is of another kind than ``arena``'s.
        DeviceError, OutOfMemory: it can't be mapped here; the peer is told and raises TransportError.

    """
    deadline = Deadline(timeout_s)
    what = f"a region from {channel.peer}"
    descriptors: list[int] = []
    try:
        header, unexpected = channel.receive("region", timeout_s=deadline.remaining_s(what))
        descriptors += unexpected
        name, num_chunks, origin = _check_header(header, arena, channel.peer)
        chunk_bytes: list[int] = []
        while len(chunk_bytes) < num_chunks:
            body, received = channel.receive("chunks", timeout_s=deadline.remaining_s(what))
            descriptors += received
            chunk_bytes += _check_chunks(body, len(received), channel.peer)
        core = _C.ImportedCore(arena.driver, descriptors, chunk_bytes)
    except (TransportError, DeviceError, MemoryError, ValueError) as error:
        channel.send_error(f"{type(error).__name__}: {error}", timeout_s=1.0)
        if isinstance(error, ValueError):
            raise TransportError(f"{channel.peer} sent chunks that can't be mapped: {error}") from error
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    channel.send("mapped", {}, timeout_s=deadline.remaining_s(what))
    return ImportedRegion(core, name=name, device=arena.device, peer=channel.peer, origin=origin)


def _check_header(header: dict[str, object], arena: Arena, peer: Credentials) -> tuple[str, int, RegionOrigin]:
    match header:
        case {
            "name": str(name),
            "arena": str(owner),
            "region": int(region),
            "memory": str(memory),
            "num_chunks": int(num_chunks),
        } if 0 < num_chunks <= _MAX_CHUNKS:
            pass
        case _:
            raise TransportError(f"{peer} announced a region in a way that can't be read: {header}")
    if memory != _KINDS[arena.device >= 0]:
        raise TransportError(
            f"region {name!r} of {peer} is {memory} memory, the arena to receive it is {_KINDS[arena.device >= 0]}"
        )
    return name, num_chunks, RegionOrigin(owner, region)


def _check_chunks(body: dict[str, object], num_descriptors: int, peer: Credentials) -> list[int]:
    sizes = body.get("chunk_bytes")
    if not isinstance(sizes, list) or len(sizes) != num_descriptors or num_descriptors == 0:
        raise TransportError(f"{peer} sent {num_descriptors} descriptors for the chunks {sizes}")
    return [int(size) for size in sizes]
