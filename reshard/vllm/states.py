"""What of a vLLM rank has memory and valid contents, and which step may come next: pure bookkeeping.

    RUNNING --sleep(1)--> SUSPENDED level 1 --wake_up--> RUNNING                 (either tag may come first)
    RUNNING --sleep(2)--> SUSPENDED level 2 --wake_up(weights)--> AWAITING_WEIGHTS
            --new weights--> WEIGHTS_READY --wake_up(kv_cache)--> RUNNING
    RUNNING --discard(kv_cache)--> WEIGHTS_READY

Level 0 pauses vLLM's scheduler only and is not seen here. Waking what is awake changes nothing, so that a call that
failed on one rank can be repeated on all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from reshard.errors import StateError

WEIGHTS: Final = "weights"
KV_CACHE: Final = "kv_cache"
TAGS: Final = (WEIGHTS, KV_CACHE)
Contents = Literal["valid", "asleep", "missing"]
"""``missing``: there is memory, and what it should hold has not come yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepState:
    """One state; each step returns the next or raises StateError and changes nothing."""

    weights: Contents = "valid"
    kv_cache: Contents = "valid"
    level: int = 0

    @property
    def is_running(self) -> bool:
        """Whether the engine may generate."""
        return self.weights == self.kv_cache == "valid"

    @property
    def name(self) -> str:
        """The state's name in the diagram above."""
        match (self.weights, self.kv_cache):
            case ("valid", "valid"):
                return "RUNNING"
            case ("asleep", "asleep"):
                return f"SUSPENDED level {self.level}"
            case ("missing", _):
                return "AWAITING_WEIGHTS"
            case ("valid", _):
                return "WEIGHTS_READY"
        return "KV_READY"

    @property
    def next_step(self) -> str:
        """What leads towards RUNNING."""
        match (self.weights, self.kv_cache):
            case ("asleep", _) if self.level == 2:
                return (
                    f"call wake_up(tags=['{WEIGHTS}']), then send new weights, then call wake_up(tags=['{KV_CACHE}'])"
                )
            case ("missing", _):
                return f"send new weights (WeightSync, a weight transfer, reload_weights), then wake '{KV_CACHE}'"
            case ("valid", "valid"):
                return "generate, or sleep"
        return "call wake_up()"

    def suspend(self, level: int) -> SleepState:
        """Sleep at ``level`` 1 or 2."""
        if level not in (1, 2):
            raise ValueError(f"expected sleep level 1 or 2, got {level}; level 0 is vLLM's own pause")
        if self.weights == "asleep":
            raise StateError(f"the engine can't sleep: it is {self.name} already; next: {self.next_step}")
        if self.weights == "missing" and level == 1:
            raise StateError(f"the engine can't sleep at level 1: it is {self.name}; next: {self.next_step}")
        return SleepState(weights="asleep", kv_cache="asleep", level=level)

    def discard_kv(self) -> SleepState:
        """Give up the KV cache alone."""
        if not self.is_running:
            raise StateError(f"the KV cache can't be given up: the engine is {self.name}; next: {self.next_step}")
        return SleepState(weights="valid", kv_cache="asleep", level=1)

    def wake(self, tags: Iterable[str] | None) -> SleepState:
        """Wake ``tags``, or all."""
        wanted = set(TAGS if tags is None else tags)
        if unknown := wanted - set(TAGS):
            raise ValueError(f"expected tags of {list(TAGS)}, got {sorted(unknown)}")
        state = self
        if WEIGHTS in wanted and self.weights == "asleep":
            state = replace(state, weights="missing" if self.level == 2 else "valid")
        if KV_CACHE in wanted and self.kv_cache == "asleep":
            if self.level == 2 and self.weights != "valid":
                raise StateError(
                    f"the KV cache can't wake yet: the engine is {self.name} and would generate without weights; "
                    f"next: {self.next_step}"
                )
            state = replace(state, kv_cache="valid")
        return replace(state, level=0) if state.is_running else state

    def weights_arrived(self) -> SleepState:
        """New weights are in place."""
        if self.weights == "asleep" and self.level == 2:
            raise StateError(f"weights have no memory to arrive in: the engine is {self.name}; next: {self.next_step}")
        return self if self.weights != "missing" else replace(self, weights="valid")

    def require_running(self) -> None:
        """StateError unless the engine may generate."""
        if not self.is_running:
            raise StateError(f"the engine can't generate: it is {self.name}; next: {self.next_step}")
