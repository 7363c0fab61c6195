"""The controller: one process that calls many workers as if they were one object.

    class Scorer(Worker):
        @register(dispatch=Dispatch.DP)
        def score(self, batch: TensorDict) -> TensorDict: ...

    with open_pool(ResourceSpec(num_workers=2)) as pool, WorkerGroup(pool, Scorer) as scorers:
        scores = scorers.call(Scorer.score, batch)          # or: pending = scorers.submit(...); pending.result()

Every call has a deadline. What a worker raises comes back as `WorkerError` with rank and traceback; when one rank
fails, the others get `GRACE_S` to answer too, since they may be waiting for it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from hybrid.dispatch import Dispatch, RegisteredMethod, Scattered, gather, register, scatter
from hybrid.errors import GroupStuck, WorkerError, WorkerTimeout
from hybrid.messages import Call, Failure, Message, Reply, Ticket
from hybrid.pool import GroupSpec, Members, ResourcePool, open_pool
from hybrid.profiler import add_phases
from hybrid.resources import ResourceSpec
from hybrid.worker import Worker, WorkerContext, registered_methods
from reshard.mesh import Mesh

__all__ = [
    "Dispatch",
    "PendingCall",
    "ResourcePool",
    "ResourceSpec",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "open_pool",
    "register",
]

GRACE_S = 5.0
"""How long the other ranks may still answer after the first failure."""


class WorkerGroup:
    """One worker per place of a pool, called together.

    A group whose call timed out is stuck: some rank still runs it, so every later call raises `GroupStuck`, and
    `shutdown` is what remains.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker_class: type[Worker],
        settings: Mapping[str, object] | None = None,
        *,
        mesh: Mesh | None = None,
        generation_mesh: Mesh | None = None,
        name: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Start the workers and wait until every one is made.

        Args:
            pool: gives the places; `pool.spec.num_workers` workers are made.
            worker_class: constructed on every rank as `worker_class(context, **settings)`.
            settings: the constructor's keyword arguments, the same on every rank.
            mesh: training mesh over ranks 0 .. n-1; all `dp` by default.
            generation_mesh: generation mesh over the same ranks, with a `micro_dp` axis; `mesh` by default.
            name: for messages; the class's name by default.
            timeout_s: deadline of a call (and of starting) where the call gives none.

        Raises:
            ValueError: a mesh doesn't cover the pool's places.
            WorkerError, WorkerTimeout: a worker's constructor raised, or didn't return in time.
            ResourceError: the pool has no room.
        """
        self.mesh = _covering(mesh or Mesh({"dp": pool.spec.num_workers}), "mesh", pool)
        self.generation_mesh = _covering(generation_mesh or self.mesh, "generation_mesh", pool)
        self.name = name or worker_class.__name__
        self._timeout_s = timeout_s
        self._methods = registered_methods(worker_class)
        self._call_ids = itertools.count(1)
        self._stuck: str | None = None
        self._members = pool.launch(
            GroupSpec(
                name=self.name,
                worker_class=worker_class,
                settings=dict(settings or {}),
                mesh=self.mesh,
                generation_mesh=self.generation_mesh,
                timeout_s=timeout_s,
            )
        )
        self._start(timeout_s)

    def _start(self, timeout_s: float) -> None:
        tickets = self._members.construct()
        try:
            PendingCall(self, self._members, "__init__", tickets, lambda replies: None, timeout_s).result()
        except (WorkerError, WorkerTimeout):
            self.shutdown()
            raise

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.mesh.size

    def call(self, method: RegisteredMethod, *args: object, **kwargs: object) -> Any:
        """Call a registered method (`WorkerClass.method`) and wait for its joined result.

        Raises:
            DispatchError: the arguments don't fit the method's dispatch; nothing was sent.
            WorkerError: one or more ranks raised.
            WorkerTimeout: one or more ranks did not answer within the group's `timeout_s`.
            GroupStuck: an earlier call timed out, or the group was shut down.
        """
        return self.submit(method, *args, **kwargs).result()

    def submit(self, method: RegisteredMethod, *args: object, **kwargs: object) -> PendingCall:
        """Send a call and return at once; the deadline runs from `PendingCall.result`.

        Raises:
            DispatchError, GroupStuck: as `call`.
            TypeError: the method isn't one of the worker class's, or its arguments don't fit its signature.
        """
        if self._stuck is not None:
            raise GroupStuck(f"group {self.name!r} takes no more calls: {self._stuck}; shut it down and start another")
        if self._methods.get(method.name) is not method:
            raise TypeError(f"group {self.name!r} has no method {method.name!r}; it has {sorted(self._methods)}")
        arguments = method.bind(args, kwargs)
        scattered = scatter(method, arguments, mesh=self.mesh, generation_mesh=self.generation_mesh)
        tickets = self._send(method, scattered)

        def join(replies: Mapping[int, Reply]) -> Any:
            return gather(method, scattered, {rank: reply.value for rank, reply in replies.items()})

        return PendingCall(self, self._members, method.name, tickets, join, self._timeout_s)

    def _send(self, method: RegisteredMethod, scattered: Scattered) -> tuple[Ticket, ...]:
        call_id = next(self._call_ids)
        collect = set(scattered.collect)
        return tuple(
            self._members.send(
                rank,
                Call(call_id=call_id, method=method.name, arguments=arguments, wants_value=rank in collect),
            )
            for rank, arguments in enumerate(scattered.arguments)
        )

    def mark_stuck(self, reason: str) -> None:
        """Refuse later calls, saying why. The first reason stays."""
        self._stuck = self._stuck or reason

    def shutdown(self) -> None:
        """End the workers without waiting for what they are doing. Safe to call twice."""
        self.mark_stuck("it was shut down")
        self._members.stop()

    def __enter__(self) -> Self:
        """Return the group."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        """Shut it down."""
        self.shutdown()


class PendingCall:
    """A call that was sent to every rank of a group."""

    def __init__(
        self,
        group: WorkerGroup,
        members: Members,
        method: str,
        tickets: Sequence[Ticket],
        join: Callable[[Mapping[int, Reply]], Any],
        timeout_s: float,
    ) -> None:
        """Made by `WorkerGroup.submit`."""
        self._group = group
        self._members = members
        self._method = method
        self._join = join
        self._timeout_s = timeout_s
        self._open = set(tickets)
        self._is_taken = False
        self._messages: dict[int, Message] = {}

    def result(self, *, timeout_s: float | None = None) -> Any:
        """Wait for every rank and return the joined result; errors as in `WorkerGroup.call`. Ask once."""
        if self._is_taken:
            raise GroupStuck(
                f"the result of {self._group.name}.{self._method} was taken already; keep what it returned"
            )
        self._is_taken = True
        self._wait(self._timeout_s if timeout_s is None else timeout_s)
        failures = [message for message in self._messages.values() if isinstance(message, Failure)]
        silent = sorted(ticket.rank for ticket in self._open)
        if silent:
            self._group.mark_stuck(f"call {self._method!r} never came back from ranks {silent}")
        if failures:
            raise WorkerError(_describe(self._group.name, self._method, failures, silent), failures)
        replies = {rank: message for rank, message in self._messages.items() if isinstance(message, Reply)}
        _add_longest_phases(list(replies.values()))
        return self._join(replies)

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        failed = False
        while self._open:
            arrived = self._members.receive(self._open, timeout_s=max(0.0, deadline - time.monotonic()))
            for ticket, message in arrived.items():
                self._open.discard(ticket)
                self._messages[ticket.rank] = message
                if isinstance(message, Failure) and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
            if not arrived and failed:
                return
            if not arrived:
                self._raise_timeout(timeout_s)

    def _raise_timeout(self, timeout_s: float) -> None:
        silent = sorted(ticket.rank for ticket in self._open)
        self._group.mark_stuck(f"call {self._method!r} never came back from ranks {silent}")
        raise WorkerTimeout(
            f"{self._group.name}.{self._method}: ranks {silent} of {self._group.world_size} did not answer within "
            f"{timeout_s:g} s; raise timeout_s if the work is that long, else see what those ranks wait for",
            silent,
        )


def _covering(mesh: Mesh, what: str, pool: ResourcePool) -> Mesh:
    num_workers = pool.spec.num_workers
    if sorted(mesh.ranks) != list(range(num_workers)):
        raise ValueError(
            f"{what} {mesh} covers ranks {sorted(mesh.ranks)}, but the pool has {num_workers} places: "
            f"it must cover 0 .. {num_workers - 1}, each once"
        )
    return mesh


def _describe(group: str, method: str, failures: Sequence[Failure], silent: Sequence[int]) -> str:
    ordered = sorted(failures, key=lambda failure: failure.rank)
    ranks = [failure.rank for failure in ordered]
    first = ordered[0]
    text = f"{group}.{method}: ranks {ranks} raised; rank {first.rank}: {first.error_type}: {first.message}"
    if silent:
        text += f"\nranks {list(silent)} had not answered {GRACE_S:g} s later"
    return f"{text}\n--- traceback of rank {first.rank} ---\n{first.traceback.rstrip()}"


def _add_longest_phases(replies: Sequence[Reply]) -> None:
    """Add the workers' phases to the caller's, each as long as the slowest rank took."""
    longest: dict[str, float] = {}
    for reply in replies:
        for path, seconds in reply.phase_seconds.items():
            longest[path] = max(longest.get(path, 0.0), seconds)
    add_phases(longest)
