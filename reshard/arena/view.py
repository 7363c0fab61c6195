"""Views of a range of memory as tensors, by DLPack: no copy, no dependence on one torch version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

DLPACK_CPU = 1
DLPACK_CUDA = 2


class DLPackRange(Protocol):
    """A range of bytes that exports itself by DLPack."""

    @property
    def num_bytes(self) -> int: ...  # noqa: D102

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


def dlpack_device(device: int) -> tuple[int, int]:
    """Return DLPack's (device type, device id) for a CUDA ordinal, or for the host where ``device`` is -1."""
    return (DLPACK_CPU, 0) if device < 0 else (DLPACK_CUDA, device)


def check_dlpack_request(device: int, *, dl_device: tuple[int, int] | None, copy: bool | None) -> None:
    """Raise BufferError for what an arena never does: a copy, or another device than its own."""
    if copy:
        raise BufferError("a region's view is never a copy; clone the tensor that you get without copy=True")
    if dl_device is not None and tuple(dl_device) != dlpack_device(device):
        raise BufferError(f"the region lives on DLPack device {dlpack_device(device)}, not on {tuple(dl_device)}")


def as_tensor(
    source: DLPackRange, *, dtype: torch.dtype | None, shape: Sequence[int] | None, offset_bytes: int
) -> torch.Tensor:
    """View ``source`` from ``offset_bytes`` on as a contiguous tensor; see ``ArenaRegion.tensor``."""
    import torch
    import torch.utils.dlpack

    whole = torch.utils.dlpack.from_dlpack(source)
    dtype = dtype or torch.uint8
    if not 0 <= offset_bytes <= source.num_bytes or offset_bytes % dtype.itemsize:
        raise ValueError(
            f"expected an offset from 0 to {source.num_bytes} bytes that is a multiple of {dtype.itemsize}, "
            f"got {offset_bytes}"
        )
    if shape is None:
        shape = ((source.num_bytes - offset_bytes) // dtype.itemsize,)
    wanted_bytes = math.prod(shape) * dtype.itemsize
    if offset_bytes + wanted_bytes > source.num_bytes:
        raise ValueError(
            f"a tensor of {wanted_bytes} bytes at offset {offset_bytes} does not fit into {source.num_bytes} bytes"
        )
    return whole[offset_bytes : offset_bytes + wanted_bytes].view(dtype).view(tuple(shape))
