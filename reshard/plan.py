"""Plan: the copies that make a destination Layout true, given a source Layout. A frozen value.

Copies live in columns (``CopyTable``), so that a plan of a million copies stays small; ``Copy`` records are views of
them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

import numpy as np

from reshard.certificate import Certificate
from reshard.copy_table import CopyTable
from reshard.dtype import DType
from reshard.errors import PlanError
from reshard.layout import Address, Layout
from reshard.pattern import IntArray
from reshard.region import Region
from reshard.topology import Topology

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Address", "Copies", "Copy", "Plan", "RankPlan"]


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided box from one rank's storage to another's.

    ``src`` is an address in the source Layout of ``src_rank`` when ``hop`` is 0. A copy with ``hop`` 1 or more passes
    on what arrived earlier: ``src`` is then an address in the *destination* Layout of ``src_rank``, written by a copy
    of a smaller ``hop``, so copies run in order of ``hop``. ``is_alias`` says that both addresses are the same bytes:
    nothing to do. ``wire`` is the type in which elements cross between ranks, the smaller of the first source's and the
    destination's; a copy that passes on widened elements can narrow them to it again without loss.
    """

    region: Region
    src_rank: int
    dst_rank: int
    src: Address
    dst: Address
    wire: DType
    hop: int = 0
    is_alias: bool = False

    @property
    def is_local(self) -> bool:
        """Whether both ends are on one rank."""
        return self.src_rank == self.dst_rank

    @property
    def is_cast(self) -> bool:
        """Whether the element type changes."""
        return self.src.dtype is not self.dst.dtype

    @property
    def read_bytes(self) -> int:
        """Bytes read at the source."""
        return self.region.numel * self.src.dtype.itemsize

    @property
    def written_bytes(self) -> int:
        """Bytes written at the destination."""
        return self.region.numel * self.dst.dtype.itemsize

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross from rank to rank, in the wire type; 0 when local."""
        return 0 if self.is_local else self.region.numel * self.wire.itemsize


class Copies(Sequence[Copy]):
    """Some copies of a plan, in plan order, as records made when they are read."""

    __slots__ = ("_rows", "table")

    def __init__(self, table: CopyTable, rows: IntArray) -> None:
        self.table = table
        self._rows = rows

    @property
    def rows(self) -> IntArray:
        """Row numbers in ``table``."""
        return self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Copy: ...
    @overload
    def __getitem__(self, index: slice) -> "Copies": ...
    def __getitem__(self, index: int | slice) -> "Copy | Copies":
        if isinstance(index, slice):
            return Copies(self.table, self._rows[index])
        return _copy(self.table, int(self._rows[index]))

    def __iter__(self) -> Iterator[Copy]:
        return (_copy(self.table, row) for row in self._rows.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Copies({len(self)})"


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part: what it sends to others, receives from others, and copies (or already has) itself."""

    rank: int
    sends: Copies
    receives: Copies
    local: Copies


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlanInputs:
    """What a plan was made from; equal inputs give equal plans."""

    source: Layout
    destination: Layout
    casts: frozenset[tuple[DType, DType]]
    topology: Topology | None
    ignore: tuple[str, ...]
    ranks: tuple[int, ...] | None


class Plan:
    """The copies that make ``inputs.destination`` true, given ``inputs.source``. Made by ``make_plan``; immutable.

    A plan made for some ``ranks`` holds the copies that those send or receive, exactly as the whole plan has them.
    """

    def __init__(self, inputs: PlanInputs, table: CopyTable, certificate: Certificate) -> None:
        self.inputs = inputs
        self.table = table
        self.certificate = certificate

    @property
    def source(self) -> Layout:
        """The Layout that bytes come from."""
        return self.inputs.source

    @property
    def destination(self) -> Layout:
        """The Layout that the copies make true."""
        return self.inputs.destination

    @property
    def scope(self) -> tuple[int, ...]:
        """Ranks whose part this plan holds in full."""
        if self.inputs.ranks is not None:
            return self.inputs.ranks
        return tuple(sorted({*self.source.ranks, *self.destination.ranks}))

    @cached_property
    def copies(self) -> Copies:
        """Every copy: by hop, then destination rank, then tensor."""
        return Copies(self.table, np.arange(self.table.num, dtype=np.int64))

    def copies_of(self, rank: int) -> Copies:
        """The copies that the rank takes part in, as sender or receiver, in plan order."""
        self._check_scope(rank)
        return Copies(self.table, np.flatnonzero((self.table.src_rank == rank) | (self.table.dst_rank == rank)))

    def for_rank(self, rank: int) -> RankPlan:
        """The rank's copies, split by its part in them; PlanError when the plan was made without this rank."""
        self._check_scope(rank)
        from_here, to_here = self.table.src_rank == rank, self.table.dst_rank == rank
        return RankPlan(
            rank,
            sends=Copies(self.table, np.flatnonzero(from_here & ~to_here)),
            receives=Copies(self.table, np.flatnonzero(to_here & ~from_here)),
            local=Copies(self.table, np.flatnonzero(to_here & from_here)),
        )

    def received_bytes(self, rank: int) -> int:
        """Bytes that arrive at the rank from other ranks."""
        self._check_scope(rank)
        return int(self.table.moved_bytes[self.table.dst_rank == rank].sum())

    def sent_bytes(self, rank: int) -> int:
        """Bytes that the rank sends to other ranks."""
        self._check_scope(rank)
        return int(self.table.moved_bytes[self.table.src_rank == rank].sum())

    def _check_scope(self, rank: int) -> None:
        if rank not in self.scope:
            raise PlanError(f"rank {rank} is not in this plan, which covers ranks {_brief(self.scope)}")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the inputs, as hex: equal on every rank that was given equal layouts, whatever its ``ranks``."""
        from reshard.plan_digest import inputs_digest

        return inputs_digest(self.inputs)

    @cached_property
    def content_digest(self) -> str:
        """SHA-256 of the copies themselves."""
        return self.table.digest()

    def inverse(self) -> "Plan":
        """The plan that makes the source Layout true again, given the destination Layout (casts run the other way)."""
        from reshard.planner import invert

        return invert(self)

    def explain(self) -> str:
        """What happens to every tensor and rank, as text: aliased, copied, cast, received, opaque, and the
        certificate.
        """
        from reshard.plan_text import explain

        return explain(self)

    def save(self, path: "str | Path") -> None:
        """Write to a file: JSON when the name ends in ``.json``, else a compact binary form. See ``load``."""
        from reshard.plan_io import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: "str | Path") -> "Plan":
        """Read either form; PlanError when the file is not a plan, is damaged, or is of another version."""
        from reshard.plan_io import load_plan

        return load_plan(path)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self.digest == other.digest and self.content_digest == other.content_digest

    def __hash__(self) -> int:
        return hash((self.digest, self.content_digest))

    def __str__(self) -> str:
        from reshard.plan_text import summarize

        return summarize(self)

    def __repr__(self) -> str:
        return f"Plan({self.table.num} copies, {self.digest[:12]})"


def _copy(table: CopyTable, row: int) -> Copy:
    ndim = int(table.ndim[row])
    start, stop = table.start[row, :ndim].tolist(), table.stop[row, :ndim].tolist()
    return Copy(
        region=Region(table.names[table.name_idx[row]], tuple(start), tuple(stop)),
        src_rank=int(table.src_rank[row]),
        dst_rank=int(table.dst_rank[row]),
        src=_address(
            table.storages,
            table.src_storage[row],
            table.src_offset[row],
            table.src_strides[row, :ndim],
            table.src_dtype[row],
        ),
        dst=_address(
            table.storages,
            table.dst_storage[row],
            table.dst_offset[row],
            table.dst_strides[row, :ndim],
            table.dst_dtype[row],
        ),
        wire=DType.from_code(int(table.wire_dtype[row])),
        hop=int(table.hop[row]),
        is_alias=bool(table.alias[row]),
    )


def _address(storages: Sequence[str], storage: int, offset: int, strides: IntArray, code: int) -> Address:
    return Address(storages[storage], int(offset), tuple(strides.tolist()), DType.from_code(int(code)))


def _brief(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"{ranks[0]}..{ranks[-1]} ({len(ranks)} of them)"
