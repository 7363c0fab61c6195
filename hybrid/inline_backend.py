"""The inline backend: every rank of every group in this process, for a laptop, one device, or tests of control flow.

Ranks take turns in rank order in one thread, so a run repeats bit for bit although they share the process's random
state. `concurrent=True` gives each rank its own thread instead, for workers that wait for one another. Arguments and
results are not copied. A thread can't be stopped from outside: after a timeout the call runs on, and the group is
stuck.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Collection

from hybrid.errors import ResourceError
from hybrid.messages import Call, Message, Ticket
from hybrid.pool import GroupSpec, Members, ResourcePool
from hybrid.resources import ResourceSpec
from hybrid.worker import WorkerContext, WorkerHost


class InlinePool(ResourcePool):
    """Logical places in this process. CPU and GPU counts are not checked: the process has what it has."""

    def __init__(self, spec: ResourceSpec, *, concurrent: bool = False) -> None:
        """Take the demand; `concurrent` gives every rank a thread of its own."""
        super().__init__(spec)
        self._concurrent = concurrent
        self._members: list[InlineMembers] = []

    def launch(self, group: GroupSpec) -> Members:
        """Start the group's threads."""
        running = [members for members in self._members if not members.is_stopped]
        if len(running) >= self.spec.max_groups:
            raise ResourceError(
                f"group {group.name!r} doesn't fit: the pool holds {len(running)} of max_groups={self.spec.max_groups}"
            )
        members = InlineMembers(group, concurrent=self._concurrent)
        self._members = [*running, members]
        return members

    def close(self) -> None:
        """Stop the groups that still run."""
        for members in self._members:
            members.stop()
        self._members = []


class InlineMembers(Members):
    """Hosts in threads of this process."""

    def __init__(self, group: GroupSpec, *, concurrent: bool) -> None:
        """Start the threads; workers are made by `construct`."""
        self._group = group
        self._hosts = [WorkerHost(self._context(rank)) for rank in range(group.mesh.size)]
        num_threads = len(self._hosts) if concurrent else 1
        self._threads = [_Turns(f"{group.name}-{index}") for index in range(num_threads)]
        self._answered = threading.Condition()
        self._messages: dict[Ticket, Message] = {}
        self.is_stopped = False

    def _context(self, rank: int) -> WorkerContext:
        group = self._group
        return WorkerContext(
            rank=rank, world_size=group.mesh.size, mesh=group.mesh, generation_mesh=group.generation_mesh
        )

    def construct(self) -> tuple[Ticket, ...]:
        """Queue the construction of every rank's worker."""
        group = self._group
        return tuple(
            self._enqueue(Ticket(0, rank), functools.partial(host.construct, group.worker_class, group.settings))
            for rank, host in enumerate(self._hosts)
        )

    def send(self, rank: int, call: Call) -> Ticket:
        """Queue the call behind the thread's earlier ones."""
        return self._enqueue(Ticket(call.call_id, rank), functools.partial(self._hosts[rank].run, call))

    def _enqueue(self, ticket: Ticket, answer: Callable[[], Message]) -> Ticket:
        def job() -> None:
            message = answer()
            with self._answered:
                self._messages[ticket] = message
                self._answered.notify_all()

        self._threads[ticket.rank % len(self._threads)].put(job)
        return ticket

    def receive(self, tickets: Collection[Ticket], *, timeout_s: float) -> dict[Ticket, Message]:
        """Wait for the threads."""
        deadline = time.monotonic() + timeout_s
        with self._answered:
            while not (ready := [ticket for ticket in tickets if ticket in self._messages]):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return {}
                self._answered.wait(remaining_s)
            return {ticket: self._messages.pop(ticket) for ticket in ready}

    def stop(self) -> None:
        """Let the threads end after what they are doing; queued calls are dropped."""
        self.is_stopped = True
        for thread in self._threads:
            thread.stop()


class _Turns:
    """A daemon thread that runs jobs in order. Daemon, so that a stuck job doesn't keep the interpreter alive."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        self._stopped.set()
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._stopped.is_set():
            job()
