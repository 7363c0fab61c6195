"""Memory that changes hands: ``Arena`` and its regions, sharing between processes, PyTorch's pool, offload."""

from reshard.arena.arena import Arena, ArenaRegion, RegionChoice
from reshard.arena.channel import Channel, Credentials, Deadline, Listener
from reshard.arena.lend import Borrowed, borrow_tensors, lend_tensors
from reshard.arena.records import (
    CUDA_CHUNK_CLASSES,
    HOST_CHUNK_CLASSES,
    ArenaStats,
    HandoverReport,
    MappingMode,
    RegionState,
)
from reshard.arena.share import ImportedRegion, RegionOrigin, RegionShare, receive_region, send_region

__all__ = [
    "CUDA_CHUNK_CLASSES",
    "HOST_CHUNK_CLASSES",
    "Arena",
    "ArenaRegion",
    "ArenaStats",
    "Borrowed",
    "Channel",
    "Credentials",
    "Deadline",
    "HandoverReport",
    "ImportedRegion",
    "Listener",
    "MappingMode",
    "RegionChoice",
    "RegionOrigin",
    "RegionShare",
    "RegionState",
    "borrow_tensors",
    "lend_tensors",
    "receive_region",
    "send_region",
]
