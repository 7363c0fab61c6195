"""The ``collective`` transport: a torch.distributed group (NCCL, gloo) carries gathers and packed messages.

A regular all-gather of the Plan (a transition inside a micro data-parallel group is nothing else) runs as one,
in place in the destination where its memory allows (`reshard.transports.collective_drafts` has the ways). All other
copies are cut into the same messages on both ends of a pair of ranks (`reshard.schedule`) and travel in rounds: a round
is packed by the copy table (the owner casts, so fewer bytes travel), exchanged, and unpacked straight into the
destination's tensors. Two sets of buffers under a budget alternate: while one is on the wire, the other is packed.
Copies inside the rank never touch the group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from reshard.arena import ArenaRegion
from reshard.errors import PlanError
from reshard.parts import Parts
from reshard.plan import Copies, Copy, Plan
from reshard.plan_gather import Gather, find_gathers
from reshard.process_groups import ProcessGroups
from reshard.rendezvous import Rendezvous
from reshard.schedule import ALIGNMENT_BYTES
from reshard.transports.base import Endpoint, rank_copies, refuse_parts_and_graph
from reshard.transports.collective_circle import Circle, Terms, agree, check_ranks, common_groups
from reshard.transports.collective_drafts import (
    NUM_BUFFERS,
    Draft,
    GatherMode,
    Way,
    choose_way,
    exchange_drafts,
    num_peers,
    own_rows,
    staged_drafts,
)
from reshard.transports.collective_rounds import BUFFER_ALIGNMENT_BYTES, Round, RoundBuilder, Staging
from reshard.transports.collective_transfer import CollectiveTransfer
from reshard.transports.local import is_in_place
from reshard.transports.runner import common_device

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as StoreOfTorch

DEFAULT_STAGING_BYTES = 64 * 2**20
MIN_STAGING_BYTES = 4096


class CollectiveTransport:
    """Gathers and messages over process groups.

    Args:
        group: whose rank ``i`` is rank ``i`` of the Plan: ProcessGroups (then all ranks of the world, and gathers among
            any ranks that have a group there), or one torch.distributed group (then gathers of all its ranks only).
            Borrowed.
        staging_bytes: budget of all buffers of this rank together; the smallest of all ranks' counts.
        staging: an arena's region to take them from instead of allocating: BACKED and used by nobody else while a
            transition runs, for example the KV cache's.
        num_threads: host threads that pack and unpack host memory.
        gathers: how regular gathers travel; the same on every rank.
        timeout_s: how long `bind` waits for the other ranks.
        store: where ranks meet before each transition; the default group's where left out.
    """

    name = "collective"

    def __init__(
        self,
        group: dist.ProcessGroup | ProcessGroups,
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        staging: ArenaRegion | None = None,
        num_threads: int | None = None,
        gathers: GatherMode = "auto",
        timeout_s: float = 60.0,
        store: StoreOfTorch | None = None,
    ) -> None:
        self._circle = Circle.of(group, store)
        self._staging = staging
        self._staging_bytes = staging_bytes if staging is None else min(staging_bytes, staging.num_bytes)
        if self._staging_bytes < MIN_STAGING_BYTES:
            raise PlanError(f"a staging budget of {self._staging_bytes} bytes is too small: give {MIN_STAGING_BYTES}")
        self._num_threads, self._timeout_s = num_threads, timeout_s
        self._mode: GatherMode = gathers
        if gathers == "auto":
            self._mode = "all_gather" if "nccl" in self._circle.backend else "messages"

    def bind(
        self,
        plan: Plan,
        *,
        rank: int,
        source: Endpoint,
        destination: Endpoint,
        parts: Parts | None = None,
        graph: bool | None = None,
    ) -> CollectiveTransfer:
        """Agree on the Plan with the group, allocate staging, build tables. Collective: every rank of the group calls
        it.

        Raises:
            PlanError: `rank` is not this process's rank in the group, ranks hold different Plans (named), the group's
                backend can't reach the tensors' memory, there are several parts, or a graph is asked for.
            PeerTimeout, TransportError: a rank did not come in time or is gone.
        """
        refuse_parts_and_graph(self.name, parts, graph)
        circle = self._circle
        check_ranks(circle, rank, {*plan.source.ranks, *plan.destination.ranks})
        device = common_device(source, destination) or self._idle_device()
        circle.check_device(device)
        copies = rank_copies(plan, rank)
        gathers = find_gathers(plan) if self._mode != "off" and plan.inputs.ranks is None else ()
        sets = sorted({tuple(sorted(gather.ranks)) for gather in gathers})
        name, terms = agree(circle, self._terms(plan, copies, sets, rank), timeout_s=self._timeout_s)
        work = _Work(plan, rank, copies, gathers, self._mode, common_groups(sets, terms))
        set_bytes = min(t.staging_bytes for t in terms.values()) // NUM_BUFFERS
        set_bytes -= set_bytes % BUFFER_ALIGNMENT_BYTES
        pair_bytes = set_bytes // (2 * max(1, *(t.num_peers for t in terms.values())))
        drafts = [
            *staged_drafts(work.by_members(Way.STAGED), rank, set_bytes=set_bytes),
            *exchange_drafts(work.traffic, rank, pair_bytes=pair_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES),
        ]
        staging = Staging(drafts, self._staging, device)
        builder = RoundBuilder(circle, source, destination, device=device, num_threads=self._num_threads)
        transfer = CollectiveTransfer(
            circle,
            device,
            meeting=Rendezvous(circle.store, name, ranks=range(circle.size), record=circle.record),
            rounds=self._rounds(builder, work, drafts, staging),
            staging=staging,
            num_parts=1 if parts is None else parts.num,
            num_gathers={way.value: len(work.gathers[way]) for way in Way},
            in_place=frozenset(i for i, c in enumerate(copies) if c.is_local and is_in_place(c, source, destination)),
        )
        transfer.warm_up(timeout_s=self._timeout_s)
        return transfer

    def _terms(self, plan: Plan, copies: Sequence[Copy], sets: Sequence[tuple[int, ...]], rank: int) -> Terms:
        by_messages = self._mode == "messages"
        return Terms(
            digest=plan.digest,
            gathers=self._mode,
            is_whole=plan.inputs.ranks is None,
            has_groups=[by_messages or found for found in self._circle.has_groups(sets)],
            staging_bytes=self._staging_bytes,
            num_peers=num_peers([c for c in copies if not c.is_local], rank),
        )

    def _rounds(self, builder: RoundBuilder, work: _Work, drafts: Sequence[Draft], staging: Staging) -> list[Round]:
        """Every round in order of hops; a hop's copies inside the rank run while its first round is on the wire."""
        rounds = [
            *builder.in_place(work.by_members(Way.IN_PLACE), direct=False),
            *builder.in_place(work.by_members(Way.DIRECT), direct=True),
        ]
        for index, draft in enumerate(drafts):
            by_collective = bool(draft.gather) and self._mode == "all_gather"
            handle = self._circle.gather_group(draft.gather) if by_collective else None
            rounds.append(builder.staged(draft, staging.buffer(index, draft), gather=handle))
        for hop, copies in work.local.items():
            table = builder.local(copies)
            first = next((i for i, r in enumerate(rounds) if r.hop == hop), None)
            if first is None:
                rounds.append(builder.only_local(hop, table))
            else:
                rounds[first] = replace(rounds[first], meanwhile=table)
        return sorted(rounds, key=lambda r: r.hop)

    def _idle_device(self) -> torch.device:
        """Where a rank without tensors takes part."""
        on_gpu = "nccl" in self._circle.backend and "gloo" not in self._circle.backend
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class _Work:
    """One rank's copies, sorted by how they travel.

    Attributes:
        gathers: those that the rank takes part in, by way.
        traffic: copies between ranks that are in no gather.
        local: copies inside the rank by hop, without the own parts of gathers in the destination, which come first.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        copies: Sequence[Copy],
        gathers: Sequence[Gather],
        mode: GatherMode,
        groups: Collection[tuple[int, ...]],
    ) -> None:
        self._plan, self._rank = plan, rank
        self.gathers: dict[Way, list[Gather]] = {way: [] for way in Way}
        for gather in gathers:
            way = choose_way(gather, mode, groups) if rank in gather.ranks else None
            if way is not None:
                self.gathers[way].append(gather)
        gathered = {row for found in self.gathers.values() for gather in found for row in gather.rows}
        staged = {row for gather in self.gathers[Way.STAGED] for row in gather.rows}
        rows = copies.rows.tolist() if isinstance(copies, Copies) else range(len(copies))
        self.traffic: list[Copy] = []
        self.local: dict[int, list[Copy]] = {}
        for row, copy in zip(rows, copies, strict=True):
            if copy.is_local and (row in staged or row not in gathered):
                self.local.setdefault(copy.hop, []).append(copy)
            elif not copy.is_local and row not in gathered:
                self.traffic.append(copy)

    def by_members(self, way: Way) -> dict[tuple[int, ...], list[dict[tuple[int, int], Copy]]]:
        """The rank's copies of each gather that travels in `way`, by members in ascending order."""
        found: dict[tuple[int, ...], list[dict[tuple[int, int], Copy]]] = {}
        for gather in self.gathers[way]:
            members = tuple(sorted(gather.ranks))
            found.setdefault(members, []).append(own_rows(self._plan, gather, self._rank))
        return found
