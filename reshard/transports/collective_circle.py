"""Whom a `collective` transport talks to: a group, the store behind it, and the smaller groups for gathers."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from reshard.errors import PlanError
from reshard.process_groups import ProcessGroups, meeting_store
from reshard.rendezvous import Rendezvous
from reshard.step_record import StepRecord, Store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as StoreOfTorch


@dataclass(frozen=True, slots=True)
class Circle:
    """A group whose rank ``i`` is rank ``i`` of the Plan. Everything in it is borrowed."""

    name: str
    rank: int
    size: int
    handle: dist.ProcessGroup
    backend: str
    store: Store
    record: StepRecord
    groups: ProcessGroups | None

    @classmethod
    def of(cls, group: dist.ProcessGroup | ProcessGroups, store: StoreOfTorch | None) -> Circle:
        """The circle of a plain group, which gathers only as a whole, or of all ranks of ProcessGroups."""
        if isinstance(group, ProcessGroups):
            world = group.world
            return cls(
                world.name, group.rank, group.world_size, world.handle, group.backend, group.store, group.record, group
            )
        name, rank, size = group.group_name, group.rank(), group.size()
        found = meeting_store(store, f"{name}/")
        record = StepRecord(found, rank=rank, ranks=range(size))
        return cls(name, rank, size, group, dist.get_backend(group), found, record, None)

    def check_device(self, device: torch.device) -> None:
        """Raise PlanError where the group's backend can't reach the memory of `device`."""
        wanted = "nccl" if device.type == "cuda" else "gloo"
        if wanted not in self.backend:
            raise PlanError(
                f"tensors on {device} travel by {wanted}, but group {self.name!r} runs {self.backend}: make a group "
                f"with backend={wanted!r} for them"
            )

    def gather_group(self, ranks: Collection[int]) -> dist.ProcessGroup | None:
        """The communicator of exactly these ranks, if there is one that this rank belongs to."""
        if len(ranks) == self.size:
            return self.handle
        found = self.groups.find(tuple(ranks)) if self.groups is not None else None
        return None if found is None else found.handle

    def has_groups(self, sets: Collection[tuple[int, ...]]) -> list[bool]:
        """For each set of ranks, whether there is a communicator of it, here or on the ranks that belong to it."""
        return [self.rank not in ranks or self.gather_group(ranks) is not None for ranks in sets]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What ranks tell each other when they bind a Plan.

    Attributes:
        digest: of the Plan.
        gathers: how gathers travel.
        is_whole: whether this rank has the Plan of all ranks, and so knows every gather.
        has_groups: for each set of ranks that gathers, whether this rank has what it takes.
        staging_bytes: most that this rank spends on staging.
        num_peers: ranks that this one sends to or receives from, whichever are more; gathers included.
    """

    digest: str
    gathers: str
    is_whole: bool
    has_groups: Sequence[bool]
    staging_bytes: int
    num_peers: int


def agree(circle: Circle, terms: Terms, *, timeout_s: float) -> tuple[str, dict[int, Terms]]:
    """Swap terms with every rank of the circle; returns a name that this bind alone has, and all ranks' terms.

    Raises:
        PlanError: Plans differ, or ways of gathering; the message names the ranks.
        PeerTimeout, TransportError: a rank did not come in time or is gone.
    """
    meeting = Rendezvous(circle.store, "bind", ranks=range(circle.size), record=circle.record)
    meeting.arrive("bind", json.dumps(asdict(terms)))
    meeting.wait(timeout_s=timeout_s)
    found = {rank: Terms(**json.loads(text)) for rank, text in meeting.payloads().items()}
    differing = [rank for rank, other in found.items() if other.digest != found[0].digest]
    if differing:
        raise PlanError(
            f"ranks {differing} hold another Plan than rank 0 (digest starts {found[differing[0]].digest[:15]} against "
            f"{found[0].digest[:15]}): make the Plan from the same merged Layouts on every rank"
        )
    odd = [rank for rank, other in found.items() if other.gathers != found[0].gathers]
    if odd:
        raise PlanError(
            f"ranks {odd} were given gathers={found[odd[0]].gathers!r}, rank 0 {found[0].gathers!r}: give every rank "
            "the same"
        )
    return f"transfer {meeting.number}", found


def check_ranks(circle: Circle, rank: int, ranks: Collection[int]) -> None:
    """Raise PlanError where the Plan's `rank` is not this process, or its `ranks` are not all in the circle."""
    if rank != circle.rank:
        raise PlanError(f"rank {rank} of the Plan is bound in the process that is rank {circle.rank} of its group")
    outside = sorted(r for r in ranks if r >= circle.size)
    if outside:
        raise PlanError(f"ranks {outside} of the Plan are outside its group of {circle.size}: make the group larger")


def common_groups(sets: Sequence[tuple[int, ...]], terms: Mapping[int, Terms]) -> frozenset[tuple[int, ...]]:
    """The sets of ranks that every rank can gather in; none unless all have the whole Plan.

    Raises:
        PlanError: ranks that have one whole Plan see other gathers in it.
    """
    if not all(other.is_whole for other in terms.values()):
        return frozenset()
    if any(len(other.has_groups) != len(sets) for other in terms.values()):
        raise PlanError("ranks with one Plan find different gathers in it: run the same version on every rank")
    return frozenset(
        ranks for index, ranks in enumerate(sets) if all(other.has_groups[index] for other in terms.values())
    )
