"""The Ray backend: every rank a process of a cluster, or of this machine.

A pool is one placement group with a bundle per place, so groups of the pool are colocated on the same bundles. Before
Ray is asked, the demand is compared with the nodes: what can't fit fails in seconds and names the lack, where Ray
would wait for ever. Ranks are numbered so that those of one node follow one another. Rank 0's process holds the store
that the group's processes meet at, on a port that the system chose and that is bound from then on.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch._C._distributed_c10d import TCPStore

from hybrid.errors import ResourceError
from hybrid.log import configure_logging
from hybrid.messages import Call, Failure, Message, Ticket
from hybrid.pool import GroupSpec, Members, ResourcePool
from hybrid.resources import ResourceSpec, check_fit
from hybrid.worker import Worker, WorkerContext, WorkerHost
from reshard.mesh import Mesh


class RayPool(ResourcePool):
    """Places on a Ray cluster, reserved until `close`."""

    def __init__(self, spec: ResourceSpec, *, timeout_s: float) -> None:
        """Connect to a cluster, or start one on this machine, and reserve the places.

        Raises:
            ResourceError: the nodes are too small or too few, or other jobs hold what is needed for `timeout_s`.
        """
        super().__init__(spec)
        self._members: list[RayMembers] = []
        self._owns_cluster = connect_cluster()
        self._group: PlacementGroup | None = None
        try:
            check_fit(spec.bundles, node_resources())
            self._group = self._reserve(timeout_s)
        except ResourceError:
            self.close()
            raise
        self._bundles = _by_node(self._group)

    def _reserve(self, timeout_s: float) -> PlacementGroup:
        demands = [self.spec.worker_demand] * self.spec.num_workers
        group: PlacementGroup = placement_group(demands, strategy="STRICT_PACK" if self.spec.one_node else "PACK")
        if not group.wait(timeout_seconds=timeout_s):
            free: dict[str, float] = ray.available_resources()
            remove_placement_group(group)
            asked = {name: amount * self.spec.num_workers for name, amount in self.spec.worker_demand.items()}
            lacks = ", ".join(f"{name} asked {asked[name]:g}, free {free.get(name, 0.0):g}" for name in asked)
            raise ResourceError(
                f"the cluster is large enough, but its resources were not free within {timeout_s:g} s: {lacks}. "
                "Wait until other jobs release theirs, or ask for less"
            )
        return group

    def launch(self, group: GroupSpec) -> Members:
        """Start one process per place."""
        assert self._group is not None
        running = [members for members in self._members if not members.is_stopped]
        if len(running) >= self.spec.max_groups:
            raise ResourceError(
                f"group {group.name!r} doesn't fit: the pool holds {len(running)} of max_groups={self.spec.max_groups}"
            )
        actors = [self._actor(group, self._group, rank, bundle) for rank, bundle in enumerate(self._bundles)]
        members = RayMembers(group, actors)
        self._members = [*running, members]
        members.meet()
        return members

    def _actor(self, group: GroupSpec, places: PlacementGroup, rank: int, bundle: int) -> Any:
        share = {name: amount / self.spec.max_groups for name, amount in self.spec.worker_demand.items()}
        return (
            ray.remote(_RayHost)
            .options(
                num_cpus=share.get("CPU", 0.0),
                num_gpus=share.get("GPU", 0.0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=bundle),
            )
            .remote(rank, group.mesh, group.generation_mesh)
        )

    def close(self) -> None:
        """End the groups, give the bundles back, and end the cluster if this pool started it."""
        for members in self._members:
            members.stop()
        self._members = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._owns_cluster:
            ray.shutdown()
            self._owns_cluster = False


class RayMembers(Members):
    """Handles of the processes of one group."""

    def __init__(self, group: GroupSpec, actors: Sequence[Any]) -> None:
        """Take the processes' handles; `meet` comes next."""
        self._group = group
        self._actors = list(actors)
        self._refs: dict[Ticket, Any] = {}
        self._methods: dict[Ticket, str] = {}
        self.is_stopped = False

    def meet(self) -> None:
        """Open the store on rank 0 and have the others connect; ResourceError if the processes don't come up."""
        deadline = time.monotonic() + self._group.timeout_s
        try:
            address = ray.get(self._actors[0].open_store.remote(self._group.timeout_s), timeout=self._group.timeout_s)
            others = [actor.join_store.remote(*address, self._group.timeout_s) for actor in self._actors[1:]]
            ray.get(others, timeout=max(0.0, deadline - time.monotonic()))
        except (GetTimeoutError, RayActorError) as error:
            self.stop()
            raise ResourceError(
                f"the processes of group {self._group.name!r} did not start within {self._group.timeout_s:g} s: {error}"
            ) from error

    def construct(self) -> tuple[Ticket, ...]:
        """Have every process make its worker."""
        group = self._group
        return tuple(
            self._keep(Ticket(0, rank), "__init__", actor.construct.remote(group.worker_class, group.settings))
            for rank, actor in enumerate(self._actors)
        )

    def send(self, rank: int, call: Call) -> Ticket:
        """Send the call; it runs after the rank's earlier ones."""
        return self._keep(Ticket(call.call_id, rank), call.method, self._actors[rank].run.remote(call))

    def _keep(self, ticket: Ticket, method: str, ref: Any) -> Ticket:
        self._refs[ticket] = ref
        self._methods[ticket] = method
        return ticket

    def receive(self, tickets: Collection[Ticket], *, timeout_s: float) -> dict[Ticket, Message]:
        """Wait for the processes; one that is gone answers with a Failure."""
        by_ref = {self._refs[ticket]: ticket for ticket in tickets}
        ready, rest = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s)
        if ready and rest:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return {by_ref[ref]: self._take(by_ref[ref], ref) for ref in ready}

    def _take(self, ticket: Ticket, ref: Any) -> Message:
        method = self._methods.pop(ticket)
        del self._refs[ticket]
        try:
            message: Message = ray.get(ref)
        except RayError as error:
            gone = not isinstance(error, RayTaskError)
            return Failure(
                call_id=ticket.call_id,
                rank=ticket.rank,
                method=method,
                error_type=type(error).__name__,
                message="the worker's process is gone" if gone else "the call or its result could not be transferred",
                traceback=str(error),
            )
        return message

    def stop(self) -> None:
        """Kill the processes."""
        self.is_stopped = True
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []


class _RayHost:
    """What runs in each process: a WorkerHost, and the group's store."""

    def __init__(self, rank: int, mesh: Mesh, generation_mesh: Mesh) -> None:
        configure_logging()
        self._rank = rank
        self._mesh = mesh
        self._generation_mesh = generation_mesh
        self._store: TCPStore | None = None
        self._host: WorkerHost | None = None

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        address: str = ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=_seconds(timeout_s))
        return address, self._store.port

    def join_store(self, address: str, port: int, timeout_s: float) -> None:
        self._store = TCPStore(address, port, is_master=False, timeout=_seconds(timeout_s))

    def construct(self, worker_class: type[Worker], settings: Mapping[str, object]) -> Message:
        context = WorkerContext(
            rank=self._rank,
            world_size=self._mesh.size,
            mesh=self._mesh,
            generation_mesh=self._generation_mesh,
            store=self._store,
        )
        self._host = WorkerHost(context)
        return self._host.construct(worker_class, settings)

    def run(self, call: Call) -> Message:
        assert self._host is not None
        return self._host.run(call)


def _seconds(timeout_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=timeout_s)


def connect_cluster() -> bool:
    """Connect this process to a cluster; return whether it started one, which it must then end."""
    if ray.is_initialized():
        return False
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    return True


def node_resources() -> list[dict[str, float]]:
    """What each living node of the cluster has in all."""
    nodes: list[dict[str, Any]] = ray.nodes()
    return [node["Resources"] for node in nodes if node["Alive"]]


def _by_node(group: PlacementGroup) -> tuple[int, ...]:
    """Return the bundles' indices, those of one node adjacent, nodes in the order of their first bundle."""
    node_of: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    nodes = list(dict.fromkeys(node_of[bundle] for bundle in sorted(node_of)))
    return tuple(sorted(node_of, key=lambda bundle: (nodes.index(node_of[bundle]), bundle)))
