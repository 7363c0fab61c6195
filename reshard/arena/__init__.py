"""Memory that changes hands: ``Arena`` and its regions, sharing between processes, PyTorch's pool and offload on top."""

from reshard.arena.arena import Arena, ArenaRegion, RegionChoice
from reshard.arena.records import (
    CUDA_CHUNK_CLASSES,
    HOST_CHUNK_CLASSES,
    ArenaStats,
    HandoverReport,
    MappingMode,
    RegionState,
)

__all__ = [
    "CUDA_CHUNK_CLASSES",
    "HOST_CHUNK_CLASSES",
    "Arena",
    "ArenaRegion",
    "ArenaStats",
    "HandoverReport",
    "MappingMode",
    "RegionChoice",
    "RegionState",
]
