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

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from reshard import _C
from reshard.arena import view
from reshard.arena.channel import Channel, Credentials, Deadline
from reshard.errors import DeviceError, StateError, TransportError

if TYPE_CHECKING:
    import torch


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


class ImportedMemory:
    """Another process's allocation, mapped at an address of this one, for as long as it is open."""

    def __init__(self, mapping: _C.IpcMapping, *, device: int, peer: Credentials) -> None:
        """Made by ``receive_memory``."""
        self._mapping = mapping
        self.device = device
        """CUDA ordinal, in this process, of the device that it is mapped for."""
        self.peer = peer
        self.address = mapping.address
        self.num_bytes = mapping.num_bytes

    @property
    def is_open(self) -> bool:
        """Whether the memory is mapped."""
        return self._mapping.is_open

    def tensor(
        self, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None, *, offset_bytes: int = 0
    ) -> torch.Tensor:
        """View it as a contiguous tensor; see ``ArenaRegion.tensor``."""
        return view.as_tensor(self, dtype=dtype, shape=shape, offset_bytes=offset_bytes)

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Export it as a one-dimensional uint8 tensor. No stream is waited for."""
        del stream
        view.check_dlpack_request(self.device, dl_device=dl_device, copy=copy)
        return self._mapping.dlpack(max_version is not None and max_version[0] >= 1)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and id."""
        return view.dlpack_device(self.device)

    def close(self) -> None:
        """Unmap it, if it is this process's last import of the allocation. StateError where views are alive."""
        self._mapping.close()

    def __enter__(self) -> Self:
        """Return the memory."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it; after an error it is left to the garbage collector, so that the error is not hidden."""
        if error is None:
            self.close()


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
