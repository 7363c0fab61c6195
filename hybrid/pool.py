"""Pools: where workers live. One contract for every backend; a worker group knows no other way to reach its workers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Literal, Self

from hybrid.errors import BackendUnavailable
from hybrid.messages import Call, Message, Ticket
from hybrid.resources import ResourceSpec
from hybrid.worker import Worker
from reshard.mesh import Mesh

BackendName = Literal["inline", "ray"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """What a pool needs to know to start the workers of one group.

    Attributes:
        name: for messages and process titles.
        worker_class: constructed on every rank as `worker_class(context, **settings)`.
        settings: keyword arguments of the constructor, the same for all ranks.
        mesh: training mesh over ranks 0 .. n-1.
        generation_mesh: generation mesh over the same ranks.
        timeout_s: bound on starting them.
    """

    name: str
    worker_class: type[Worker]
    settings: Mapping[str, object]
    mesh: Mesh
    generation_mesh: Mesh
    timeout_s: float


class Members(abc.ABC):
    """The running workers of one group. A rank runs its calls one at a time, in the order in which they were sent."""

    @abc.abstractmethod
    def construct(self) -> tuple[Ticket, ...]:
        """Have every rank make its worker; one ticket per rank, with call id 0."""

    @abc.abstractmethod
    def send(self, rank: int, call: Call) -> Ticket:
        """Send a call to a rank and return at once."""

    @abc.abstractmethod
    def receive(self, tickets: Collection[Ticket], *, timeout_s: float) -> dict[Ticket, Message]:
        """Wait until at least one of the tickets has its message, and return those that have.

        Empty when `timeout_s` passed first. A worker whose process is gone answers with a Failure. Each message is
        returned once.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """End the workers without waiting for what they are doing. Safe to call twice."""


class ResourcePool(abc.ABC):
    """Places for workers, held until `close`. Groups started in one pool are colocated: they share its devices."""

    def __init__(self, spec: ResourceSpec) -> None:
        """Keep the demand; subclasses reserve it."""
        self.spec = spec

    @abc.abstractmethod
    def launch(self, group: GroupSpec) -> Members:
        """Start the processes (or threads) of a group, one per place; their workers are not made yet.

        Raises:
            ResourceError: the pool is full, or the backend can't place the workers within `group.timeout_s`.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give the places back. Safe to call twice."""

    def __enter__(self) -> Self:
        """Return the pool."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def open_pool(spec: ResourceSpec, *, backend: BackendName = "inline", timeout_s: float = 60.0) -> ResourcePool:
    """Reserve places on a backend.

    `inline` keeps every rank in this process: for a laptop, for one device, and for tests of control flow. `ray` uses
    the cluster that this process is connected to or that `RAY_ADDRESS` names, else it starts one on this machine.

    Raises:
        BackendUnavailable: the backend isn't installed.
        ResourceError: the demand can't be met; within seconds, naming what lacks.
    """
    if backend == "inline":
        from hybrid.inline_backend import InlinePool

        return InlinePool(spec)
    if backend == "ray":
        from hybrid.backends import require

        require("ray")
        from hybrid.ray_backend import RayPool

        return RayPool(spec, timeout_s=timeout_s)
    raise BackendUnavailable(f"unknown backend {backend!r}; use inline or ray")
