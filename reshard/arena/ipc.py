"""Device memory that is not an arena's, opened to another process of this host by CUDA IPC handles.

Plain tensors (``torch.empty(device="cuda")``, an engine's parameters) lie in allocations of PyTorch's caching
allocator. A handle names such an allocation as a whole, with everything else that the allocator keeps in it; so it goes
only to processes of the same user, over the same channels as an arena's regions. Memory from
``expandable_segments:True`` or ``backend:cudaMallocAsync`` has no such handles.

Note "who keeps what alive". The owner keeps its tensors until the share ends: the allocator may give the pages to
someone else otherwise. The importer closes before that, and both say so by whatever protocol they have. A process opens
an allocation once, however many imports of it there are, and unmaps it with the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard import _C
from reshard.arena.channel import Channel, Credentials, Deadline
from reshard.arena.mapped import MappedMemory
from reshard.errors import DeviceError, StateError, TransportError


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """An allocation of this process on a GPU that other processes may open.

    Attributes:
        handle: CUDA's 64-byte handle of it.
        address: its first byte, in this process.
        num_bytes: its size.
    """

    handle: bytes
    address: int
    num_bytes: int

    @classmethod
    def at(cls, address: int) -> DeviceMemory:
        """Return the allocation that ``address`` lies in.

        Raises:
            StateError: it is host memory, or device memory without such handles; the message says what to do.
            DeviceError: the driver refused, or there is none.
        """
        return cls(*_C.ipc_export(address))


class MemoryShare:
    """An allocation that another process has mapped; it keeps ``owner`` alive until ``end``."""

    def __init__(self, memory: DeviceMemory, owner: object, peer: Credentials) -> None:
        """Made by ``send_memory``."""
        self.memory = memory
        self.peer = peer
        self._owner: object | None = owner
        self._is_out = True

    def end(self) -> None:
        """Let the owner go, once the peer has closed its mapping or is dead. StateError the second time."""
        if not self._is_out:
            raise StateError(f"the share of memory at {self.memory.address} with {self.peer} has ended already")
        self._is_out, self._owner = False, None


class ImportedMemory(MappedMemory):
    """Another process's allocation; made by ``receive_memory``."""


def send_memory(channel: Channel, memory: DeviceMemory, *, owner: object, timeout_s: float) -> MemoryShare:
    """Send an allocation's handle to the peer and wait until it has mapped it.

    Args:
        channel: to the peer.
        memory: what to open.
        owner: whatever keeps the memory allocated, for example the tensors in it; held until the share ends.
        timeout_s: for all of it.

    Raises:
        PeerTimeout, TransportError: the peer did not map it; the memory is not shared then.
    """
    deadline = Deadline(timeout_s)
    what = f"{channel.peer} to map {memory.num_bytes} bytes of device memory"
    body: dict[str, object] = {"handle": memory.handle.hex(), "num_bytes": memory.num_bytes}
    channel.send("memory", body, timeout_s=deadline.remaining_s(what))
    channel.receive("mapped", timeout_s=deadline.remaining_s(what))
    return MemoryShare(memory, owner, channel.peer)


def receive_memory(channel: Channel, *, device: int, timeout_s: float) -> ImportedMemory:
    """Receive an allocation that the peer sends and map it for CUDA device ``device``.

    Raises:
        PeerTimeout: the peer sent nothing in time.
        TransportError: the peer is gone or sent something else.
        DeviceError, OutOfMemory: it can't be mapped here; the peer is told and raises TransportError.
    """
    deadline = Deadline(timeout_s)
    what = f"device memory from {channel.peer}"
    body, _ = channel.receive("memory", timeout_s=deadline.remaining_s(what))
    try:
        handle, num_bytes = _read_memory(body, channel.peer)
        mapping = _C.IpcMapping(handle, num_bytes=num_bytes, device=device)
    except (TransportError, DeviceError, MemoryError, ValueError) as error:
        channel.send_error(f"{type(error).__name__}: {error}", timeout_s=1.0)
        if isinstance(error, ValueError):
            raise TransportError(f"{channel.peer} sent memory that can't be mapped: {error}") from error
        raise
    channel.send("mapped", {}, timeout_s=deadline.remaining_s(what))
    return ImportedMemory(mapping, device=device, peer=channel.peer)


def _read_memory(body: dict[str, object], peer: Credentials) -> tuple[bytes, int]:
    match body:
        case {"handle": str(handle), "num_bytes": int(num_bytes)}:
            return bytes.fromhex(handle), num_bytes
    raise TransportError(f"{peer} announced device memory in a way that can't be read: {body}")
