"""Memory that changes hands: ``Arena`` and its regions, sharing between processes, PyTorch's pool, offload."""

from reshard.arena.arena import Arena, ArenaRegion, RegionChoice
from reshard.arena.channel import Channel, Credentials, Listener
from reshard.arena.records import (
    CUDA_CHUNK_CLASSES,
    HOST_CHUNK_CLASSES,
    ArenaStats,
    HandoverReport,
    MappingMode,
    RegionState,
)
from reshard.arena.share import ImportedRegion, RegionShare, receive_region, send_region

__all__ = [
    "CUDA_CHUNK_CLASSES",
    "HOST_CHUNK_CLASSES",
    "Arena",
    "ArenaRegion",
    "ArenaStats",
    "Channel",
    "Credentials",
    "HandoverReport",
    "ImportedRegion",
    "Listener",
    "MappingMode",
    "RegionChoice",
    "RegionShare",
    "RegionState",
    "receive_region",
    "send_region",
]
