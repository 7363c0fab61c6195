"""The arena: physical memory that changes hands between regions of address space, and is not freed in between.

Note "lifetimes". A region's address is fixed from ``reserve`` to ``free``, whatever its state, so tensors, captured
CUDA graphs and registered pointers stay valid across any number of hand-overs; only the contents are undefined from the
moment of release, and again until written after the region is backed. While a region is RELEASED nothing may touch it:
with mappings dropped an access faults (on a GPU that ends the CUDA context), with mappings kept it hits another
region's bytes. A tensor made by ``tensor()`` or ``torch.from_dlpack(region)`` keeps the arena's memory alive, and a
region with such views can't be freed.

Threads: every method may be called from any thread; two calls never overlap inside the arena. Devices: a hand-over on
CUDA first waits for all work of the device's context, because the driver may unmap memory that a kernel still uses.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from reshard import _C
from reshard.arena import view
from reshard.arena.records import (
    CUDA_CHUNK_CLASSES,
    HOST_CHUNK_CLASSES,
    ArenaStats,
    HandoverReport,
    MappingMode,
    RegionState,
)

if TYPE_CHECKING:
    import torch

RegionChoice: TypeAlias = "str | ArenaRegion | Iterable[ArenaRegion]"
"""A group's name (all of its regions), one region, or several."""


class ArenaRegion:
    """A range of addresses of an arena, made by ``Arena.reserve``; equal to itself, however it was looked up."""

    __slots__ = ("_core", "address", "group", "id", "name", "num_bytes")

    def __init__(self, core: _C.ArenaCore, region_id: int) -> None:
        """Look region ``region_id`` of ``core`` up; StateError where it was freed."""
        info = core.info(region_id)
        self._core = core
        self.id = region_id
        self.name = info.name
        self.group = info.group
        self.address = info.address
        self.num_bytes = info.num_bytes
        """A multiple of the arena's smallest chunk class, at least what was asked for."""

    @property
    def state(self) -> RegionState:
        """RESERVED, BACKED or RELEASED, now. StateError after the region was freed."""
        return RegionState(self._core.info(self.id).state)

    @property
    def generation(self) -> int:
        """How often the region was backed or released: contents last only while it stays the same."""
        return self._core.info(self.id).generation

    @property
    def num_chunks(self) -> int:
        """Number of physical chunks that back the region now."""
        return self._core.info(self.id).num_chunks

    @property
    def num_views(self) -> int:
        """Number of DLPack views alive."""
        return self._core.info(self.id).num_views

    @property
    def num_shares(self) -> int:
        """Number of shares with other processes that have not ended."""
        return self._core.info(self.id).num_pins

    @property
    def device(self) -> int:
        """CUDA ordinal, or -1 for the host."""
        return self._core.driver.device

    def tensor(
        self, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None, *, offset_bytes: int = 0
    ) -> torch.Tensor:
        """View the region as a contiguous tensor without a copy.

        Args:
            dtype: element type; uint8 by default.
            shape: as many elements as fit after ``offset_bytes``, in one dimension, by default.
            offset_bytes: where the tensor starts; a multiple of the element size.

        Raises:
            ValueError: the tensor does not fit or is not aligned.

        """
        return view.as_tensor(self, dtype=dtype, shape=shape, offset_bytes=offset_bytes)

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Export the region as a one-dimensional uint8 tensor. No stream is waited for: order your own work."""
        del stream
        view.check_dlpack_request(self.device, dl_device=dl_device, copy=copy)
        return self._core.dlpack(self.id, max_version is not None and max_version[0] >= 1)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and id."""
        return view.dlpack_device(self.device)

    def __eq__(self, other: object) -> bool:
        """Tell whether ``other`` is the same region of the same arena."""
        return isinstance(other, ArenaRegion) and self._core is other._core and self.id == other.id

    def __hash__(self) -> int:
        """Agree with equality."""
        return hash((id(self._core), self.id))

    def __repr__(self) -> str:
        """Show name, group, size and address; the state may be gone."""
        return f"ArenaRegion({self.name!r}, group={self.group!r}, {self.num_bytes} bytes at {self.address:#x})"


class Arena:
    """Owns physical memory of one device, or of the host, and lends it to regions (see the note "lifetimes")."""

    def __init__(
        self,
        driver: _C.MemoryDriver,
        *,
        chunk_classes: Sequence[int],
        budget_bytes: int | None = None,
        mappings: MappingMode = "drop",
        poison: bool = False,
    ) -> None:
        """Make an arena without memory; ``Arena.host`` and ``Arena.cuda`` are the usual ways.

        Args:
            driver: the mechanism below, from ``reshard._C``.
            chunk_classes: sizes of physical chunks in bytes, descending, each a multiple of the next and of the
                driver's granularity. Regions are rounded up to the smallest.
            budget_bytes: most physical memory that the arena may hold; None for no limit but the device's.
            mappings: what becomes of a released region's mappings, see ``MappingMode``.
            poison: fill every region with 0xA5 when it is backed, and when it is released with mappings kept, so that a
                read of contents that are undefined shows. For debugging: it costs a write of all the bytes.

        Raises:
            ValueError: chunk classes or mappings that are none.

        """
        if mappings not in ("drop", "keep"):
            raise ValueError(f"expected mappings 'drop' or 'keep', got {mappings!r}")
        self.id = uuid.uuid4().hex
        """A name of this arena that no other arena of any process has."""
        self._core = _C.ArenaCore(
            driver,
            chunk_classes=list(chunk_classes),
            budget_bytes=budget_bytes,
            keep_mappings=mappings == "keep",
            poison=poison,
        )

    @classmethod
    def host(
        cls,
        *,
        budget_bytes: int | None = None,
        chunk_classes: Sequence[int] = HOST_CHUNK_CLASSES,
        mappings: MappingMode = "drop",
        poison: bool = False,
    ) -> Self:
        """Make an arena of host memory: sealed memory files, mapped by ``mmap``."""
        driver = _C.host_driver()
        return cls(driver, chunk_classes=chunk_classes, budget_bytes=budget_bytes, mappings=mappings, poison=poison)

    @classmethod
    def cuda(
        cls,
        device: int,
        *,
        budget_bytes: int | None = None,
        chunk_classes: Sequence[int] = CUDA_CHUNK_CLASSES,
        mappings: MappingMode = "drop",
        poison: bool = False,
    ) -> Self:
        """Make an arena of one GPU's memory, in its primary context (the one that PyTorch uses).

        Raises:
            DeviceError: no driver, no such device, or one without virtual memory management.

        """
        driver = _C.cuda_driver(device)
        return cls(driver, chunk_classes=chunk_classes, budget_bytes=budget_bytes, mappings=mappings, poison=poison)

    @property
    def device(self) -> int:
        """CUDA ordinal, or -1 for the host."""
        return self._core.driver.device

    @property
    def driver(self) -> _C.MemoryDriver:
        """The mechanism below, for importing other processes' memory."""
        return self._core.driver

    @property
    def core(self) -> _C.ArenaCore:
        """The books in C++, for the other modules of this package."""
        return self._core

    # ---- the life of a region ----

    def reserve(self, name: str, num_bytes: int, *, group: str | None = None) -> ArenaRegion:
        """Reserve addresses for ``num_bytes`` (rounded up to the smallest chunk class); no memory yet: RESERVED.

        Args:
            name: unique in the arena.
            num_bytes: above 0.
            group: regions that change hands together; the region's own name by default.

        Raises:
            ValueError: the name is taken or the size is not positive.
            DeviceError, OutOfMemory: no address space of that size is left.

        """
        if num_bytes <= 0:
            raise ValueError(f"region {name!r}: expected a size above 0, got {num_bytes} bytes")
        return ArenaRegion(self._core, self._core.reserve(name, num_bytes, name if group is None else group))

    def allocate(self, name: str, num_bytes: int, *, group: str | None = None) -> ArenaRegion:
        """Reserve a region and back it: BACKED. Raises as ``reserve`` and ``back`` do, and then leaves no region."""
        region = self.reserve(name, num_bytes, group=group)
        try:
            self.back(region)
        except BaseException:
            self.free(region)
            raise
        return region

    def back(self, regions: RegionChoice) -> HandoverReport:
        """Give memory to regions that have none; all or none. Contents are undefined."""
        return self.handover((), regions)

    def release(self, regions: RegionChoice) -> HandoverReport:
        """Take the memory of BACKED regions back into the arena; all or none. Their contents are gone."""
        return self.handover(regions, ())

    def handover(self, from_: RegionChoice, to: RegionChoice) -> HandoverReport:
        """Release the regions ``from_`` and back the regions ``to`` with their chunks, in one step.

        Chunks are created only where the free ones don't suffice, and broken into smaller ones only where the budget or
        the device leaves no other way; neither happens once the same hand-overs repeat.

        Raises:
            StateError: a region of ``from_`` is not BACKED or is shared with another process; one of ``to`` is BACKED.
            OutOfMemory: a budget or the device is too small.
            DeviceError: a driver call failed; its name and the driver's name of the error are in the message.

        After any of these the arena is as it was: states, addresses, budgets, and the contents of ``from_``. One case
        is different and named in the message: a region whose chunk had been broken up by then, or that could not be
        mapped again, ends RELEASED.

        """
        report = self._core.transition(self._ids(from_), self._ids(to))
        return HandoverReport(
            released_bytes=report.released_bytes,
            backed_bytes=report.backed_bytes,
            num_creates=report.num_creates,
            num_destroys=report.num_destroys,
            num_maps=report.num_maps,
            num_unmaps=report.num_unmaps,
            elapsed_us=report.elapsed_us,
            synchronize_us=report.synchronize_us,
            create_us=report.create_us,
            map_us=report.map_us,
            allow_us=report.allow_us,
            unmap_us=report.unmap_us,
        )

    def free(self, regions: RegionChoice) -> None:
        """Give up the addresses of regions; their memory stays with the arena.

        Raises:
            StateError: one of them has views or shares left; then none is freed.

        """
        self._core.free(self._ids(regions))

    # ---- budgets and accounts ----

    def set_budget(self, group: str, num_bytes: int) -> None:
        """Limit the memory that the regions of ``group`` hold together from now on; what they hold already stays."""
        self._core.set_group_budget(group, num_bytes)

    def trim(self, *, keep_free_bytes: int = 0) -> int:
        """Destroy free chunks down to ``keep_free_bytes`` and return how many bytes the device got back.

        The next create of a GPU's memory pays for it (the driver scrubs), so this is for leaving room to others.
        """
        return self._core.trim(keep_free_bytes)

    @property
    def stats(self) -> ArenaStats:
        """The account of bytes and driver calls."""
        counters = self._core.counters()
        return ArenaStats(
            created_bytes=counters.created_bytes,
            free_bytes=counters.free_bytes,
            backed_bytes=counters.backed_bytes,
            reserved_bytes=counters.reserved_bytes,
            peak_created_bytes=counters.peak_created_bytes,
            num_chunks=counters.num_chunks,
            num_regions=counters.num_regions,
            num_creates=counters.num_creates,
            num_destroys=counters.num_destroys,
            num_maps=counters.num_maps,
            num_unmaps=counters.num_unmaps,
        )

    @property
    def chunk_sizes(self) -> dict[int, int]:
        """How many chunks of each size in bytes exist, largest first."""
        return dict(self._core.chunk_sizes())

    # ---- finding regions ----

    def regions(self, group: str | None = None) -> tuple[ArenaRegion, ...]:
        """All regions, or those of one group, in the order of their making."""
        return tuple(ArenaRegion(self._core, region_id) for region_id in self._core.regions(group))

    def region_at(self, address: int) -> ArenaRegion | None:
        """The region that holds ``address``, if one does."""
        region_id = self._core.region_at(address)
        return None if region_id is None else ArenaRegion(self._core, region_id)

    def _ids(self, choice: RegionChoice) -> list[int]:
        if isinstance(choice, str):
            ids = self._core.regions(choice)
            if not ids:
                known = sorted({region.group for region in self.regions()})
                raise ValueError(f"no region is in group {choice!r}; there are the groups {known}")
            return ids
        chosen = (choice,) if isinstance(choice, ArenaRegion) else tuple(choice)
        for region in chosen:
            if region._core is not self._core:
                raise ValueError(f"{region} belongs to another arena")
        return [region.id for region in chosen]

    # ---- the end ----

    def close(self) -> None:
        """Free all regions and chunks. StateError, and nothing happens, where views or shares are left."""
        self._core.close()

    def __enter__(self) -> Self:
        """Return the arena."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it; after an error only what has no views, so that the error is not hidden."""
        if error is None:
            self.close()
