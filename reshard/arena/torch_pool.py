"""PyTorch's memory from an arena: ``torch.cuda.MemPool``s whose segments can be unbacked and backed again.

Note "catching every allocation of a training step". ``torch.cuda.use_mem_pool`` routes the allocations of the calling
thread, and backward runs in threads of autograd's own, so by itself it misses gradients and whatever backward saves or
recomputes. ``TrainerPool.use`` therefore also turns autograd's multithreading off inside it: backward then runs on the
calling thread, and both parts are public interfaces of PyTorch. A route by stream would catch autograd's threads, which
run on the stream of the forward pass, but miss work on side streams (gathering parameters ahead, offloading) and rest
on private functions. Threads that the program starts itself have to enter ``use`` themselves.

Note "segments". PyTorch's allocator takes segments from the pool's allocator, one region of the arena each, and keeps
them. A segment in which no block is live (idle) can give its memory up while nothing allocates from the pool; its
address stays, so it is usable at once after ``resume``. Contents of idle segments are lost, and blocks that a captured
CUDA graph of the trainer uses count as free once their tensors are gone: replay such a graph only while the pool is
backed, and let it write what it reads. Workspaces that a library such as cuBLAS allocates inside ``use`` at its first
call stay live in the pool for the life of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from reshard import _C
from reshard.arena.arena import Arena, ArenaRegion, RegionChoice
from reshard.arena.records import HandoverReport, RegionState
from reshard.errors import StateError

_PROBE_BYTES: Final = 1
_ALLOCATORS: Final[dict[int, torch.cuda.memory.CUDAPluggableAllocator]] = {}
"""By slot. PyTorch frees a segment through its pool's allocator, possibly long after the pool: they live for ever."""


class ArenaPool:
    """A pool of one arena and group: allocations of the calling thread inside ``use`` come from it.

    A process can have a few such pools at a time (``reshard._C.NUM_TORCH_SLOTS``); the arena lives as long as any of
    their segments. Several pools of one arena differ by group, and their regions change hands like any others.
    """

    def __init__(self, arena: Arena, *, group: str) -> None:
        """Make the pool and try it with one small allocation; ``Arena.close`` and ``free`` are refused while it has
        segments.

        Args:
            arena: of a CUDA device.
            group: of the regions that its segments become; ``arena.set_budget(group, ...)`` limits them, and PyTorch
                then raises ``torch.OutOfMemoryError``, whose reason ``last_error`` tells.

        Raises:
            ValueError: an arena of host memory.
            StateError: all pools are taken, or PyTorch does not ask this pool for memory (``expandable_segments``).

        """
        if arena.device < 0:
            raise ValueError("expected an arena of a CUDA device, got one of host memory; use Arena.cuda(device)")
        self.arena = arena
        self.group = group
        self._slot = _C.claim_torch_slot(arena.core, group)
        if self._slot not in _ALLOCATORS:
            names = (f"reshard_arena_alloc_{self._slot}", f"reshard_arena_free_{self._slot}")
            _ALLOCATORS[self._slot] = torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, *names)
        with torch.cuda.device(self._device):
            self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool(_ALLOCATORS[self._slot].allocator())
        self._check_route()

    def _check_route(self) -> None:
        self._touch()
        if _C.torch_slot_info(self._slot).num_allocs == 0:
            self.close()
            raise StateError(
                "PyTorch did not take the pool's memory from the arena; remove expandable_segments:True from "
                "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF (other options may stay)"
            )

    def _touch(self) -> None:
        """Let PyTorch's allocator run once, which also makes blocks that waited for other streams available."""
        with self.use():
            torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=self._device)

    def _open_pool(self) -> torch.cuda.MemPool:
        if self._pool is None:
            raise StateError(f"pool {self.group!r} is closed; make a new {type(self).__name__}")
        return self._pool

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", self.arena.device)

    @property
    def pool_id(self) -> tuple[int, int]:
        """PyTorch's name of the pool, as in ``torch.cuda.memory_snapshot()``'s ``segment_pool_id``."""
        return self._open_pool().id

    @property
    def last_error(self) -> str:
        """Why the last allocation or free that failed did; empty if none did."""
        return _C.torch_slot_info(self._slot).last_error

    @contextmanager
    def use(self) -> Iterator[None]:
        """Take the memory that the calling thread allocates on the device from the arena.

        Raises:
            StateError: segments have given their memory up; ``resume`` first.

        """
        if missing := self.released_regions():
            raise StateError(
                f"{len(missing)} segments of pool {self.group!r} have no memory ({missing[0].name} for one); "
                "resume() the pool before using it"
            )
        with torch.cuda.use_mem_pool(self._open_pool(), self._device):
            yield

    def regions(self) -> tuple[ArenaRegion, ...]:
        """All segments of the pool."""
        return self.arena.regions(self.group)

    def released_regions(self) -> tuple[ArenaRegion, ...]:
        """The segments that have no memory now."""
        return tuple(region for region in self.regions() if region.state is not RegionState.BACKED)

    def idle_regions(self) -> tuple[ArenaRegion, ...]:
        """The BACKED segments in which no block is live or waits for a stream."""
        segments = self._open_pool().snapshot()
        idle = {segment["address"] for segment in segments if segment["active_size"] == 0}
        return tuple(r for r in self.regions() if r.address in idle and r.state is RegionState.BACKED)

    def live_blocks(self) -> tuple[tuple[int, int], ...]:
        """Address and size in bytes of each block that a tensor uses, in order."""
        blocks = (block for segment in self._open_pool().snapshot() for block in segment["blocks"])
        return tuple(sorted((b["address"], b["size"]) for b in blocks if b["state"] != "inactive"))

    def suspend(self, to: RegionChoice = ()) -> HandoverReport:
        """Give the memory of idle segments to the regions ``to``; what is live stays, and ``use`` waits for ``resume``.

        Waits for the device. Raises as ``Arena.handover`` does, and then nothing has changed.
        """
        torch.cuda.synchronize(self._device)
        self._touch()
        return self.arena.handover(self.idle_regions(), to)

    def resume(self, from_: RegionChoice = ()) -> HandoverReport:
        """Back every segment that has no memory, with that of the regions ``from_``; contents are undefined."""
        return self.arena.handover(from_, self.released_regions())

    def close(self) -> None:
        """Give the pool up: segments without live blocks go back to the device, others when their last block does and
        PyTorch next empties its cache.
        """
        if self._pool is None:
            return
        if self.released_regions():
            self.resume()
        self._pool = None
        torch.cuda.empty_cache()
        _C.retire_torch_slot(self._slot)


class TrainerPool(ArenaPool):
    """The pool of a training step: all memory that it takes, backward included, comes from the arena."""

    def __init__(self, arena: Arena, *, group: str = "trainer") -> None:
        """As ``ArenaPool``."""
        super().__init__(arena, group=group)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Take all memory that the calling thread allocates on the device, backward included, from the arena.

        Raises:
            StateError: segments have given their memory up; ``resume`` first.

        """
        with super().use(), torch.autograd.set_multithreading_enabled(False):
            yield
