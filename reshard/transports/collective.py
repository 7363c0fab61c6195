"""The ``collective`` transport: packed messages over a torch.distributed group (NCCL, gloo), in rounds under a
staging budget.

Each pair of ranks cuts its copies into the same messages on both ends (`reshard.schedule`). A round packs one
message a peer with the copy table (the owner casts, so fewer bytes travel), exchanges them, and unpacks straight
into the destination's tensors. Two sets of buffers alternate: while one is on the wire, the other is packed.
Copies inside the rank never touch the group.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from reshard.errors import PeerTimeout, PlanError, StateError, TransportError
from reshard.parts import Parts
from reshard.plan import Copy, Plan
from reshard.schedule import ALIGNMENT_BYTES, Message, pack_pair
from reshard.table import CopyEntry, make_table
from reshard.transports.base import (
    BoundTransfer,
    Endpoint,
    Words,
    rank_copies,
    refuse_parts_and_graph,
    source_address,
)
from reshard.transports.local import copy_entry, local_tables
from reshard.transports.runner import TableRunner, common_device

NUM_BUFFERS = 2


class CollectiveTransport:
    """Messages over a process group.

    Args:
        group: the torch.distributed group; rank ``i`` of the Plan is rank ``i`` of the group. It is borrowed, not
        destroyed. staging_bytes: budget of all buffers of this rank together.
        num_threads: host threads that pack and unpack host memory.
    """

    name = "collective"

    def __init__(
        self, group: dist.ProcessGroup, *, staging_bytes: int = 64 * 2**20, num_threads: int | None = None
    ) -> None:
        self._group = group
        self._staging_bytes = staging_bytes
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
        """Agree on the Plan with the group, allocate staging, build tables. Collective: every rank of the group
        calls it.

        Raises:
            PlanError: `rank` is not this process's rank in the group, ranks hold different Plans (named), or there
            are several parts, or a graph is asked for: rounds carry all tensors together and wait on the host.
        """
        refuse_parts_and_graph(self.name, parts, graph)
        own = dist.get_rank(self._group)
        if rank != own:
            raise PlanError(f"rank {rank} of the Plan is bound in the process that is rank {own} of its group")
        world_size = dist.get_world_size(self._group)
        outside = sorted(r for r in {*plan.source.ranks, *plan.destination.ranks} if r >= world_size)
        if outside:
            raise PlanError(f"ranks {outside} of the Plan are outside its group of {world_size}: make the group larger")
        device = common_device(source, destination) or torch.device("cpu")
        copies = rank_copies(plan, rank)
        traffic = [c for c in copies if not c.is_local]
        hops = sorted({c.hop for c in copies})
        num_peers, num_hops = self._agree(plan, _num_peers(traffic, rank), 1 + max(hops, default=0), device)
        pair_bytes = self._staging_bytes // (2 * NUM_BUFFERS * max(num_peers, 1)) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        pairs = _messages(traffic, rank, pair_bytes, num_hops)
        buffers = [_Buffers.sized(_every_other(pairs, index), rank, device) for index in range(NUM_BUFFERS)]
        steps: list[_Step] = []
        for hop in range(num_hops):
            inside = [c for c in copies if c.is_local and c.hop == hop]
            tables = local_tables(inside, source, destination)
            rounds = [
                self._round(messages, buffers[index % NUM_BUFFERS], rank, source, destination, device)
                for index, messages in enumerate(pairs[hop])
            ]
            steps.append(_Step([TableRunner(t, device, num_threads=self._num_threads) for t in tables], rounds))
        return _CollectiveTransfer(self._group, rank, device, steps, buffers)

    def _agree(self, plan: Plan, num_peers: int, num_hops: int, device: torch.device) -> tuple[int, int]:
        """Compare digests over the group; return the largest number of peers and of hops that any rank has."""
        own = torch.tensor([int(plan.digest[:15], 16), num_peers, num_hops], dtype=torch.int64, device=device)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, own, group=self._group)
        values = [tuple(map(int, t.tolist())) for t in gathered]
        differing = [i for i, value in enumerate(values) if value[0] != values[0][0]]
        if differing:
            raise PlanError(
                f"ranks {differing} hold another Plan than rank 0 (digest starts {values[differing[0]][0]:015x} "
                f"against "
                f"{values[0][0]:015x}): make the Plan from the same merged Layouts on every rank"
            )
        return max(value[1] for value in values), max(value[2] for value in values)

    def _round(
        self,
        messages: Sequence[Message],
        buffers: _Buffers,
        rank: int,
        source: Endpoint,
        destination: Endpoint,
        device: torch.device,
    ) -> _Round:
        pack: list[CopyEntry] = []
        unpack: list[CopyEntry] = []
        sends: dict[int, int] = {}
        receives: dict[int, int] = {}
        for message in messages:
            outgoing = message.src_rank == rank
            peer = message.dst_rank if outgoing else message.src_rank
            base = buffers.address(outgoing, peer)
            (sends if outgoing else receives)[peer] = message.num_bytes
            for slot in message.slots:
                at = base + slot.offset_bytes
                if outgoing:
                    src = source_address(slot.copy, source, destination)
                    pack.append(copy_entry(slot.copy, src=src, dst=at, dst_packed=True))
                else:
                    unpack.append(copy_entry(slot.copy, src=at, dst=destination.base(slot.copy.dst), src_packed=True))
        runners = [TableRunner(make_table(e), device, num_threads=self._num_threads) for e in (pack, unpack)]
        return _Round(buffers, sends, receives, *runners)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """One set of staging: a buffer a peer and direction, reused by every round of this set."""

    sends: dict[int, torch.Tensor]
    receives: dict[int, torch.Tensor]

    @classmethod
    def sized(cls, messages: Iterable[Message], rank: int, device: torch.device) -> _Buffers:
        sizes: tuple[dict[int, int], dict[int, int]] = ({}, {})
        for m in messages:
            side, peer = (sizes[0], m.dst_rank) if m.src_rank == rank else (sizes[1], m.src_rank)
            side[peer] = max(side.get(peer, 0), m.num_bytes)
        sends, receives = (
            {peer: torch.empty(size, dtype=torch.uint8, device=device) for peer, size in side.items()} for side in sizes
        )
        return cls(sends, receives)

    def address(self, outgoing: bool, peer: int) -> int:
        return (self.sends if outgoing else self.receives)[peer].data_ptr()

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() for side in (self.sends, self.receives) for t in side.values())


@dataclass(frozen=True, slots=True)
class _Round:
    buffers: _Buffers
    sends: dict[int, int]
    receives: dict[int, int]
    pack: TableRunner
    unpack: TableRunner


@dataclass(frozen=True, slots=True)
class _Step:
    """Everything of one hop: copies inside the rank, then rounds."""

    local: list[TableRunner]
    rounds: list[_Round]


class _CollectiveTransfer(BoundTransfer):
    """Rounds with two sets of buffers: round ``i`` is packed while round ``i - 1`` travels."""

    def __init__(
        self, group: dist.ProcessGroup, rank: int, device: torch.device, steps: list[_Step], buffers: list[_Buffers]
    ) -> None:
        self._group, self._rank, self._device = group, rank, device
        self._steps: list[_Step] | None = steps
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._stream: int | None = None
        runners = [r for step in steps for r in (*step.local, *(x for s in step.rounds for x in (s.pack, s.unpack)))]
        self.num_launches = sum(r.num_launches for r in runners)
        self.staging_bytes = sum(b.num_bytes for b in buffers) + sum(r.device_bytes for r in runners)

    def begin(self, *, stream: int | None) -> None:
        """Remember the stream; the exchange itself is in `wait`, where there is a deadline."""
        if self._steps is None:
            raise StateError("this transfer is closed")
        self._stream = stream

    def wait(self, *, deadline_s: float) -> None:
        """Run every hop's rounds; each receive and send must end by the deadline."""
        if self._steps is None:
            raise StateError("this transfer is closed")
        deadline = time.monotonic() + deadline_s
        if self._device.type == "cuda":
            with torch.cuda.device(self._device), _stream(self._stream):
                self._run(self._steps, deadline)
                self._finish(deadline, deadline_s)
        else:
            self._run(self._steps, deadline)

    def exchange(self, words: Mapping[int, Words], *, deadline_s: float) -> dict[int, Words]:
        """Swap words over the group; see `BoundTransfer.exchange`."""
        sends = {peer: torch.from_numpy(w.view(np.int64)).to(self._device) for peer, w in words.items()}
        receives = {peer: torch.empty_like(t) for peer, t in sends.items()}
        operations = [
            dist.P2POp(op, tensor, group=self._group, group_peer=peer)
            for op, side in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in side.items()
        ]
        try:
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait(datetime.timedelta(seconds=deadline_s))
        except RuntimeError as error:
            name = self._group.group_name
            raise TransportError(
                f"rank {self._rank} of group {name!r}: swapping words with ranks {sorted(words)} failed: {error}"
            ) from error
        return {peer: t.cpu().numpy().view(np.uint64) for peer, t in receives.items()}

    def _run(self, steps: list[_Step], deadline: float) -> None:
        for hop, step in enumerate(steps):
            for runner in step.local:
                runner.launch(None)
            flying: tuple[_Round, list[dist.Work]] | None = None
            for index, current in enumerate(step.rounds):
                current.pack.launch(None)
                works = self._exchange(current, hop, index)
                if flying is not None:
                    self._land(*flying, deadline, hop, index - 1)
                flying = (current, works)
            if flying is not None:
                self._land(*flying, deadline, hop, len(step.rounds) - 1)

    def _exchange(self, current: _Round, hop: int, index: int) -> list[dist.Work]:
        operations = [
            dist.P2POp(op, buffers[peer][:size], group=self._group, group_peer=peer)
            for op, buffers, sizes in (
                (dist.isend, current.buffers.sends, current.sends),
                (dist.irecv, current.buffers.receives, current.receives),
            )
            for peer, size in sizes.items()
        ]
        try:
            return list(dist.batch_isend_irecv(operations)) if operations else []
        except RuntimeError as error:
            raise TransportError(self._where(hop, index, f"could not start: {error}")) from error

    def _land(self, current: _Round, works: list[dist.Work], deadline: float, hop: int, index: int) -> None:
        for work in works:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                work.wait(datetime.timedelta(seconds=left))
            except RuntimeError as error:
                peers = f"sending to {sorted(current.sends)}, receiving from {sorted(current.receives)}"
                kind = PeerTimeout if time.monotonic() >= deadline else TransportError
                raise kind(self._where(hop, index, f"failed while {peers}: {error}")) from error
        current.unpack.launch(None)

    def _finish(self, deadline: float, deadline_s: float) -> None:
        assert self._done is not None
        self._done.record()
        while not self._done.query():
            if time.monotonic() > deadline:
                raise PeerTimeout(self._where(0, 0, f"did not finish within {deadline_s} s on {self._device}"))
            time.sleep(0.0002)

    def _where(self, hop: int, index: int, what: str) -> str:
        name = self._group.group_name
        return f"rank {self._rank} of group {name!r}: hop {hop}, round {index} {what}"

    def close(self) -> None:
        """Release staging and tables. The group is the caller's."""
        self._steps = None


def _stream(handle: int | None) -> torch.cuda.StreamContext:
    queue = torch.cuda.ExternalStream(handle) if handle is not None else torch.cuda.current_stream()
    return torch.cuda.stream(queue)


def _num_peers(traffic: Sequence[Copy], rank: int) -> int:
    sends = {c.dst_rank for c in traffic if c.src_rank == rank}
    receives = {c.src_rank for c in traffic if c.dst_rank == rank}
    return max(len(sends), len(receives))


def _messages(traffic: Sequence[Copy], rank: int, pair_bytes: int, num_hops: int) -> list[list[list[Message]]]:
    """By hop and round, the messages that `rank` sends and receives, at most one a peer and direction."""
    pairs: dict[tuple[int, int, int], list[Copy]] = {}
    for c in traffic:
        if rank in (c.src_rank, c.dst_rank):
            pairs.setdefault((c.hop, c.src_rank, c.dst_rank), []).append(c)
    rounds: list[list[list[Message]]] = [[] for _ in range(num_hops)]
    for hop, src, dst in sorted(pairs):
        for index, message in enumerate(pack_pair(pairs[hop, src, dst], budget_bytes=pair_bytes)):
            if index == len(rounds[hop]):
                rounds[hop].append([])
            rounds[hop][index].append(message)
    return rounds


def _every_other(rounds_by_hop: list[list[list[Message]]], offset: int) -> list[Message]:
    return [m for rounds in rounds_by_hop for messages in rounds[offset::NUM_BUFFERS] for m in messages]
