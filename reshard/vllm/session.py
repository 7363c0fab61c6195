"""A weight-transfer session: trainer ranks and engine ranks agree on one Plan and bind it.

Numbers of ranks in the Plan: trainer ranks are 0 to T - 1. Where the engine lives in the trainers' processes, its ranks
are those of the processes; engine ranks in processes of their own are T, T + 1, ... in the order of their coming.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard.arena import Arena
from reshard.errors import PlanError, TransportError
from reshard.joint_group import leave_group
from reshard.layout import Layout, TensorSpec
from reshard.layout_merge import layout_from_bytes, layout_to_bytes, merge_layouts
from reshard.names import is_dispensable
from reshard.plan import Plan
from reshard.planner import make_plan
from reshard.resharder import Resharder, State
from reshard.vllm.exchange import Exchange
from reshard.vllm.reach import TransportChoice, reach_all

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """What every process needs to join; JSON-safe, as it travels through the engine's own control plane.

    Attributes:
        host, port: where the store is that the first trainer rank serves.
        session: a name that no other session of that store has.
        num_trainers, num_engine_ranks: processes of either side.
        transport: ``peer``, ``collective``, or ``auto``: ``peer`` if all processes are on one host.
        folder: where ranks of the first trainer rank's host meet (socket files); short.
        ignore: source tensors, by names or shell patterns, that the engine need not take.
        timeout_s: seconds that a process waits for the others.
    """

    host: str
    port: int
    session: str
    num_trainers: int
    num_engine_ranks: int
    transport: TransportChoice
    folder: str
    ignore: tuple[str, ...]
    timeout_s: float

    @property
    def size(self) -> int:
        """Processes of both sides."""
        return self.num_trainers + self.num_engine_ranks

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self) | {"ignore": list(self.ignore)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SessionInfo:
        """Inverse of ``to_dict``."""
        return cls(**{**fields, "ignore": tuple(fields["ignore"])})

    def exchange(self) -> Exchange:
        """Reach the store.

        Raises:
            TransportError: nobody answers there.
        """
        timeout = datetime.timedelta(seconds=self.timeout_s)
        try:
            store = dist.TCPStore(self.host, self.port, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        except (RuntimeError, dist.DistError) as error:
            raise TransportError(
                f"the trainer's store at {self.host}:{self.port} can't be reached from this host: pass "
                f"WeightSync.connect(host=...) the address of trainer rank 0 as it is seen from here ({error})"
            ) from error
        return Exchange(store, session=self.session, timeout_s=self.timeout_s)


@dataclass(frozen=True, slots=True)
class Membership:
    """One process's part in a session: the bound Plan, and the group that it travels by, if there is one."""

    resharder: Resharder
    group: dist.ProcessGroup | None

    def close(self) -> None:
        """Release both; weights stay as they are. A group that a failed transition broke is not waited for."""
        is_broken = self.resharder.state is State.STALE
        self.resharder.close()
        if self.group is not None:
            leave_group(self.group, abort=is_broken)


def join_as_trainer(info: SessionInfo, exchange: Exchange, rank: int, tensors: Tensors, own: Layout) -> Membership:
    """Bind trainer rank ``rank``'s live ``tensors``, which lie as ``own`` says, as a source.

    Blocks until every process of the session is there.
    """
    exchange.put(f"source/{rank}", layout_to_bytes(own))
    plan = _agree(info, exchange, rank)
    transport, group = reach_all(
        exchange, rank, info.size, choice=info.transport, folder=Path(info.folder), tensors=tensors, arena=Arena.host
    )
    return Membership(Resharder(plan, tensors, {}, rank=rank, transport=transport), group)


def join_as_engine(
    info: SessionInfo,
    exchange: Exchange,
    *,
    learn: Callable[[Iterable[TensorSpec], int], Layout],
    tensors: Callable[[], Tensors],
    arena: Arena,
) -> Membership:
    """Bind an engine rank's live tensors as a destination.

    Args:
        learn: makes this rank's Layout from the checkpoint's specs and the rank's number in the Plan.
        tensors: the live tensors, asked for after ``learn``.
        arena: where their memory is.
    """
    rank = info.num_trainers + exchange.claim("engine ranks", info.num_engine_ranks)
    source = _sources(info, exchange)
    own = learn(source.specs.values(), rank)
    exchange.put(f"destination/{rank}", layout_to_bytes(own))
    plan = _agree(info, exchange, rank)
    live = tensors()
    transport, group = reach_all(
        exchange, rank, info.size, choice=info.transport, folder=Path(info.folder), tensors=live, arena=lambda: arena
    )
    return Membership(Resharder(plan, {}, live, rank=rank, transport=transport), group)


def plan_between(source: Layout, destination: Layout, *, ignore: Collection[str]) -> Plan:
    """The Plan from a trainer's Layout to an engine's.

    Raises:
        PlanError: the trainer has tensors that the engine does not take and that ``ignore`` does not name.
    """
    unread = [name for name in source.specs if destination.resolve(name) is None]
    added = [name for name in unread if not (is_dispensable(name) or any(fnmatchcase(name, p) for p in ignore))]
    if added:
        raise PlanError(
            f"the trainer's model has {len(added)} tensors that the engine's loader does not take: "
            f"{', '.join(added[:8])}; if they are not meant for generation, name them in ignore="
        )
    return make_plan(source, destination, ignore=unread)


def _sources(info: SessionInfo, exchange: Exchange) -> Layout:
    parts = exchange.all("source", range(info.num_trainers), who="trainer")
    return merge_layouts(layout_from_bytes(part) for part in parts)


def _agree(info: SessionInfo, exchange: Exchange, rank: int) -> Plan:
    """One Plan for all, made by each; the first that differs is named."""
    engine_ranks = range(info.num_trainers, info.num_trainers + info.num_engine_ranks)
    parts = exchange.all("destination", engine_ranks, who="engine")
    destination = merge_layouts(layout_from_bytes(part) for part in parts)
    plan = plan_between(_sources(info, exchange), destination, ignore=info.ignore)
    exchange.put(f"digest/{rank}", plan.digest.encode())
    digests = exchange.all("digest", range(info.size), who="any")
    differing = [other for other, digest in enumerate(digests) if digest.decode() != plan.digest]
    if differing:
        raise PlanError(
            f"ranks {differing} planned otherwise than rank {rank}: all processes need the same version of reshard"
        )
    return plan
