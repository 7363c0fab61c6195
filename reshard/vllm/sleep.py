"""vLLM's sleep-mode backend ``reshard``: drives this process's ``EngineMemory`` for whoever dispatches to backends."""

from __future__ import annotations

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeState

from reshard.errors import StateError
from reshard.vllm.memory import EngineMemory, engine_memory


class ReshardSleepBackend(SleepModeBackend):
    """Sleeping hands memory over, waking takes it back; communicators, graphs and compiled code stay as they are."""

    def suspend(self, level: int = 1) -> None:
        """Give up the KV cache, and at level 2 the weights. Raises as ``EngineMemory.suspend``."""
        _memory().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        """Back ``tags``, or all. Raises as ``EngineMemory.resume``."""
        _memory().resume(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Give up the KV cache alone.

        Raises:
            StateError: other tags are named, or the engine is not running.
        """
        if tuple(tags) != ("kv_cache",):
            raise StateError(f"only the KV cache can be given up alone, got {list(tags)}; for weights call sleep(2)")
        _memory().discard_kv()

    def state(self) -> SleepModeState:
        """RUNNING, or SUSPENDED while anything is asleep or missing."""
        return "RUNNING" if _memory().state.is_running else "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        """They are not touched."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """They are not touched."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Addresses stay, so graphs stay."""
        return True


def _memory() -> EngineMemory:
    memory = engine_memory()
    if memory is None:
        raise StateError(
            "this engine does not have its memory from an arena: start it with enable_sleep_mode=True and "
            "additional_config={'sleep_mode_backend': 'reshard'} where the plug-in is loaded (VLLM_PLUGINS unset, or "
            "naming reshard), and with vLLM's own worker class or one made of reshard.vllm.worker.ArenaSleep"
        )
    return memory
