"""The ``local`` transport: both sides live in this process, on one device.

Bytes that are in place already (aliases) are not touched. Everything else is a table of strided copies for each part
and hop, cast at the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.errors import PlanError, StateError
from reshard.parts import Parts
from reshard.plan import Copy, Plan
from reshard.schedule import wire_dtype
from reshard.table import CopyEntry, make_table
from reshard.transports.base import BoundTransfer, Endpoint, rank_copies, source_address
from reshard.transports.runner import Launches, common_device

if TYPE_CHECKING:
    import numpy as np


class LocalTransport:
    """Copies inside one process.

    Args:
        num_threads: host threads for host memory; all cores where left out. A device ignores it.
    """

    name = "local"

    def __init__(self, *, num_threads: int | None = None) -> None:
        self._num_threads = num_threads

    def bind(
        self,
        plan: Plan,
        *,
        rank: int,
        source: Endpoint,
        destination: Endpoint,
        parts: Parts | None = None,
        graph: bool | None = None,
    ) -> BoundTransfer:
        """Build the copy tables of `rank`.

        Raises:
            PlanError: a copy crosses ranks, the two sides live on different devices, or `graph` on the host.
        """
        copies = rank_copies(plan, rank)
        crossing = [c for c in copies if not c.is_local]
        if crossing:
            c = crossing[0]
            raise PlanError(
                f"the local transport serves one process, but {len(crossing)} copies cross ranks, first "
                f"{c.region.name!r} from "
                f"rank {c.src_rank} to rank {c.dst_rank}; pass transport= one that crosses processes"
            )
        device = common_device(source, destination)
        by_part: list[list[Copy]] = [[] for _ in range(parts.num if parts is not None else 1)]
        number = parts.numbers() if parts is not None else {}
        in_place: list[int] = []
        for position, copy in enumerate(copies):
            if is_in_place(copy, source, destination):
                in_place.append(position)
            else:
                by_part[number.get(copy.region.name, 0)].append(copy)
        launches = [
            Launches(local_tables(part, source, destination), device, num_threads=self._num_threads, graph=graph)
            for part in by_part
        ]
        return _LocalTransfer(launches, frozenset(in_place))


def local_tables(copies: Sequence[Copy], source: Endpoint, destination: Endpoint) -> list[np.ndarray]:
    """One copy table a hop, in order, of copies whose both ends are on this rank.

    Aliases, and copies of bytes onto themselves, are left out.
    """
    by_hop: dict[int, list[CopyEntry]] = {}
    for c in copies:
        if is_in_place(c, source, destination):
            continue
        src, dst = source_address(c, source, destination), destination.base(c.dst)
        by_hop.setdefault(c.hop, []).append(copy_entry(c, src=src, dst=dst))
    return [make_table(by_hop[hop]) for hop in sorted(by_hop)]


def is_in_place(copy: Copy, source: Endpoint, destination: Endpoint) -> bool:
    """Whether a copy inside the rank has nothing to do: an alias, or bytes onto themselves."""
    if not copy.is_local or copy.is_alias:
        return copy.is_alias
    return is_same_place(copy, src=source_address(copy, source, destination), dst=destination.base(copy.dst))


def is_same_place(copy: Copy, *, src: int, dst: int) -> bool:
    """Whether the box at `src` is the box at `dst`, element by element and with the same bits."""
    if src != dst or copy.is_cast:
        return False
    sides = zip(copy.region.shape, copy.src.strides, copy.dst.strides, strict=True)
    return all(extent == 1 or a == b for extent, a, b in sides)


def copy_entry(
    copy: Copy,
    *,
    src: int,
    dst: int,
    src_packed: bool = False,
    dst_packed: bool = False,
) -> CopyEntry:
    """The table entry of `copy` between two absolute addresses.

    A packed end is a box in a message: dense in C order, of the copy's wire dtype.
    """
    shape = copy.region.shape
    packed, wire = _dense_strides(shape), wire_dtype(copy)
    return CopyEntry(
        src=src,
        dst=dst,
        shape=shape,
        src_strides=packed if src_packed else copy.src.strides,
        dst_strides=packed if dst_packed else copy.dst.strides,
        src_dtype=wire if src_packed else copy.src.dtype,
        dst_dtype=wire if dst_packed else copy.dst.dtype,
        label=copy.region.name,
    )


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


class _LocalTransfer(BoundTransfer):
    """Launches for each part; on the host the copies happen in `push`, on a device `push` queues them."""

    def __init__(self, parts: list[Launches], in_place: frozenset[int]) -> None:
        self._parts = parts
        self._pushed: set[int] = set()
        self.in_place = in_place
        self.num_launches = sum(part.num_launches for part in parts)
        self.staging_bytes = sum(part.device_bytes for part in parts)

    def begin(self, *, stream: int | None) -> None:
        """Nothing to open: the destination is this process's own."""
        self._pushed.clear()

    def push(self, part: int, *, stream: int | None) -> None:
        self._pushed.add(part)
        self._parts[part].launch(stream)

    def wait_part(self, part: int, *, deadline_s: float) -> None:
        if part not in self._pushed:
            raise StateError(f"part {part} was not pushed: push({part}) comes first")
        self._parts[part].synchronize(deadline_s, what=f"local copies of part {part}")

    def wait(self, *, deadline_s: float) -> None:
        for part in range(len(self._parts)):
            self.wait_part(part, deadline_s=deadline_s)

    def queue(self, *, stream: int | None) -> None:
        for part in self._parts:
            part.queue(stream)

    def close(self) -> None:
        for part in self._parts:
            part.close()
