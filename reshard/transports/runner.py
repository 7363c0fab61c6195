"""Running copy tables on the device where the tensors are: at once on the host, queued on a stream on a GPU."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.errors import DeviceError, PeerTimeout, PlanError, StateError
from reshard.transports.base import Endpoint
from reshard.transports.kernels import BoundTable, Kernels, bind_table, choose_kernels

if TYPE_CHECKING:
    import numpy as np
    import torch

SPIN_S = 0.0002
"""How long a wait for the device polls without a pause."""
PAUSE_OF_WAITED = 0.01
"""After that each pause is this part of what has been waited so far: the end is noticed that much late, at most."""
MAX_PAUSE_S = 0.001


class Launches:
    """Copy tables that run one after the other, bound to a device once and launched many times.

    Args:
        tables: records of `reshard.table.COPY_RECORD`; the addresses in them must stay valid. None may be left.
        device: where both ends live; None and a CPU device run on host threads.
        num_threads: host threads; all cores of this process where left out.
        graph: True: capture the launches into a CUDA graph and replay it; None: where there are several; False: never.

    Raises:
        PlanError: a graph is asked for on the host.
        DeviceError: the device refused a table or the capture, or nothing here runs copies there.
    """

    kernels: Kernels
    """What runs the tables (see `reshard.transports.kernels`)."""

    def __init__(
        self,
        tables: Sequence[np.ndarray],
        device: torch.device | None,
        *,
        num_threads: int | None = None,
        graph: bool | None = False,
    ) -> None:
        num_threads = num_threads if num_threads is not None else len(os.sched_getaffinity(0))
        self._on_host = device is None or device.type == "cpu"
        self.kernels = choose_kernels(device)
        self._bound: list[BoundTable] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._closed = False
        tables = [table for table in tables if len(table)]
        if self._on_host and graph:
            raise PlanError("graph=True needs tensors on a GPU: on the host a transition has no launches to save")
        if device is None or self._on_host:
            self._bind(tables, device, num_threads)
            return
        import torch

        self._torch, self._device = torch, device
        with torch.cuda.device(device):
            self._done = torch.cuda.Event()
            try:
                self._bind(tables, device, num_threads)
                if self.num_launches and (graph or (graph is None and self.num_launches > 1)):
                    self._capture()
            except RuntimeError as error:
                raise DeviceError(f"binding copies to {device} failed: {error}") from error

    def _bind(self, tables: Sequence[np.ndarray], device: torch.device | None, num_threads: int) -> None:
        self._bound = [bind_table(table, device, num_threads=num_threads) for table in tables]
        self.num_launches = sum(table.num_launches for table in self._bound)
        self.device_bytes = sum(table.device_bytes for table in self._bound)

    def _capture(self) -> None:
        torch = self._torch
        captured, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            captured.capture_begin(capture_error_mode="thread_local")
            for table in self._bound:
                table.launch(side.cuda_stream)
            captured.capture_end()
        self._graph, self.num_launches = captured, 1

    def launch(self, stream: int | None = None) -> None:
        """Run the tables: done on return on the host, queued on `stream` (the current one where None) on a device."""
        self._check_open()
        if self._on_host:
            for table in self._bound:
                table.launch(0)
            return
        torch = self._torch
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(queue_of(self._device, stream)):
                if self._graph is not None:
                    self._graph.replay()
                else:
                    self._queue_tables()
                self._done.record()
        except RuntimeError as error:
            raise DeviceError(f"launching copies on {self._device} failed: {error}") from error

    def queue(self, stream: int | None = None) -> None:
        """Queue the launches themselves on a stream that is being captured; there is nothing to wait for then."""
        self._check_open()
        if self._on_host:
            raise StateError("copies on the host happen at once and can't be captured")
        with self._torch.cuda.device(self._device), self._torch.cuda.stream(queue_of(self._device, stream)):
            self._queue_tables()

    def _queue_tables(self) -> None:
        handle = self._torch.cuda.current_stream().cuda_stream
        for table in self._bound:
            table.launch(handle)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the last `launch`; return whether it is done."""
        return self._on_host or poll(self._done, seconds)

    def synchronize(self, deadline_s: float, *, what: str) -> None:
        """Block until the last `launch` is done; PeerTimeout naming `what` after `deadline_s` seconds."""
        if not self.wait(deadline_s):
            raise PeerTimeout(f"{what} on {self._device} did not finish within {deadline_s} s")

    def close(self) -> None:
        """Release the device's copy of the tables, once nothing runs on the device that may still read it."""
        if self._bound and self.kernels == "triton" and not self._on_host:
            with contextlib.suppress(RuntimeError):  # a device that failed runs nothing any more
                self._torch.cuda.synchronize(self._device)
        self._closed, self._graph, self._bound = True, None, []

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this transfer is closed")


class TableRunner(Launches):
    """One copy table; see `Launches`."""

    def __init__(self, table: np.ndarray, device: torch.device | None, *, num_threads: int | None = None) -> None:
        super().__init__([table], device, num_threads=num_threads)


def poll(event: torch.cuda.Event, seconds: float) -> bool:
    """Wait up to `seconds` for a recorded event, without a call that could outlast them; return whether it came.

    Raises:
        DeviceError: the device reports an error.
    """
    begin = time.perf_counter()
    try:
        while not event.query():
            waited = time.perf_counter() - begin
            if waited >= seconds:
                return False
            if waited > SPIN_S:
                time.sleep(min(waited * PAUSE_OF_WAITED, MAX_PAUSE_S))
    except RuntimeError as error:
        raise DeviceError(f"the device failed while copies were awaited: {error}") from error
    return True


def is_capturing(device: torch.device | None, stream: int | None) -> bool:
    """Whether `stream` (the current one where None) of a GPU is being captured into a CUDA graph."""
    if device is None or device.type == "cpu":
        return False
    import torch

    with torch.cuda.device(device), torch.cuda.stream(queue_of(device, stream)):
        return torch.cuda.is_current_stream_capturing()


def drain_stream(device: torch.device | None, stream: int | None) -> None:
    """Block until what was queued on `stream` (the current one where None) of a GPU is done; nothing on the host."""
    if device is not None and device.type != "cpu":
        queue_of(device, stream).synchronize()


def common_device(source: Endpoint, destination: Endpoint) -> torch.device | None:
    """The one device of all tensors of both sides, None without tensors; PlanError if there are several."""
    devices = {t.device for side in (source, destination) for t in side.tensors.values()}
    if len(devices) > 1:
        raise PlanError(f"a transition runs on one device a rank, its tensors are on {sorted(map(str, devices))}")
    return devices.pop() if devices else None


def queue_of(device: torch.device, stream: int | None) -> torch.cuda.Stream:
    """The stream of a raw handle; the current one of the device where None."""
    import torch

    if stream is None:
        return torch.cuda.current_stream(device)
    # torch makes a new stream of the handle 0, which is the default one's.
    return torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device)
