"""Bytes that outlive a hand-over: chosen ranges of an arena's regions, in host memory while the regions are away."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from reshard.arena.arena import Arena
from reshard.errors import StateError

Range = tuple[int, int]
"""Address and size in bytes."""


class KeptBytes:
    """Saves ranges of BACKED regions and writes them back; the host buffer (pinned beside a GPU) is used again."""

    def __init__(self, arena: Arena) -> None:
        """Keep nothing yet."""
        self._arena = arena
        self._ranges: list[Range] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.is_saved = False

    @property
    def num_bytes(self) -> int:
        """Bytes kept now."""
        return sum(size for _, size in self._ranges) if self.is_saved else 0

    def save(self, ranges: Iterable[Range]) -> None:
        """Copy ``ranges`` to the host, waiting for work of the current stream and for the copies.

        Raises:
            StateError: bytes are saved already, or a range is of no BACKED region.
        """
        if self.is_saved:
            raise StateError("bytes of an earlier sleep are saved and not restored yet: restore them first")
        merged = self._merge(ranges)
        num_bytes = sum(size for _, size in merged)
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._arena.device >= 0)
        offset = 0
        for live in self._views(merged):
            self._buffer[offset : offset + live.numel()].copy_(live, non_blocking=True)
            offset += live.numel()
        self._wait()
        self._ranges, self.is_saved = merged, True

    def restore(self) -> None:
        """Write the bytes back where they were; nothing where nothing is saved. StateError where that has no memory."""
        if not self.is_saved:
            return
        offset = 0
        for live in self._views(self._ranges):
            live.copy_(self._buffer[offset : offset + live.numel()], non_blocking=True)
            offset += live.numel()
        self._wait()
        self.is_saved = False

    def forget(self) -> None:
        """Drop what was saved: the regions did not give their memory up after all."""
        self.is_saved = False

    def _views(self, ranges: Iterable[Range]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        whole: dict[int, torch.Tensor] = {}
        for address, size in ranges:
            region = self._arena.region_at(address)
            if region is None or address + size > region.address + region.num_bytes:
                raise StateError(f"{size} bytes at {address:#x} lie in no region of the arena")
            if region.id not in whole:
                whole[region.id] = region.tensor()
            begin = address - region.address
            found.append(whole[region.id][begin : begin + size])
        return found

    def _merge(self, ranges: Iterable[Range]) -> list[Range]:
        """The ranges in order, touching ones as one; regions may touch as well, and then they stay apart."""
        merged: list[Range] = []
        starts = {region.address for region in self._arena.regions()}
        for address, size in sorted(ranges):
            if merged and merged[-1][0] + merged[-1][1] == address and address not in starts:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            elif size > 0:
                merged.append((address, size))
        return merged

    def _wait(self) -> None:
        if self._arena.device >= 0:
            torch.cuda.current_stream(self._arena.device).synchronize()
