"""Checks after a transition: a 64-bit checksum per Copy on both sides, and the first element that differs.

Both ranks of a Copy compute the checksum of its box in the destination's dtype and in one order: the source side of
what a copy would write, the destination side of what is there. They swap the sums and compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from reshard.dtype import DType
from reshard.errors import VerifyError
from reshard.pattern import IntArray
from reshard.plan import Address, Copy, Plan
from reshard.table import CopyTable, make_table
from reshard.transports.base import BoundTransfer, Endpoint, Words, rank_copies, source_address
from reshard.transports.kernels import checksums
from reshard.transports.local import copy_entry
from reshard.transports.runner import common_device

if TYPE_CHECKING:
    import torch

ELSEWHERE = 1 << 62
"""Stands for the other rank's memory in a table of which only this rank's side is read."""


class Checks:
    """The checksum tables of one rank: built once, run after any transition."""

    def __init__(self, plan: Plan, rank: int, source: Endpoint, destination: Endpoint) -> None:
        self._rank, self._source, self._destination = rank, source, destination
        copies = [c for c in rank_copies(plan, rank) if not c.region.is_empty]
        device = common_device(source, destination)
        read = [c for c in copies if c.src_rank == rank]
        arrived = [c for c in copies if c.dst_rank == rank]
        places = [(source_address(c, source, destination), ELSEWHERE) for c in read]
        self._read = _Side.of(read, places, device, of_destination=False)
        places = [(ELSEWHERE, destination.base(c.dst)) for c in arrived]
        self._arrived = _Side.of(arrived, places, device, of_destination=True)
        self._between: dict[int, list[tuple[_Side, IntArray]]] = {}
        for peer in sorted({r for c in copies for r in (c.src_rank, c.dst_rank)} - {rank}):
            sides = [(self._read, self._read.rows(rank, peer)), (self._arrived, self._arrived.rows(peer, rank))]
            self._between[peer] = sides if rank < peer else sides[::-1]

    def run(self, bound: BoundTransfer, *, deadline_s: float) -> int:
        """Check every Copy of this rank; returns the bytes of its destination that were checked.

        Raises:
            VerifyError: names the first copy that differs.
            PeerTimeout, TransportError: a rank did not take part.
        """
        sums = {side.of_destination: side.sums() for side in (self._read, self._arrived)}
        mine = {
            peer: np.concatenate([sums[side.of_destination][rows] for side, rows in sides])
            for peer, sides in self._between.items()
        }
        theirs = bound.exchange(mine, deadline_s=deadline_s)
        differing: list[tuple[Copy, int, int]] = []
        for peer, sides in self._between.items():
            owners = [side.copies[owner] for side, rows in sides for owner in side.owners[rows].tolist()]
            differing += _differing_copies(owners, mine[peer], theirs[peer])
        read, arrived = (side.rows(self._rank, self._rank) for side in (self._read, self._arrived))
        owners = [self._read.copies[owner] for owner in self._read.owners[read].tolist()]
        differing += _differing_copies(owners, sums[False][read], sums[True][arrived])
        if differing:
            raise VerifyError(self._describe(differing))
        return sum(c.written_bytes for c in self._arrived.copies)

    def _describe(self, differing: Sequence[tuple[Copy, int, int]]) -> str:
        c, mine, its = differing[0]
        copies = {id(copy) for copy, _, _ in differing}
        counts = f"{len(copies)} of the {len(self._read.copies) + len(self._arrived.copies)} ends on this rank differ"
        if c.is_local:
            sent = box_view(
                (self._source if c.hop == 0 else self._destination).tensors[c.src.storage], c.src, c.region.shape
            )
            found = box_view(self._destination.tensors[c.dst.storage], c.dst, c.region.shape)
            element = _difference(c.region.name, c.region.start, sent.to(found.dtype), found)
            if element is not None:
                return f"{c.region} inside rank {self._rank}: {element}; {counts}"
        sent_sum, found_sum = (mine, its) if c.src_rank == self._rank else (its, mine)
        return (
            f"{c.region} from rank {c.src_rank} to rank {c.dst_rank}: the values that were sent have checksum "
            f"{sent_sum:016x}, those that the destination holds {found_sum:016x}; {counts}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One side of some copies as a table, and which copy each record belongs to."""

    copies: Sequence[Copy]
    table: CopyTable
    owners: IntArray
    device: torch.device | None
    of_destination: bool

    @classmethod
    def of(
        cls,
        copies: Sequence[Copy],
        places: Sequence[tuple[int, int]],
        device: torch.device | None,
        *,
        of_destination: bool,
    ) -> _Side:
        tables = [
            make_table([copy_entry(c, src=src, dst=dst)], check_overlap=False)
            for c, (src, dst) in zip(copies, places, strict=True)
        ]
        owners = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        table = np.concatenate(tables) if tables else make_table([])
        return cls(copies, table, owners, device, of_destination)

    def rows(self, src_rank: int, dst_rank: int) -> IntArray:
        """Records of the copies between two ranks."""
        wanted = np.array([(c.src_rank, c.dst_rank) == (src_rank, dst_rank) for c in self.copies], dtype=bool)
        return np.flatnonzero(wanted[self.owners])

    def sums(self) -> Words:
        """The checksum of each record, computed where the memory is."""
        return checksums(self.table, self.device, of_destination=self.of_destination)


def _differing_copies(owners: Sequence[Copy], mine: Words, its: Words) -> list[tuple[Copy, int, int]]:
    return [(owners[row], int(mine[row]), int(its[row])) for row in np.flatnonzero(mine != its).tolist()]


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of `dtype`."""
    import torch

    found: torch.dtype = torch.__dict__[dtype.value]
    return found


def box_view(tensor: torch.Tensor, address: Address, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of `shape` on the storage of `tensor`, where `address` says; shares memory, copies nothing."""
    import torch

    empty = torch.empty(0, dtype=torch_dtype(address.dtype), device=tensor.device)
    return empty.set_(tensor.untyped_storage(), address.offset_bytes // address.dtype.itemsize, shape, address.strides)


def _differing(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Mask, flat, of elements whose bits differ and that are not both NaN (NaNs have many bit patterns)."""
    import torch

    width = expected.element_size()
    a, b = (t.contiguous().reshape(-1).view(torch.uint8).reshape(-1, width) for t in (expected, found))
    differs = (a != b).any(dim=1)
    if expected.dtype.is_floating_point and bool(differs.any()):
        differs &= ~(expected.float().isnan() & found.float().isnan()).reshape(-1)
    return differs


def _difference(name: str, start: tuple[int, ...], expected: torch.Tensor, found: torch.Tensor) -> str | None:
    import torch

    differs = _differing(expected, found)
    if not bool(differs.any()):
        return None
    first = int(differs.nonzero()[0])
    local = torch.unravel_index(torch.tensor(first), expected.shape)
    index = tuple(int(i) + s for i, s in zip(local, start, strict=True))
    return (
        f"{name}{list(index)}: the destination holds {found.reshape(-1)[first].item()!r}, the source says "
        f"{expected.reshape(-1)[first].item()!r}; {int(differs.sum())} of {differs.numel()} elements differ"
    )
