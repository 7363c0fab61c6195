"""vLLM's GPU worker with weights and KV cache from an arena."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from vllm.model_executor.layers import rotary_embedding
from vllm.v1.worker.gpu_worker import Worker

from reshard.errors import StateError
from reshard.vllm.memory import EngineMemory
from reshard.vllm.options import MemoryOptions
from reshard.vllm.states import TAGS

_READS_WRITTEN_SLOTS_ONLY = frozenset({"FLASH_ATTN"})
"""Attention backends that gave the same tokens on a KV cache full of NaNs (tests/gpu); vLLM's for CPUs does not."""


class ArenaSleep:
    """Makes a worker of vLLM sleep by handing memory over: a base class to the left of the worker's own.

    It answers vLLM's request for a place for ``weights`` and ``kv_cache`` and takes over sleeping and waking. A model
    that may not run (asleep, or without weights after level 2) refuses with StateError before anything is scheduled on
    the device.
    """

    memory: EngineMemory

    def init_device(self) -> None:
        """Make the arena once the device is there."""
        super().init_device()  # type: ignore[misc]
        ordinal = self.device.index or 0 if self.device.type == "cuda" else -1  # type: ignore[attr-defined]
        self.memory = EngineMemory(ordinal, MemoryOptions.from_config(self.vllm_config.additional_config))  # type: ignore[attr-defined]

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        """vLLM asks for a place for its allocations of ``tag``; what is none of the arena's stays where it is."""
        return self.memory.use(tag) if tag in TAGS else nullcontext()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model into the arena."""
        with _rotary_tables_unshared():
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.memory.own_model(self.model_runner.get_model())  # type: ignore[attr-defined]

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Make the KV cache in the arena."""
        super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]
        layers = self.vllm_config.compilation_config.static_forward_context.values()  # type: ignore[attr-defined]
        of_layer = [(layer, list(_tensors(vars(layer).get("kv_cache")))) for layer in layers]
        with_cache = [layer for layer, tensors in of_layer if tensors]  # experts stand in that context too
        caches = {id(tensor): tensor for _, tensors in of_layer for tensor in tensors}
        self.memory.own_kv(caches.values(), zero_on_wake=self._zeroes_kv(with_cache))

    def _zeroes_kv(self, layers: list[Any]) -> bool:
        fill = self.memory.options.kv_fill
        if fill != "auto":
            return fill == "zero"
        if self.vllm_config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16"):  # type: ignore[attr-defined]
            return True
        return not {layer.get_attn_backend().get_name() for layer in layers} <= _READS_WRITTEN_SLOTS_ONLY

    # ---- sleeping and waking ----

    def sleep(self, level: int = 1) -> None:
        """Hand memory over. Raises as ``EngineMemory.suspend``, and then the engine goes on running."""
        self.memory.suspend(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back. Raises as ``EngineMemory.resume``, and then the engine sleeps on."""
        self.memory.resume(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Hand the KV cache over alone. Raises StateError for anything else."""
        if tuple(tags) != ("kv_cache",):
            raise StateError(f"only the KV cache can be given up alone, got {list(tags)}; for weights call sleep(2)")
        self.memory.discard_kv()

    # ---- running, and weights that arrive ----

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; StateError, naming the next step, while it may not run."""
        self.memory.require_running()
        return super().execute_model(*args, **kwargs)  # type: ignore[misc]

    def execute_dummy_batch(self) -> None:
        """As ``execute_model``."""
        self.memory.require_running()
        super().execute_dummy_batch()  # type: ignore[misc]

    def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Open an update; StateError while the weights have no memory."""
        self.memory.require_weights()
        self._updates_draft = False
        super().start_weight_update(*args, **kwargs)  # type: ignore[misc]

    def start_draft_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Open an update of the draft model; StateError while the weights have no memory."""
        self.memory.require_weights()
        self._updates_draft = True
        super().start_draft_weight_update(*args, **kwargs)  # type: ignore[misc]

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Close an update: the weights have arrived."""
        super().finish_weight_update(*args, **kwargs)  # type: ignore[misc]
        if not self._updates_draft:
            self.memory.weights_arrived()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint again; StateError while the weights have no memory."""
        self.memory.require_weights()
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]
        self.memory.weights_arrived()

    def shutdown(self) -> None:
        """Shut the worker down and give its pools up."""
        super().shutdown()  # type: ignore[misc]
        self.memory.close()


class ArenaWorker(ArenaSleep, Worker):
    """vLLM's GPU worker on an arena."""


@contextmanager
def _rotary_tables_unshared() -> Iterator[None]:
    """Keep rotary tables made inside to this engine: vLLM would give them to the process's next engine as well, which
    then reads memory of an engine that may be asleep.
    """
    before = dict(rotary_embedding._ROPE_DICT)
    try:
        yield
    finally:
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(before)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Tensors in a cache that is one, or lists of them."""
    if isinstance(value, torch.Tensor):
        if value.numel() > 0:
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
