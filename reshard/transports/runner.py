"""Running a copy table on the device where the tensors are: at once on the host, queued on a stream on a GPU."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from reshard import _C
from reshard.errors import PeerTimeout, PlanError, StateError
from reshard.transports.base import Endpoint

if TYPE_CHECKING:
    import numpy as np
    import torch

POLL_S = 0.0002


class TableRunner:
    """A copy table, bound to a device once and run many times.

    Args:
        table: records of `reshard.table.COPY_RECORD`; the addresses in it must stay valid.
        device: where both ends live; None and a CPU device run on host threads.
        num_threads: host threads; all cores of this process where left out.
    """

    def __init__(self, table: np.ndarray, device: torch.device | None, *, num_threads: int | None = None) -> None:
        self._num_threads = num_threads if num_threads is not None else len(os.sched_getaffinity(0))
        self._host_table: np.ndarray | None = None
        self._device_table: _C.DeviceTable | None = None
        self.num_launches, self.device_bytes = (1 if len(table) else 0), 0
        self._closed = False
        if not len(table):
            return
        if device is None or device.type == "cpu":
            self._host_table = table
            return
        import torch

        self._torch, self._device = torch, device
        with torch.cuda.device(device):
            self._device_table = _C.DeviceTable(table)
            self._done = torch.cuda.Event()
        self.num_launches, self.device_bytes = self._device_table.num_launches, self._device_table.device_bytes

    def launch(self, stream: int | None = None) -> None:
        """Run the table: done on return on the host, queued on `stream` (the current one where None) on a device."""
        if self._closed:
            raise StateError("this transfer is closed")
        if self._host_table is not None:
            _C.copy_host(self._host_table, self._num_threads)
        elif self._device_table is not None:
            torch = self._torch
            with torch.cuda.device(self._device):
                queue = torch.cuda.ExternalStream(stream) if stream is not None else torch.cuda.current_stream()
                self._device_table.launch(queue.cuda_stream)
                self._done.record(queue)

    def synchronize(self, deadline_s: float, *, what: str) -> None:
        """Block until the last `launch` is done; PeerTimeout naming `what` after `deadline_s` seconds."""
        if self._device_table is None:
            return
        deadline = time.monotonic() + deadline_s
        while not self._done.query():
            if time.monotonic() > deadline:
                raise PeerTimeout(f"{what} on {self._device} did not finish within {deadline_s} s")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Release the device's copy of the table."""
        self._closed, self._host_table, self._device_table = True, None, None


def drain_stream(device: torch.device | None, stream: int | None) -> None:
    """Block until what was queued on `stream` (the current one where None) of a GPU is done; nothing on the host."""
    if device is None or device.type == "cpu":
        return
    import torch

    queue = torch.cuda.ExternalStream(stream, device) if stream is not None else torch.cuda.current_stream(device)
    queue.synchronize()


def common_device(source: Endpoint, destination: Endpoint) -> torch.device | None:
    """The one device of all tensors of both sides, None without tensors; PlanError if there are several."""
    devices = {t.device for side in (source, destination) for t in side.tensors.values()}
    if len(devices) > 1:
        raise PlanError(f"a transition runs on one device a rank, its tensors are on {sorted(map(str, devices))}")
    return devices.pop() if devices else None
