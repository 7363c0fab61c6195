"""Chosen CUDA tensors, such as optimizer state, to host memory and back, beside other work of the device.

Copies run on a side stream, driven by a thread of their own. The host's copy is kept in buffers of equal size, either
pinned (the device copies straight into them, at the speed of the bus; all of it is locked memory) or pageable (through
two pinned staging buffers in turn: while the device fills one, the host empties the other).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

import torch

from reshard.errors import StateError

Store = Literal["pinned", "pageable"]
Place = Literal["device", "leaving", "host", "returning"]
_NUM_STAGING: Final = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one storage and its place in one host buffer, in bytes."""

    storage_idx: int
    storage_offset: int
    buffer_offset: int
    num_bytes: int


def cut(sizes: Sequence[int], buffer_bytes: int) -> list[list[Piece]]:
    """Lay storages of these sizes in bytes one after the other into buffers; return the pieces of each buffer."""
    buffers: list[list[Piece]] = []
    free_bytes = 0
    for storage_idx, size in enumerate(sizes):
        offset = 0
        while offset < size:
            if free_bytes == 0:
                buffers.append([])
                free_bytes = buffer_bytes
            num_bytes = min(size - offset, free_bytes)
            buffers[-1].append(Piece(storage_idx, offset, buffer_bytes - free_bytes, num_bytes))
            offset += num_bytes
            free_bytes -= num_bytes
    return buffers


class HostOffload:
    """Moves the storages of some CUDA tensors to the host and back; the tensor objects stay the same, their addresses
    may not.

    Order of life: ``start_offload``, ``finish_offload`` (then the device memory is PyTorch's again), ``start_restore``,
    ``finish_restore``. From each start to its finish the tensors may not be used; other tensors may. Calls that are out
    of order raise StateError. Methods are called from one thread, on the stream that uses the tensors.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], *, store: Store = "pinned", buffer_bytes: int = 64 << 20
    ) -> None:
        """Reserve the host's buffers.

        Args:
            tensors: on one CUDA device; tensors that share a storage move together, and so does every view of it.
            store: kind of host memory, see the module.
            buffer_bytes: size of one host buffer; a power of two wastes none of PyTorch's pinned memory.

        Raises:
            ValueError: no tensors, or not all on one CUDA device, or a buffer that is no multiple of 512 bytes.

        """
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._storages = [storage for storage in storages.values() if storage.nbytes() > 0]
        devices = {storage.device for storage in self._storages}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            raise ValueError(f"expected tensors of one CUDA device with bytes in them, got {sorted(map(str, devices))}")
        if buffer_bytes <= 0 or buffer_bytes % 512:
            raise ValueError(f"expected buffers of a multiple of 512 bytes, got {buffer_bytes}")
        self.device = next(iter(devices))
        self.place: Place = "device"
        self._sizes = [storage.nbytes() for storage in self._storages]
        self.num_bytes = sum(self._sizes)
        self._pieces = cut(self._sizes, buffer_bytes)
        pinned = store == "pinned"
        self._buffers = [_host_buffer(buffer_bytes, pinned) for _ in self._pieces]
        self._staging = [] if pinned else [_host_buffer(buffer_bytes, True) for _ in range(_NUM_STAGING)]
        self._stream = torch.cuda.Stream(self.device)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reshard-offload")
        self._job: Future[None] | None = None

    def start_offload(self) -> None:
        """Begin to copy to the host; the copies wait for work already on the current stream."""
        self._expect("device")
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._job = self._worker.submit(self._copy_out, self._device_bytes())
        self.place = "leaving"

    def finish_offload(self) -> None:
        """Wait until the host has all bytes, then give the device memory back to PyTorch's allocator."""
        self._expect("leaving")
        self._wait()
        self._resize([0] * len(self._sizes))
        self.place = "host"

    def start_restore(self) -> None:
        """Allocate the storages on the device, from the pool that is in use, and begin to copy back.

        Raises:
            torch.OutOfMemoryError: the device is full; the tensors stay on the host and the call can be repeated.

        """
        self._expect("host")
        try:
            self._resize(self._sizes)
        except torch.OutOfMemoryError:
            self._resize([0] * len(self._sizes))
            raise
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._job = self._worker.submit(self._copy_in, self._device_bytes())
        self.place = "returning"

    def finish_restore(self) -> None:
        """Let the current stream wait for the copies; the host waits only until they are all on their way."""
        self._expect("returning")
        self._wait()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        self.place = "device"

    def close(self) -> None:
        """End the worker thread, after what it is doing. The tensors stay where they are."""
        self._worker.shutdown()

    def _expect(self, place: Place) -> None:
        if self.place != place:
            raise StateError(
                f"the tensors are {self.place!r}, this call needs them {place!r}: call start_offload, finish_offload, "
                "start_restore and finish_restore in this order"
            )

    def _resize(self, sizes: Sequence[int]) -> None:
        for storage, size in zip(self._storages, sizes, strict=True):
            storage.resize_(size)

    def _wait(self) -> None:
        if self._job is not None:
            self._job.result()
            self._job = None

    def _device_bytes(self) -> list[torch.Tensor]:
        empty = [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in self._storages]
        return [bytes_.set_(storage) for bytes_, storage in zip(empty, self._storages, strict=True)]

    def _copy_out(self, sources: list[torch.Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            arrived: list[torch.cuda.Event] = []
            for idx, pieces in enumerate(self._pieces):
                if self._staging and idx >= _NUM_STAGING:
                    self._empty_staging(idx - _NUM_STAGING, arrived)
                target = self._staging[idx % _NUM_STAGING] if self._staging else self._buffers[idx]
                for piece in pieces:
                    _host_part(target, piece).copy_(_device_part(sources, piece), non_blocking=True)
                arrived.append(self._stream.record_event())
            for idx in range(max(0, len(self._pieces) - _NUM_STAGING), len(self._pieces)):
                if self._staging:
                    self._empty_staging(idx, arrived)
        self._stream.synchronize()

    def _empty_staging(self, idx: int, arrived: list[torch.cuda.Event]) -> None:
        arrived[idx].synchronize()
        self._buffers[idx].copy_(self._staging[idx % _NUM_STAGING])

    def _copy_in(self, targets: list[torch.Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            left: list[torch.cuda.Event] = []
            for idx, pieces in enumerate(self._pieces):
                source = self._buffers[idx]
                if self._staging:
                    if idx >= _NUM_STAGING:
                        left[idx - _NUM_STAGING].synchronize()
                    source = self._staging[idx % _NUM_STAGING]
                    source.copy_(self._buffers[idx])
                for piece in pieces:
                    _device_part(targets, piece).copy_(_host_part(source, piece), non_blocking=True)
                left.append(self._stream.record_event())


def _host_buffer(num_bytes: int, pinned: bool) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def _host_part(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    return buffer[piece.buffer_offset : piece.buffer_offset + piece.num_bytes]


def _device_part(storages: list[torch.Tensor], piece: Piece) -> torch.Tensor:
    return storages[piece.storage_idx][piece.storage_offset : piece.storage_offset + piece.num_bytes]
