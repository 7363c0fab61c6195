"""What a user can set about an engine's memory: ``additional_config={"reshard": {...}}`` of vLLM."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from reshard.arena.records import MappingMode

LevelOneWeights = Literal["keep", "offload"]
KvFill = Literal["auto", "zero", "none"]
_CHOICES: dict[str, tuple[object, ...]] = {
    "mappings": get_args(MappingMode),
    "poison": (True, False),
    "level1_weights": get_args(LevelOneWeights),
    "kv_fill": get_args(KvFill),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Options of one engine rank's memory.

    Attributes:
        budget_bytes: most physical memory that the arena may hold; None for the device's own limit.
        mappings: what becomes of the mappings of memory that was handed over, see ``MappingMode``. ``keep`` makes
            sleeping and waking bookkeeping; ``drop`` makes a stray access fault.
        poison: fill memory that changes hands with 0xA5; for debugging.
        chunk_classes: sizes of physical chunks in bytes, descending; None for the arena's own.
        level1_weights: whether sleep level 1 leaves the weights where they are or moves them to (pinned) host memory.
        kv_fill: whether a KV cache that comes back is zeroed; ``auto``: unless the attention backend is known to read
            only slots that were written.
    """

    budget_bytes: int | None = None
    mappings: MappingMode = "keep"
    poison: bool = False
    chunk_classes: tuple[int, ...] | None = None
    level1_weights: LevelOneWeights = "keep"
    kv_fill: KvFill = "auto"

    def __post_init__(self) -> None:
        """Check the words and numbers; ValueError names the option."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"option {name!r} of reshard: expected one of {list(choices)}, got {value!r}")
        if self.budget_bytes is not None and (not isinstance(self.budget_bytes, int) or self.budget_bytes <= 0):
            raise ValueError(f"option 'budget_bytes' of reshard: expected bytes above 0, got {self.budget_bytes!r}")

    @classmethod
    def from_config(cls, additional_config: object) -> MemoryOptions:
        """Read vLLM's ``additional_config``; defaults where it says nothing of reshard.

        Raises:
            ValueError: an option that there is none of, or a value that it can't have.
        """
        given = additional_config.get("reshard", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ValueError(f"expected additional_config['reshard'] to be a dictionary of options, got {given!r}")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {known}"
                raise ValueError(f"reshard has no option {name!r}: {hint}")
        values = dict(given)
        if values.get("chunk_classes") is not None:
            values["chunk_classes"] = tuple(values["chunk_classes"])
        return cls(**values)
