"""A weight-transfer session: trainer ranks and engine ranks agree on one Plan and bind it.

Numbers of ranks in the Plan: trainer ranks are 0 to T - 1. Where the engine lives in the trainers' processes, its ranks
are those of the processes; engine ranks in processes of their own are T, T + 1, ... in the order of their coming.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard.arena import Arena
from reshard.errors import PlanError
from reshard.layout import Layout, TensorSpec
from reshard.layout_merge import layout_from_bytes, layout_to_bytes, merge_layouts
from reshard.names import is_dispensable
from reshard.plan import Plan
from reshard.planner import make_plan
from reshard.resharder import Resharder
from reshard.transports.peer import PeerTransport
from reshard.vllm.exchange import Exchange

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """What every process needs to join; JSON-safe, as it travels through the engine's own control plane.

    Attributes:
        host, port: where the store is that the first trainer rank serves.
        session: a name that no other session of that store has.
        num_trainers, num_engine_ranks: processes of either side.
        folder: where ranks of this host meet (socket files); short.
        ignore: source tensors, by names or shell patterns, that the engine need not take.
        timeout_s: seconds that a process waits for the others.
    """

    host: str
    port: int
    session: str
    num_trainers: int
    num_engine_ranks: int
    folder: str
    ignore: tuple[str, ...]
    timeout_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self) | {"ignore": list(self.ignore)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SessionInfo:
        """Inverse of ``to_dict``."""
        return cls(**{**fields, "ignore": tuple(fields["ignore"])})

    def exchange(self, *, serve: bool = False) -> Exchange:
        """Reach the store; ``serve`` it where this process is the one that ``port`` is of."""
        store = dist.TCPStore(self.host, self.port, is_master=serve, wait_for_workers=False)  # type: ignore[attr-defined]
        return Exchange(store, session=self.session, timeout_s=self.timeout_s)


def join_as_trainer(info: SessionInfo, exchange: Exchange, rank: int, tensors: Tensors, own: Layout) -> Resharder:
    """Bind trainer rank ``rank``'s live ``tensors``, which lie as ``own`` says, as a source.

    Blocks until every process of the session is there.
    """
    exchange.put(f"source/{rank}", layout_to_bytes(own))
    plan = _agree(info, exchange, rank)
    transport = PeerTransport(Arena.host(), Path(info.folder), timeout_s=info.timeout_s)
    return Resharder(plan, tensors, {}, rank=rank, transport=transport)


def join_as_engine(
    info: SessionInfo,
    exchange: Exchange,
    *,
    learn: Callable[[Iterable[TensorSpec], int], Layout],
    tensors: Callable[[], Tensors],
    arena: Arena,
) -> Resharder:
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
    transport = PeerTransport(arena, Path(info.folder), timeout_s=info.timeout_s)
    return Resharder(plan, {}, tensors(), rank=rank, transport=transport)


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
    digests = exchange.all("digest", range(info.num_trainers + info.num_engine_ranks), who="any")
    differing = [other for other, digest in enumerate(digests) if digest.decode() != plan.digest]
    if differing:
        raise PlanError(
            f"ranks {differing} planned otherwise than rank {rank}: all processes need the same version of reshard"
        )
    return plan
