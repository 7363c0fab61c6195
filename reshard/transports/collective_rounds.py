"""Rounds of the `collective` transport, bound to memory: what is packed, what goes on the wire, what is unpacked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from reshard.arena import ArenaRegion, RegionState
from reshard.errors import PlanError, StateError
from reshard.plan import Copy
from reshard.table import CopyEntry, make_table
from reshard.transports.base import Endpoint, source_address
from reshard.transports.collective_circle import Circle
from reshard.transports.collective_drafts import GATHERS_A_CALL, NUM_BUFFERS, Draft
from reshard.transports.local import copy_entry, is_in_place
from reshard.transports.runner import TableRunner

BUFFER_ALIGNMENT_BYTES = 256


class Wire(Protocol):
    """What one round does with the network."""

    @property
    def handle(self) -> dist.ProcessGroup:
        """The communicator that it uses."""

    @property
    def received_bytes(self) -> int:
        """Bytes that arrive on this rank from others."""

    def post(self) -> list[dist.Work]:
        """Start it; RuntimeError from torch where that fails."""

    def __str__(self) -> str:
        """Who is on the other end."""


class Exchange:
    """Messages to and from other ranks, as one batch."""

    def __init__(
        self,
        handle: dist.ProcessGroup,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        self.handle = handle
        self.received_bytes = sum(t.numel() * t.element_size() for _, t in receives)
        self._sides = tuple(sorted({peer for peer, _ in side}) for side in (sends, receives))
        self.peers = frozenset(peer for side in self._sides for peer in side)
        self._operations = [
            dist.P2POp(op, tensor, group=handle, group_peer=peer)
            for op, side in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in side
        ]

    def post(self) -> list[dist.Work]:
        """See `Wire`."""
        return list(dist.batch_isend_irecv(self._operations))

    def __str__(self) -> str:
        """See `Wire`."""
        return f"sending to ranks {self._sides[0]}, receiving from ranks {self._sides[1]}"


class AllGather:
    """All-gathers among the ranks of one group, in one call; inputs may be parts of the outputs."""

    def __init__(
        self,
        handle: dist.ProcessGroup,
        members: Sequence[int],
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> None:
        self.handle, self._members = handle, tuple(members)
        self._outputs, self._inputs = outputs, inputs
        self.received_bytes = sum(t.numel() for t in outputs) - sum(t.numel() for t in inputs)

    def post(self) -> list[dist.Work]:
        """See `Wire`."""
        return [self.handle.allgather_into_tensor_coalesced(self._outputs, self._inputs)]

    def __str__(self) -> str:
        """See `Wire`."""
        return f"gathering among ranks {list(self._members)}"


@dataclass(frozen=True, slots=True)
class Round:
    """One step of a transition: pack, post, do other local copies meanwhile, and unpack when it has landed."""

    hop: int
    wire: Wire | None
    is_staged: bool
    pack: TableRunner
    meanwhile: TableRunner
    unpack: TableRunner

    @property
    def runners(self) -> tuple[TableRunner, TableRunner, TableRunner]:
        """All its tables."""
        return self.pack, self.meanwhile, self.unpack


class Staging:
    """Memory that rounds pack into: of its own, or borrowed from an arena's region while nobody else uses that.

    Args:
        drafts: every staged round, in order; they use the buffers in turn.
        region: where to borrow from.
        device: where the memory has to be.
    """

    def __init__(self, drafts: Sequence[Draft], region: ArenaRegion | None, device: torch.device) -> None:
        sizes = [_aligned(max((d.num_bytes for d in drafts[k::NUM_BUFFERS]), default=0)) for k in range(NUM_BUFFERS)]
        self._region, needed = region, sum(sizes)
        self._starts = [sum(sizes[:k]) for k in range(NUM_BUFFERS)]
        if region is None:
            self.memory = torch.empty(needed, dtype=torch.uint8, device=device)
        else:
            self._check_place(region, needed, device)
            self.memory = region.tensor(shape=(needed,)) if needed else torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0 if region is not None else needed

    def buffer(self, index: int, draft: Draft) -> torch.Tensor:
        """The bytes of the staged round number `index`."""
        start = self._starts[index % NUM_BUFFERS]
        return self.memory[start : start + draft.num_bytes]

    def check(self) -> None:
        """Raise StateError unless borrowed memory may be used now."""
        if self._region is not None and self._region.state is not RegionState.BACKED:
            raise StateError(
                f"staging is lent by arena region {self._region.name!r}, which is {self._region.state.value}: back it "
                "before the transition starts and keep it idle until it ends, or bind with staging=None"
            )

    def close(self) -> None:
        """Let go of the memory."""
        self.memory = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def _check_place(region: ArenaRegion, needed: int, device: torch.device) -> None:
        if region.device != (-1 if device.type == "cpu" else device.index):
            where = "the host" if region.device < 0 else f"cuda:{region.device}"
            raise PlanError(
                f"staging region {region.name!r} is on {where}, the tensors are on {device}: lend one there"
            )
        if region.num_bytes < needed:
            raise PlanError(
                f"staging region {region.name!r} has {region.num_bytes} bytes, {needed} are needed: lend a larger one"
            )


class RoundBuilder:
    """Makes rounds of one rank's live tensors."""

    def __init__(
        self,
        circle: Circle,
        source: Endpoint,
        destination: Endpoint,
        *,
        device: torch.device,
        num_threads: int | None,
    ) -> None:
        self._circle, self._source, self._destination = circle, source, destination
        self._device, self._num_threads = device, num_threads

    def local(self, copies: Iterable[Copy]) -> TableRunner:
        """Copies inside the rank, without those that are in place."""
        return self._runner(
            copy_entry(c, src=source_address(c, self._source, self._destination), dst=self._destination.base(c.dst))
            for c in copies
            if not is_in_place(c, self._source, self._destination)
        )

    def staged(self, draft: Draft, buffer: torch.Tensor, *, gather: dist.ProcessGroup | None) -> Round:
        """A round through `buffer`; `gather` is the communicator of a staged gather that is a collective."""
        base = buffer.data_ptr()
        pack: list[CopyEntry] = []
        unpack: list[CopyEntry] = []
        for place in draft.places:
            for slot in place.message.slots:
                at = base + place.offset_bytes + slot.offset_bytes
                if place.is_outgoing:
                    src = source_address(slot.copy, self._source, self._destination)
                    pack.append(copy_entry(slot.copy, src=src, dst=at, dst_packed=True))
                else:
                    dst = self._destination.base(slot.copy.dst)
                    unpack.append(copy_entry(slot.copy, src=at, dst=dst, src_packed=True))
        wire = self._gather_wire(draft, buffer, gather) if gather is not None else self._message_wire(draft, buffer)
        return Round(draft.hop, wire, True, self._runner(pack), self._runner(()), self._runner(unpack))

    def in_place(
        self, gathers: Mapping[tuple[int, ...], Sequence[Mapping[tuple[int, int], Copy]]], *, direct: bool
    ) -> list[Round]:
        """Rounds of gathers within the destination, by members; the own parts are put into place by the first one.

        `direct`: as messages between pairs of ranks, else as all-gathers.
        """
        rank = self._circle.rank
        own = self.local(found[rank, rank] for gathers_of in gathers.values() for found in gathers_of)
        wires: list[Wire] = []
        for members in sorted(gathers):
            for start in range(0, len(gathers[members]), GATHERS_A_CALL):
                batch = gathers[members][start : start + GATHERS_A_CALL]
                wires.append(self._direct_wire(members, batch) if direct else self._in_place_wire(members, batch))
        nothing = self._runner(())
        return [Round(0, w, False, own if i == 0 else nothing, nothing, nothing) for i, w in enumerate(wires)]

    def only_local(self, hop: int, copies: TableRunner) -> Round:
        """A hop's copies inside the rank, where it has nothing on the wire."""
        return Round(hop, None, False, copies, self._runner(()), self._runner(()))

    def _runner(self, entries: Iterable[CopyEntry]) -> TableRunner:
        return TableRunner(make_table(entries), self._device, num_threads=self._num_threads)

    def _message_wire(self, draft: Draft, buffer: torch.Tensor) -> Wire:
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        for place in draft.places:
            message = place.message
            view = buffer[place.offset_bytes : place.offset_bytes + message.num_bytes]
            if not place.is_outgoing:
                receives.append((message.src_rank, view))
            elif draft.gather:
                sends += [(peer, view) for peer in draft.gather if peer != message.src_rank]
            else:
                sends.append((message.dst_rank, view))
        return Exchange(self._circle.handle, sends, receives)

    def _gather_wire(self, draft: Draft, buffer: torch.Tensor, handle: dist.ProcessGroup) -> Wire:
        (own,) = (place for place in draft.places if place.is_outgoing)
        part = buffer[own.offset_bytes : own.offset_bytes + own.message.num_bytes]
        return AllGather(handle, draft.gather, [buffer], [part])

    def _in_place_wire(self, members: tuple[int, ...], batch: Sequence[Mapping[tuple[int, int], Copy]]) -> Wire:
        rank, outputs, inputs = self._circle.rank, [], []
        handle = self._circle.gather_group(members)
        assert handle is not None, "ranks agreed on groups that exist"
        for found in batch:
            first, own = found[members[0], rank], found[rank, rank]
            outputs.append(self._bytes(first, num_bytes=own.written_bytes * len(members)))
            inputs.append(self._bytes(own, num_bytes=own.written_bytes))
        return AllGather(handle, members, outputs, inputs)

    def _direct_wire(self, members: tuple[int, ...], batch: Sequence[Mapping[tuple[int, int], Copy]]) -> Wire:
        rank, peers = self._circle.rank, [m for m in members if m != self._circle.rank]
        sends, receives = [], []
        for found in batch:
            own = self._bytes(found[rank, rank], num_bytes=found[rank, rank].written_bytes)
            sends += [(peer, own) for peer in peers]
            arriving = [found[peer, rank] for peer in peers]
            receives += [(c.src_rank, self._bytes(c, num_bytes=c.written_bytes)) for c in arriving]
        return Exchange(self._circle.handle, sends, receives)

    def _bytes(self, copy: Copy, *, num_bytes: int) -> torch.Tensor:
        """Raw bytes of the destination from where `copy` writes."""
        storage = self._destination.tensors[copy.dst.storage].untyped_storage()
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return empty.set_(storage, copy.dst.offset_bytes, (num_bytes,), (1,))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
