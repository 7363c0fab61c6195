"""What trainers do today to move weights between ranks: one parameter at a time, or whole buckets.

Every way delivers into the same live destination as the transports do. A way that gathers moves whole tensors to every
rank, as its users' code does, and copies the rank's own boxes out of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bench.multi_gpu_limits import synchronize
from bench.transition import Weights
from reshard.layout import Holding
from reshard.process_groups import Group
from reshard.region import Region
from reshard.verify import box_view, torch_dtype

BUCKET_BYTES = 512 << 20
"""As trainers set it: several hundred MiB, so that few calls are made and little is held twice."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A distinct shard of one tensor: who holds it (the lowest rank of replicas) and where it lies in the tensor."""

    rank: int
    region: Region
    holding: Holding


class Baselines:
    """The ways, bound to one rank's weights.

    Args:
        weights: both sides' live memory.
        group: all ranks, on the weights' device.
        folder: a folder of this run, for host memory that ranks share.

    Attributes:
        held_bytes: memory that a way keeps all the time, by way.
    """

    def __init__(self, weights: Weights, group: Group, folder: Path) -> None:
        self._weights, self._group, self._folder = weights, group, folder
        self._rank, self._device = weights.rank, weights.device
        plan = weights.plan
        self._targets: dict[str, list[Holding]] = {}
        for holding in plan.destination.holdings(weights.rank):
            self._targets.setdefault(holding.region.name, []).append(holding)
        self._pieces = {name: _distinct(plan.source.holders(name)) for name in plan.source.specs}
        self._dtype = torch_dtype(next(iter(plan.destination.specs.values())).dtype)
        self._buckets = list(self._fill_buckets())
        largest = max(self._slot_bytes(names) for names in self._buckets)
        self._flat = torch.empty(largest * len(group.ranks), dtype=torch.uint8, device=self._device)
        self._peers: list[torch.Tensor] = []
        self.held_bytes = {"bucketed all-gather": self._flat.numel(), "flattened buckets over IPC": largest}

    def ways(self) -> dict[str, Callable[[], object]]:
        """Every way that this layout and device allow, by name."""
        found: dict[str, Callable[[], object]] = {
            "broadcast of each parameter": self.broadcast,
            "bucketed all-gather": self.bucketed_all_gather,
        }
        dtensors = self._dtensors()
        if dtensors is not None:
            found["full_tensor of each parameter"] = lambda: self.full_tensor(dtensors)
        self._open_buckets()
        found["flattened buckets over IPC"] = self.ipc_buckets
        return found

    def full_tensor(self, dtensors: dict[str, DTensor]) -> None:
        """Gather each tensor whole on every rank; copy this rank's boxes of it."""
        for name, dtensor in dtensors.items():
            whole = dtensor.full_tensor()
            self._deliver(Region.whole(name, tuple(whole.shape)), whole)
        synchronize(self._device)

    def broadcast(self) -> None:
        """Each owner of a shard broadcasts it in the destination's type; every rank copies what it needs."""
        for pieces in self._pieces.values():
            for piece in pieces:
                tensor = (
                    self._own(piece.holding).to(self._dtype).contiguous()
                    if piece.rank == self._rank
                    else torch.empty(piece.region.shape, dtype=self._dtype, device=self._device)
                )
                dist.broadcast(tensor, group=self._group.handle, group_src=self._group.ranks.index(piece.rank))
                self._deliver(piece.region, tensor)
        synchronize(self._device)

    def bucketed_all_gather(self) -> None:
        """Shards of many tensors, cast, side by side in one buffer; gathered at once; boxes copied out."""
        for names in self._buckets:
            slot = self._slot_bytes(names)
            slots = [self._flat[i * slot : (i + 1) * slot] for i in range(len(self._group.ranks))]
            own = slots[self._group.ranks.index(self._rank)]
            self._pack(names, own)
            whole = self._flat[: slot * len(slots)]
            self._group.handle.allgather_into_tensor_coalesced([whole], [own]).wait()
            self._unpack(names, slots)
        synchronize(self._device)

    def ipc_buckets(self) -> None:
        """Each rank fills a bucket that all others have mapped; they copy their boxes straight out of it."""
        for names in self._buckets:
            self._pack(names, self._peers[self._group.ranks.index(self._rank)])
            synchronize(self._device)
            dist.all_reduce(torch.zeros(1))
            self._unpack(names, self._peers)
            synchronize(self._device)
            dist.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Let go of the buckets; every rank does."""
        self._peers, self._flat = [], torch.empty(0)
        dist.all_reduce(torch.zeros(1))

    def _open_buckets(self) -> None:
        slot = max(self._slot_bytes(names) for names in self._buckets)
        if self._device.type == "cpu":
            paths = [self._folder / f"bucket-{slot}-{rank}" for rank in self._group.ranks]
            files = [torch.from_file(str(path), shared=True, size=slot, dtype=torch.uint8) for path in paths]
            self._peers = files
            return
        from torch.multiprocessing.reductions import reduce_tensor

        own = self._flat[:slot].clone()
        handles: list[Any] = [None] * len(self._group.ranks)
        dist.all_gather_object(handles, reduce_tensor(own))
        self._peers = [
            own if peer == self._rank else rebuild(*args)
            for peer, (rebuild, args) in zip(self._group.ranks, handles, strict=True)
        ]

    def _pack(self, names: Sequence[str], bucket: torch.Tensor) -> None:
        for piece, start, stop in self._places(names, self._rank):
            view = bucket[start:stop].view(self._dtype).view(piece.region.shape)
            view.copy_(self._own(piece.holding))

    def _unpack(self, names: Sequence[str], buckets: Sequence[torch.Tensor]) -> None:
        for rank, bucket in zip(self._group.ranks, buckets, strict=True):
            for piece, start, stop in self._places(names, rank):
                self._deliver(piece.region, bucket[start:stop].view(self._dtype).view(piece.region.shape))

    def _places(self, names: Sequence[str], rank: int) -> Iterator[tuple[Piece, int, int]]:
        at = 0
        for name in names:
            for piece in self._pieces[name]:
                if piece.rank == rank:
                    size = piece.region.numel * self._dtype.itemsize
                    yield piece, at, at + size
                    at += -(-size // 16) * 16

    def _slot_bytes(self, names: Sequence[str]) -> int:
        ends = [max((stop for *_, stop in self._places(names, rank)), default=0) for rank in self._group.ranks]
        return -(-max(ends) // 256) * 256

    def _fill_buckets(self) -> Iterator[list[str]]:
        names: list[str] = []
        filled = 0
        for name, spec in self._weights.plan.source.specs.items():
            size = spec.numel * self._dtype.itemsize
            if names and filled + size > BUCKET_BYTES:
                yield names
                names, filled = [], 0
            names.append(name)
            filled += size
        yield names

    def _dtensors(self) -> dict[str, DTensor] | None:
        """The source as DTensors on one mesh axis; None where a tensor is not whole everywhere or cut once."""
        mesh = DeviceMesh(self._device.type, list(self._group.ranks))
        found: dict[str, DTensor] = {}
        for name, spec in self._weights.plan.source.specs.items():
            holders = [h for h in self._weights.plan.source.holders(name) if not h.region.is_empty]
            cut = {d for h in holders for d in range(len(spec.shape)) if h.region.shape[d] < spec.shape[d]}
            everywhere = not cut and {h.rank for h in holders} == set(self._group.ranks)
            in_order = len(cut) == 1 and [p.rank for p in self._pieces[name]] == list(range(len(holders)))
            if not everywhere and not in_order:
                return None
            own = next((h for h in holders if h.rank == self._rank), None)
            part = self._own(own) if own is not None else torch.empty((0, *spec.shape[1:]), device=self._device)
            strides = torch.empty(spec.shape, device="meta").stride()
            place = Replicate() if everywhere else Shard(cut.pop())
            found[name] = DTensor.from_local(
                part, mesh, [place], run_check=False, shape=torch.Size(spec.shape), stride=strides
            )
        return found

    def _own(self, holding: Holding) -> torch.Tensor:
        return box_view(self._weights.source[holding.address.storage], holding.address, holding.region.shape)

    def _deliver(self, region: Region, tensor: torch.Tensor) -> None:
        """Copy what this rank needs of `region`, whose values `tensor` holds, into the destination."""
        for holding in self._targets.get(region.name, ()):
            common = holding.region.intersect(region)
            if common.is_empty:
                continue
            inner, outer = _within(common, holding.region), _within(common, region)
            storage = self._weights.destination[holding.address.storage]
            box_view(storage, holding.address, holding.region.shape)[inner].copy_(tensor[outer])


def _within(region: Region, outer: Region) -> tuple[slice, ...]:
    corners = zip(region.start, region.stop, outer.start, strict=True)
    return tuple(slice(start - origin, stop - origin) for start, stop, origin in corners)


def _distinct(holders: Sequence[Holding]) -> list[Piece]:
    """Each region once, by its lowest rank, in the order of regions."""
    owners: dict[Region, Holding] = {}
    for holding in sorted(holders, key=lambda h: h.rank):
        if not holding.region.is_empty:
            owners.setdefault(holding.region, holding)
    return [Piece(h.rank, region, h) for region, h in sorted(owners.items(), key=lambda item: item[0].start)]
