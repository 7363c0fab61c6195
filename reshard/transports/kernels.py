"""Which code runs copy tables where the tensors are: host threads, the CUDA kernels of ``reshard._C``, or Triton.

On a GPU the CUDA kernels are taken where the extension was built with them (``_C.CUDA_KERNELS``), else Triton. All give
the same bits. The environment variable ``RESHARD_KERNELS``, read whenever something is bound, decides otherwise:

``auto``    what is said above; the default.
``cuda``    the CUDA kernels or a DeviceError.
``triton``  Triton, also beside CUDA kernels; under TRITON_INTERPRET=1 also on the host, by Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from reshard import _C
from reshard.errors import DeviceError
from reshard.transports.base import Words

if TYPE_CHECKING:
    import torch

    from reshard.table import CopyTable

logger = logging.getLogger(__name__)

Kernels = Literal["host", "cuda", "triton"]
KERNELS_VARIABLE = "RESHARD_KERNELS"
_CHOICES = ("auto", "cuda", "triton")


class BoundTable(Protocol):
    """A copy table that can be run any number of times where its memory is."""

    @property
    def num_launches(self) -> int:
        """Kernel launches of one run; on the host one call."""

    @property
    def device_bytes(self) -> int:
        """Device memory that the table holds."""

    def launch(self, stream: int) -> None:
        """Queue one run on a raw stream; on the host it happens at once and there is no stream."""


@dataclass(frozen=True, slots=True, eq=False)
class HostTable:
    """A copy table on host threads."""

    table: CopyTable
    num_threads: int
    num_launches: int = 1
    device_bytes: int = 0

    def launch(self, stream: int) -> None:
        """Run it; done on return."""
        _C.copy_host(self.table, self.num_threads)


def choose_kernels(device: torch.device | None) -> Kernels:
    """What runs copies of memory on `device` (None: the host) in this process.

    Raises:
        ValueError: RESHARD_KERNELS has another value than those above.
        DeviceError: nothing here can run them; the message says what to install or build.
    """
    wanted = os.environ.get(KERNELS_VARIABLE, "auto")
    if wanted not in _CHOICES:
        raise ValueError(f"{KERNELS_VARIABLE} must be one of {', '.join(_CHOICES)}, but is {wanted!r}")
    if device is None or device.type == "cpu":
        interpreted = wanted == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        return "triton" if interpreted else "host"
    has_triton = importlib.util.find_spec("triton") is not None
    if _C.CUDA_KERNELS and wanted != "triton":
        chosen: Kernels = "cuda"
    elif has_triton and wanted != "cuda":
        chosen = "triton"
    else:
        raise DeviceError(_nothing_runs(device, wanted))
    _announce(chosen, device.type)
    return chosen


def bind_table(table: CopyTable, device: torch.device | None, *, num_threads: int) -> BoundTable:
    """Plan and upload a table for what `choose_kernels` says; on a GPU that is the current device.

    Raises:
        DeviceError: there is nothing to run it, or Triton could not compile its kernels.
        RuntimeError: a CUDA call failed.
    """
    chosen = choose_kernels(device)
    if chosen == "host" or device is None:
        return HostTable(table, num_threads)
    if chosen == "cuda":
        return _C.DeviceTable(table)
    from triton import TritonError

    from reshard.triton_copy import TritonTable

    try:
        return TritonTable(table, device=device)
    except (TritonError, subprocess.CalledProcessError) as error:
        raise DeviceError(_triton_failed(device, error)) from error


def checksums(table: CopyTable, device: torch.device | None, *, of_destination: bool) -> Words:
    """The 64-bit checksum of each record (see ``_C.checksum_host``), computed where the memory is. Blocks.

    Raises:
        DeviceError: as `bind_table`.
        RuntimeError: a CUDA call failed.
    """
    chosen = choose_kernels(device)
    if not len(table):
        return np.zeros(0, dtype=np.uint64)
    if chosen == "host" or device is None:
        return np.array(_C.checksum_host(table, of_destination=of_destination), dtype=np.uint64)
    if chosen == "cuda":
        return _checksums_by_cuda(table, device, of_destination=of_destination)
    from triton import TritonError

    from reshard.triton_checksum import checksum_records

    try:
        found: Words = checksum_records(table, device, of_destination=of_destination).cpu().numpy().view(np.uint64)
    except (TritonError, subprocess.CalledProcessError) as error:
        raise DeviceError(_triton_failed(device, error)) from error
    return found


def _checksums_by_cuda(table: CopyTable, device: torch.device, *, of_destination: bool) -> Words:
    import torch

    with torch.cuda.device(device):
        sums = torch.empty(len(table), dtype=torch.int64, device=device)
        bound = _C.DeviceTable(table)
        bound.launch_checksum(torch.cuda.current_stream().cuda_stream, sums.data_ptr(), of_destination=of_destination)
        found: Words = sums.cpu().numpy().view(np.uint64)
    return found


def _nothing_runs(device: torch.device, wanted: str) -> str:
    reasons = []
    if wanted != "triton":
        reasons.append("reshard._C was built without CUDA kernels")
    if wanted != "cuda":
        reasons.append("Triton is not installed")
    asked = "" if wanted == "auto" else f" ({KERNELS_VARIABLE}={wanted})"
    return (
        f"nothing here runs copies on {device}{asked}: {' and '.join(reasons)}; install Triton (pip install triton), "
        "or build reshard where nvcc is found (RESHARD_CUDA=on pip install --force-reinstall --no-deps .)"
    )


def _triton_failed(device: torch.device, error: Exception) -> str:
    return (
        f"Triton could not compile its copy kernels for {device}: {error}; it needs a C compiler and Python's headers "
        "(apt-get install gcc python3-dev), or build reshard where nvcc is found (RESHARD_CUDA=on)"
    )


@functools.cache
def _announce(chosen: Kernels, where: str) -> None:
    """One line a process and choice."""
    why = "" if chosen == "cuda" else f" (reshard._C {'has' if _C.CUDA_KERNELS else 'was built without'} CUDA kernels)"
    logger.info("copies on %s run by %s%s", where, {"cuda": "CUDA kernels", "triton": "Triton"}[chosen], why)
