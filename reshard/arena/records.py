"""Values of an arena: states, options that are words, what a hand-over did, the account of bytes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

MappingMode = Literal["drop", "keep"]
"""What happens to a region's mappings when it is released: ``drop`` unmaps them, so that a stray access faults;
``keep`` leaves them, so that backing the region again costs no driver call, and a stray access reads or destroys the
bytes of whoever owns the memory by then.
"""

MIB = 1 << 20
CUDA_CHUNK_CLASSES = tuple(MIB << power for power in range(10, 0, -1))
"""1 GiB down to 2 MiB by halves. Mapping costs about the same for a chunk of any size, so large ones come first; halves
keep the number of chunks of any size small (one per set bit of its size in 2 MiB units).
"""
HOST_CHUNK_CLASSES = (64 * MIB, 16 * MIB, 4 * MIB, MIB, MIB // 4, MIB // 16)
"""64 MiB down to 64 KiB by fours. Each host chunk holds one file descriptor."""


class RegionState(enum.Enum):
    """RESERVED: addresses only. BACKED: usable memory. RELEASED: its memory went back to the arena."""

    RESERVED = "RESERVED"
    BACKED = "BACKED"
    RELEASED = "RELEASED"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverReport:
    """What one change of hands did. In the steady state ``num_creates`` and ``num_destroys`` are 0.

    ``elapsed_us`` is the whole call inside the arena; of it, ``synchronize_us`` was spent waiting for the device, and
    the others in the driver's calls of that name (``create_us``: creating and destroying; ``allow_us``: opening
    access).
    """

    released_bytes: int
    backed_bytes: int
    num_creates: int
    num_destroys: int
    num_maps: int
    num_unmaps: int
    elapsed_us: float
    synchronize_us: float
    create_us: float
    map_us: float
    allow_us: float
    unmap_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStats:
    """The account of an arena: ``created_bytes == free_bytes + backed_bytes``; counts are totals since its creation."""

    created_bytes: int
    free_bytes: int
    backed_bytes: int
    reserved_bytes: int
    peak_created_bytes: int
    num_chunks: int
    num_regions: int
    num_creates: int
    num_destroys: int
    num_maps: int
    num_unmaps: int
