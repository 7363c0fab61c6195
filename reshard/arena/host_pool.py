"""Host tensors from an arena: new ones as they are made, and those of a module that exist already.

PyTorch's allocator for the host can't be replaced, so there are two ways. ``use`` answers the factories that make large
buffers (``torch.empty``, ``torch.zeros``) from the arena; ``adopt`` moves the storages of given tensors there. Both
leave the arena's memory alive as long as a tensor uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from reshard.arena.arena import Arena, ArenaRegion
from reshard.arena.records import RegionState

_ALIGN_BYTES: Final = 64
_MIN_BYTES: Final = 64 << 10
"""Smaller tensors stay PyTorch's own: a region takes at least as much."""


class HostPool:
    """Host tensors of one arena and group."""

    def __init__(self, arena: Arena, *, group: str) -> None:
        """Take nothing yet. ValueError for an arena of a device."""
        if arena.device >= 0:
            raise ValueError(f"expected an arena of host memory, got one of CUDA device {arena.device}")
        self.arena = arena
        self.group = group
        self._blocks: dict[int, int] = {}
        self._num_made = 0

    @contextmanager
    def use(self) -> Iterator[None]:
        """Take what ``torch.empty`` and ``torch.zeros`` make on the host, from 64 KiB on, from the arena."""
        with _Factories(self):
            yield

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A region of its own as a uint8 tensor; contents undefined. Raises as ``Arena.allocate`` does."""
        region = self.arena.allocate(f"{self.group}.{self._num_made}", num_bytes, group=self.group)
        self._num_made += 1
        self._blocks[region.address] = num_bytes
        return region.tensor(shape=(num_bytes,))

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move the storages of ``tensors`` into one region; values, shapes, strides, offsets in storages and sharing
        stay, addresses do not.

        Raises as ``Arena.allocate`` does, and then nothing has moved.
        """
        tensors = [tensor for tensor in tensors if tensor.untyped_storage().nbytes() > 0]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        offsets: dict[int, int] = {}
        end = 0
        for pointer, storage in storages.items():
            offsets[pointer] = end
            end += math.ceil(storage.nbytes() / _ALIGN_BYTES) * _ALIGN_BYTES
        if end == 0:
            return
        whole = self.allocate(end)
        base = whole.data_ptr()
        del self._blocks[base]
        moved: dict[int, torch.UntypedStorage] = {}
        for pointer, storage in storages.items():
            begin, size = offsets[pointer], storage.nbytes()
            part = torch.from_numpy(whole.numpy()[begin : begin + size])  # a storage of its own, from its first byte on
            part.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            moved[pointer] = part.untyped_storage()
            self._blocks[base + begin] = size
        for tensor in tensors:
            place = torch.empty(0, dtype=tensor.dtype)
            storage = moved[tensor.untyped_storage().data_ptr()]
            tensor.data = place.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def regions(self) -> tuple[ArenaRegion, ...]:
        """All regions of the pool."""
        return self.arena.regions(self.group)

    def released_regions(self) -> tuple[ArenaRegion, ...]:
        """The regions that have no memory now."""
        return tuple(region for region in self.regions() if region.state is not RegionState.BACKED)

    def idle_regions(self) -> tuple[ArenaRegion, ...]:
        """The BACKED regions that no tensor uses."""
        return tuple(r for r in self.regions() if r.state is RegionState.BACKED and r.num_views == 0)

    def live_blocks(self) -> tuple[tuple[int, int], ...]:
        """Address and size in bytes of each storage that was given out, in order."""
        regions = [region for region in self.regions() if region.num_views > 0]
        blocks = sorted(self._blocks.items())
        return tuple(b for b in blocks if any(r.address <= b[0] < r.address + r.num_bytes for r in regions))

    def close(self) -> None:
        """Free what no tensor uses; the rest goes with its last tensor and the arena."""
        self.arena.free([region for region in self.regions() if region.num_views == 0])


class _Factories(TorchFunctionMode):
    """Answers factories from a pool; everything else passes."""

    def __init__(self, pool: HostPool) -> None:
        super().__init__()
        self._pool = pool

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in (torch.empty, torch.zeros) or torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return func(*args, **kwargs)
        like = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        num_bytes = like.numel() * like.itemsize
        if num_bytes < _MIN_BYTES or not like.is_contiguous():
            return func(*args, **kwargs)
        made = self._pool.allocate(num_bytes).view(like.dtype).view(like.shape)
        return made.zero_() if func is torch.zeros else made
