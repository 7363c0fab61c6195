"""Find the regular all-gathers inside a plan, so that a transport can run them as collectives.

An all-gather is regular when a group of ranks wants one region, each member holds one part of it, all parts are of
one size, and every member receives all the others. A transition from training shards to generation shards inside a
micro-data-parallel group is nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard.copy_table import ITEMSIZES, CopyTable
from reshard.groups import Communicator
from reshard.pattern import IntArray
from reshard.plan import Plan


@dataclass(frozen=True, slots=True)
class Gather:
    """One regular all-gather.

    ``ranks`` are in the order of their parts. ``rows`` are the rows of the plan's table that it replaces, the
    members' own local copies included. ``part_bytes`` is what each member contributes, in the wire type.
    ``in_place``: every member's destination is one dense run of the parts in that order, in the wire type, so
    ``all_gather_into_tensor`` can write it. ``same_shape``: so are the parts' shapes, not only their sizes.
    """

    name: str
    ranks: tuple[int, ...]
    part_bytes: int
    in_place: bool
    same_shape: bool
    rows: tuple[int, ...]

    @property
    def is_ascending(self) -> bool:
        """Whether the parts lie in the order of their ranks, which is the order of a process group's members."""
        return self.ranks == tuple(sorted(self.ranks))


def gather_communicators(plan: Plan) -> tuple[Communicator, ...]:
    """A group for every set of ranks that gathers among itself: what a `collective` transport can use."""
    ranks = sorted({tuple(sorted(gather.ranks)) for gather in find_gathers(plan)})
    return tuple(Communicator(f"gather[{','.join(map(str, members))}]", members) for members in ranks)


def find_gathers(plan: Plan) -> tuple[Gather, ...]:
    """All regular all-gathers, by tensor name, then ranks; of a plan for some ranks, those whose members it covers."""
    table = plan.table
    groups: dict[tuple[int, bytes], list[IntArray]] = {}
    for rows in _arrivals(table):
        groups.setdefault((int(table.name_idx[rows[0]]), _signature(table, rows)), []).append(rows)
    found = (_gather(table, members) for members in groups.values() if len(members) > 1)
    return tuple(sorted((g for g in found if g is not None), key=lambda gather: (gather.name, gather.ranks)))


def _arrivals(table: CopyTable) -> Iterator[IntArray]:
    """Rows of one tensor and destination rank, by box, for every pair of those."""
    keys: list[npt.NDArray[np.signedinteger]] = [table.start[:, dim] for dim in reversed(range(table.start.shape[1]))]
    order = np.lexsort([*keys, table.dst_rank, table.name_idx])
    if not len(order):
        return
    name, rank = table.name_idx[order], table.dst_rank[order]
    heads = np.flatnonzero((np.diff(name) != 0) | (np.diff(rank) != 0)) + 1
    yield from np.split(order, heads)


def _signature(table: CopyTable, rows: IntArray) -> bytes:
    return table.src_rank[rows].tobytes() + table.start[rows].tobytes() + table.stop[rows].tobytes()


def _gather(table: CopyTable, members: list[IntArray]) -> Gather | None:
    """The gather that these arrivals, which are alike, make up; None when it is not a regular one."""
    rows = np.stack(members)
    sources = table.src_rank[rows[0]]
    wanting = table.dst_rank[rows[:, 0]]
    numel = (table.stop[rows[0]] - table.start[rows[0]]).clip(min=1).prod(axis=1)
    regular = (
        len(sources) == len(members)
        and np.array_equal(np.sort(sources), np.sort(wanting))
        and len(np.unique(sources)) == len(sources)
        and len(np.unique(numel)) == 1
        and not table.hop[rows].any()
        and len(np.unique(table.wire_dtype[rows])) == 1
    )
    if not regular:
        return None
    part_bytes = int(numel[0] * ITEMSIZES[table.wire_dtype[rows[0, 0]]])
    shapes = table.stop[rows[0]] - table.start[rows[0]]
    return Gather(
        name=table.names[table.name_idx[rows[0, 0]]],
        ranks=tuple(sources.tolist()),
        part_bytes=part_bytes,
        in_place=_is_in_place(table, rows, part_bytes),
        same_shape=bool((shapes == shapes[0]).all()),
        rows=tuple(sorted(rows.reshape(-1).tolist())),
    )


def _is_in_place(table: CopyTable, rows: IntArray, part_bytes: int) -> bool:
    offsets, storages = table.dst_offset[rows], table.dst_storage[rows]
    in_line = (np.diff(offsets, axis=1) == part_bytes).all() and (storages == storages[:, :1]).all()
    flat = rows.reshape(-1)
    same_type = (table.dst_dtype[flat] == table.wire_dtype[flat]).all()
    return bool(in_line and same_type and all(_is_dense(table, row) for row in flat.tolist()))


def _is_dense(table: CopyTable, row: int) -> bool:
    ndim = int(table.ndim[row])
    extents = (table.stop[row, :ndim] - table.start[row, :ndim]).tolist()
    step = 1
    for extent, stride in zip(reversed(extents), reversed(table.dst_strides[row, :ndim].tolist()), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True
