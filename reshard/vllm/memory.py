"""The memory of the vLLM rank of this process: weights and KV cache from one arena, handed to a trainer and back.

Note "who gets the memory of a sleeping engine". If the trainer in this process takes its memory from the same arena
(``trainer_pool``, or regions of group ``trainer``), what the engine gives up stays in the arena, and the trainer's
segments that had no memory are backed with it in the same step; waking takes the memory of the trainer's idle segments
in return. Otherwise the arena gives it to the device, where any allocator finds it, and waking creates it anew.

Note "what outlives sleep". Addresses always do, so captured CUDA graphs stay valid. The bytes of every block in the
arena that is neither the KV cache nor a parameter above 1 MiB are saved at a sleep that would lose them, and restored:
buffers (persistent or not), small parameters, and tensors that plain objects hold. What vLLM allocates outside of its
weights and KV cache (CUDA graph pools, workspaces, activations) is not touched at all.
"""

from __future__ import annotations

import bisect
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import nn

from reshard.arena import Arena, ArenaRegion, HandoverReport, RegionState
from reshard.arena.host_pool import HostPool
from reshard.arena.keep import KeptBytes, Range
from reshard.arena.records import CUDA_CHUNK_CLASSES, HOST_CHUNK_CLASSES
from reshard.arena.torch_pool import ArenaPool, TrainerPool
from reshard.errors import OutOfMemory, StateError
from reshard.vllm.options import MemoryOptions
from reshard.vllm.states import KV_CACHE, TAGS, WEIGHTS, SleepState

logger = logging.getLogger(__name__)

TRAINER: Final = "trainer"
_SMALL_BYTES: Final = 1 << 20
"""Parameters up to this size outlive sleep level 2: a loader may never write them (scales), and they cost nothing."""


class EngineMemory:
    """One engine rank's memory and its state; at most one lives in a process (``engine_memory``).

    Calls come from the thread that drives the engine; none while the model runs.
    """

    def __init__(self, device: int, options: MemoryOptions) -> None:
        """Make the arena and the pools.

        Args:
            device: CUDA ordinal, or -1 for the host.
            options: see ``MemoryOptions``.

        Raises:
            StateError: another engine of this process has its memory from an arena, or ``expandable_segments`` is set
                and keeps PyTorch from asking the arena.
            DeviceError: the device has no virtual memory management.
        """
        if engine_memory() is not None:
            gc.collect()  # an engine that was dropped may only wait for it
        if engine_memory() is not None:
            raise StateError(
                "an engine with the sleep-mode backend 'reshard' lives in this process already: delete it before "
                "making another, or run the other in a process of its own"
            )
        self.options = options
        self.arena = _arena(device, options)
        self.state = SleepState()
        self.has_slept = False
        """Whether the KV cache sleeps because vLLM went to sleep, which makes it forget its prefix cache first."""
        self._pools: dict[str, ArenaPool | HostPool] = {
            tag: ArenaPool(self.arena, group=tag) if device >= 0 else HostPool(self.arena, group=tag) for tag in TAGS
        }
        self._kept = {tag: KeptBytes(self.arena) for tag in TAGS}
        self._lent: dict[str, tuple[ArenaRegion, ...]] = dict.fromkeys(TAGS, ())
        self._trainer: TrainerPool | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        self._kv: tuple[torch.Tensor, ...] = ()
        self._zero_kv = True
        self._pending: dict[int, str] = {}
        self._finalizer = weakref.finalize(self, _close_all, tuple(self._pools.values()))
        self._finalizer.atexit = False
        _remember(self)

    # ---- making the engine ----

    @contextmanager
    def use(self, tag: str) -> Iterator[None]:
        """Take what the calling thread allocates for ``tag`` (``weights`` or ``kv_cache``) from the arena.

        Raises:
            StateError: the engine is asleep.
        """
        self.state.require_running()
        pool = self._pools[tag]
        if isinstance(pool, HostPool) and tag == WEIGHTS:  # they move once they are loaded, see own_model
            yield
            return
        self.arena.back(pool.released_regions())
        with pool.use():
            yield

    def own_model(self, model: nn.Module) -> None:
        """Take a loaded model in: on the host its parameters and buffers move into the arena; ``load_weights`` of the
        model is watched from now on, so that weights that come by it count as arrived.

        Raises:
            StateError: none of its parameters lies in the arena (vLLM allocated them in another way).
        """
        pool = self._pools[WEIGHTS]
        if isinstance(pool, HostPool):
            pool.adopt([*model.parameters(), *model.buffers()])
        self._parameters = {name: p.data for name, p in model.named_parameters() if p.untyped_storage().nbytes() > 0}
        if self._parameters and not any(self._lies_in(WEIGHTS, p) for p in self._parameters.values()):
            raise StateError(
                "vLLM did not take the weights' memory from the arena: this version allocates them in a way that "
                "reshard.vllm.worker does not know; choose another sleep-mode backend or a tested version"
            )
        self._watch(model)
        self._settle(WEIGHTS)

    def own_kv(self, tensors: Iterable[torch.Tensor], *, zero_on_wake: bool) -> None:
        """Take the KV cache in: ``tensors`` are all that may lose its contents in sleep."""
        self._kv = tuple(tensors)
        self._zero_kv = zero_on_wake
        self._settle(KV_CACHE)

    def trainer_pool(self) -> TrainerPool:
        """The pool whose ``use`` takes a training step's memory from what the engine gives up; made at the first call.

        While it exists, sleeping backs its segments and waking takes the memory of those that are idle.

        Raises:
            ValueError: the engine runs on the host.
        """
        if self._trainer is None:
            self._trainer = TrainerPool(self.arena, group=TRAINER)
        return self._trainer

    # ---- sleeping and waking ----

    def suspend(self, level: int) -> HandoverReport:
        """Give memory up: the KV cache, and by ``level`` and options the weights (see the module's notes).

        Raises:
            StateError, ValueError: not from this state, or no such level; nothing has changed.
        """
        state = self.state.suspend(level)
        leaving = [KV_CACHE] if self.state.kv_cache == "valid" else []
        if level == 2 or self.options.level1_weights == "offload":
            leaving.append(WEIGHTS)
        dropped = self._dropped_weights() if level == 2 else {}
        report = self._lend({tag: dropped if tag == WEIGHTS else self._kv_blocks() for tag in leaving})
        self._pending = dropped
        self.state, self.has_slept = state, True
        return report

    def discard_kv(self) -> HandoverReport:
        """Give the KV cache up and keep the weights usable. Raises as ``suspend``."""
        state = self.state.discard_kv()
        report = self._lend({KV_CACHE: self._kv_blocks()})
        self.state = state
        return report

    def resume(self, tags: Sequence[str] | None = None) -> HandoverReport:
        """Back ``tags`` (all by default) at their old addresses and restore what was saved.

        Raises:
            OutOfMemory: the device or a budget has too little; the engine sleeps on and can be woken later.
            StateError, ValueError: not from this state, or no such tag; nothing has changed.
        """
        state = self.state.wake(tags)
        waking = [tag for tag in TAGS if tag in (TAGS if tags is None else tags) and self._lent[tag]]
        report = self._claim([region for tag in waking for region in self._lent[tag]])
        for tag in waking:
            self._lent[tag] = ()
            self._kept[tag].restore()
        if KV_CACHE in waking and self._zero_kv:
            torch._foreach_zero_(list(self._kv))
        self.state = state
        self.has_slept = self.has_slept and state.kv_cache == "asleep"
        return report

    def weights_arrived(self) -> None:
        """Say that a whole set of new weights is in place: after sleep level 2 the KV cache may wake then.

        Raises:
            StateError: the weights have no memory: whatever arrived did not arrive there.
        """
        self.state = self.state.weights_arrived()
        self._pending = {}

    def require_weights(self) -> None:
        """StateError unless the weights have memory that can be written now."""
        if self._lent[WEIGHTS]:
            raise StateError(
                f"the weights have no memory: the engine is {self.state.name}; next: {self.state.next_step}"
            )

    def require_running(self) -> None:
        """StateError, naming the state and the next step, unless the engine may generate."""
        if not self.state.is_running:
            missing = (
                f" ({len(self._pending)} parameters, {min(self._pending.values())} for one)" if self._pending else ""
            )
            raise StateError(
                f"the engine can't generate: it is {self.state.name}{missing}; next: {self.state.next_step}"
            )

    def close(self) -> None:
        """Give the pools up; memory goes back to the device with the last tensor in it."""
        self._finalizer()
        _forget(self)

    # ---- how ----

    def _lend(self, leaving: dict[str, dict[int, str]]) -> HandoverReport:
        """Release the regions of tags whose blocks named by address lose their contents; all others are saved."""
        regions: dict[str, tuple[ArenaRegion, ...]] = {}
        try:
            for tag, dropped in leaving.items():
                regions[tag] = self._movable(tag)
                self._kept[tag].save(self._ranges_to_keep(tag, regions[tag], dropped))
            wanted = self._trainer.released_regions() if self._trainer is not None else ()
            report = self.arena.handover([region for tag in leaving for region in regions[tag]], wanted)
        except BaseException:
            for tag in leaving:
                self._kept[tag].forget()
            raise
        self._lent.update({tag: self._lent[tag] + regions[tag] for tag in leaving})
        if not self.arena.regions(TRAINER):
            self.arena.trim()
        return report

    def _claim(self, regions: Sequence[ArenaRegion]) -> HandoverReport:
        """Back ``regions``: with the memory of idle trainer segments, free chunks, or new ones."""
        trainer = self._trainer
        is_open = trainer is not None and not trainer.released_regions()
        back = trainer.suspend if trainer is not None and is_open and regions else self.arena.back
        try:
            return back(regions)
        except OutOfMemory:
            if self.arena.device < 0:
                raise
        torch.cuda.empty_cache()
        return back(regions)

    def _movable(self, tag: str) -> tuple[ArenaRegion, ...]:
        """BACKED regions of ``tag``; those that another process has mapped stay where they are."""
        backed = [r for r in self._pools[tag].regions() if r.state is RegionState.BACKED]
        return tuple(region for region in backed if region.num_shares == 0)

    def _ranges_to_keep(self, tag: str, regions: Sequence[ArenaRegion], dropped: dict[int, str]) -> list[Range]:
        blocks = [block for block in self._pools[tag].live_blocks() if block[0] not in dropped]
        return [b for b in blocks if any(r.address <= b[0] < r.address + r.num_bytes for r in regions)]

    def _dropped_weights(self) -> dict[int, str]:
        """Blocks whose contents new weights will replace: of parameters above 1 MiB, by address, with one name each."""
        large = {name: p for name, p in self._parameters.items() if p.nbytes > _SMALL_BYTES}
        return _blocks_of(self._pools[WEIGHTS].live_blocks(), large)

    def _kv_blocks(self) -> dict[int, str]:
        return _blocks_of(self._pools[KV_CACHE].live_blocks(), {str(idx): t for idx, t in enumerate(self._kv)})

    def _settle(self, tag: str) -> None:
        """Give what PyTorch cached while loading to the device, where vLLM's profiling counts it as free."""
        self.arena.release(self._pools[tag].idle_regions())
        self.arena.trim()

    def _lies_in(self, tag: str, tensor: torch.Tensor) -> bool:
        region = self.arena.region_at(tensor.data_ptr())
        return region is not None and region.group == tag

    def _watch(self, model: nn.Module) -> None:
        """Count what ``model.load_weights`` loads: callers that drive it themselves tell the worker nothing."""
        load: Callable[..., object] = cast("Any", model).load_weights
        memory = weakref.ref(self)

        @functools.wraps(load)
        def load_weights(*args: object, **kwargs: object) -> object:
            loaded = load(*args, **kwargs)
            this = memory()
            if this is not None:
                this._note_loaded(loaded)
            return loaded

        cast("Any", model).load_weights = load_weights

    def _note_loaded(self, loaded: object) -> None:
        """Take parameters off the list of those that are missing, and say so when none is left."""
        if self.state.weights != "missing":
            return
        names = loaded if isinstance(loaded, set | frozenset | list | tuple) else self._parameters
        found = {name: self._parameters[name] for name in names if name in self._parameters}
        for address in _blocks_of(self._pools[WEIGHTS].live_blocks(), found):
            self._pending.pop(address, None)
        if not self._pending:
            self.weights_arrived()


def engine_memory() -> EngineMemory | None:
    """The memory of this process's vLLM rank; None where no engine has it from an arena."""
    return _current[0]() if _current else None


_current: Final[list[weakref.ref[EngineMemory]]] = []


def _remember(memory: EngineMemory) -> None:
    _current[:] = [weakref.ref(memory)]


def _forget(memory: EngineMemory) -> None:
    if engine_memory() is memory:
        _current.clear()


def _close_all(pools: Iterable[ArenaPool | HostPool]) -> None:
    for pool in pools:
        pool.close()


def _arena(device: int, options: MemoryOptions) -> Arena:
    if device < 0:
        return Arena.host(
            budget_bytes=options.budget_bytes,
            chunk_classes=options.chunk_classes or HOST_CHUNK_CLASSES,
            mappings=options.mappings,
            poison=options.poison,
        )
    return Arena.cuda(
        device,
        budget_bytes=options.budget_bytes,
        chunk_classes=options.chunk_classes or CUDA_CHUNK_CLASSES,
        mappings=options.mappings,
        poison=options.poison,
    )


def _blocks_of(blocks: Sequence[Range], tensors: dict[str, torch.Tensor]) -> dict[int, str]:
    """Addresses of the blocks, given in order, that hold the storages of ``tensors``, each with one tensor's name."""
    found: dict[int, str] = {}
    addresses = [address for address, _ in blocks]
    for name, tensor in tensors.items():
        idx = bisect.bisect_right(addresses, tensor.data_ptr()) - 1
        if idx >= 0 and tensor.data_ptr() < addresses[idx] + blocks[idx][1]:
            found.setdefault(addresses[idx], name)
    return found
