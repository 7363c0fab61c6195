"""Process groups: torch.distributed's groups, created once, named, warmed up, and taken down in order.

Note: repair
    A collective that fails or times out breaks its communicator, with NCCL and with gloo. Then on every rank: `abort`
    the ProcessGroups, make new ones from the same list (a dead rank's process has to be back, or the world be made anew
    without it), and bind a new Resharder to the same tensors. Ranks that are late are found before a communicator is
    used (`reshard.rendezvous`): then nothing is broken, and the next transition works.

    With NCCL, set ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` before the default group is made if a process is to survive
    such a failure: by default torch's own watchdog ends it when an operation is older than the group's `timeout_s`.
    Deadlines of transitions should be well below that time.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _abort_process_group, _get_default_store

from reshard.errors import LayoutError, PeerTimeout, StateError, TransportError
from reshard.groups import Communicator, check_communicators, communicators_digest
from reshard.rendezvous import LOOK_S, Rendezvous
from reshard.step_record import StepRecord, Store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend as BackendOfTorch
    from torch._C._distributed_c10d import Store as StoreOfTorch

Backend = Literal["gloo", "nccl"]
WORLD = "world"
STORE_PREFIX = "reshard"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclOptions:
    """How NCCL communicators are made.

    Attributes:
        high_priority_stream: run collectives on a stream that goes before others.
        min_ctas, max_ctas: thread blocks that a collective may occupy; NCCL's own choice where left out.
    """

    high_priority_stream: bool = True
    min_ctas: int | None = None
    max_ctas: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One communicator that this rank belongs to. Rank ``i`` of it is ``ranks[i]``, ascending, as torch orders them."""

    name: str
    ranks: tuple[int, ...]
    handle: dist.ProcessGroup
    device: torch.device

    def __str__(self) -> str:
        return f"group {self.name!r} of ranks {list(self.ranks)}"


class ProcessGroups:
    """The communicators of a list, on every rank of the default group.

    Every rank makes it, with the same list, in the same order among its collectives; lists are compared over the store
    before anything is created. Groups of the same ranks are one group, under its first name. There is always one of all
    ranks, named ``world``, apart from torch's default group, which only lends its store and may be of any backend. Use
    it as a context manager, or `close` it.

    Args:
        communicators: what to create, see `reshard.groups.Groups.communicators` and
            `reshard.plan_gather.gather_communicators`.
        backend: of the groups.
        device: where tensors of collectives live; the current CUDA device for NCCL, else the CPU, where left out.
        timeout_s: for creating and warming up each group, and the longest that one of its operations may take.
        nccl: options of NCCL communicators.
        store: where ranks meet; the default group's where left out. Borrowed.

    Raises:
        LayoutError: a rank outside the world or a name that comes twice; the lists of ranks differ (they are named).
        PeerTimeout, TransportError: a rank did not come in time or is gone, or a group failed; the message has the
            group, its ranks, this rank, the step, and what each rank was doing last.
    """

    def __init__(
        self,
        communicators: Sequence[Communicator] = (),
        *,
        backend: Backend,
        device: torch.device | None = None,
        timeout_s: float = 600.0,
        nccl: NcclOptions | None = None,
        store: StoreOfTorch | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise StateError("torch.distributed has no default group: call init_process_group() on every rank first")
        self.backend, self.timeout_s = backend, timeout_s
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device if device is not None else _default_device(backend)
        self._nccl = nccl if nccl is not None else NcclOptions()
        everyone = tuple(range(self.world_size))
        self.store: Store = meeting_store(store)
        self.record = StepRecord(self.store, rank=self.rank, ranks=everyone)
        self._creation = Rendezvous(self.store, "groups", ranks=everyone, record=self.record)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._created: set[tuple[int, ...]] = set()
        self._closed = False
        try:
            self.create([Communicator(WORLD, everyone), *communicators])
        except BaseException:
            self.abort()
            raise

    @property
    def world(self) -> Group:
        """The group of all ranks."""
        return self.group(range(self.world_size))

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that this rank belongs to, in the order of their creation."""
        return tuple(self._groups.values())

    def find(self, ranks: Sequence[int]) -> Group | None:
        """The group of exactly these ranks, in any order; None where there is none that this rank belongs to."""
        self._check_open()
        return self._groups.get(tuple(sorted(ranks)))

    def group(self, ranks: Sequence[int]) -> Group:
        """The group of exactly these ranks, in any order: the same object each time.

        Raises:
            LayoutError: there is none, or this rank is not in it.
        """
        found = self.find(ranks)
        if found is None:
            known = ", ".join(map(str, self._groups.values()))
            raise LayoutError(
                f"rank {self.rank} belongs to no group of ranks {sorted(ranks)}; it has {known}. Add the group to the "
                "list that ProcessGroups is made from, on every rank"
            )
        return found

    def create(self, communicators: Sequence[Communicator]) -> None:
        """Create those groups that are not there yet. Collective over all ranks. Raises as the constructor does."""
        self._check_open()
        try:
            check_communicators(communicators, world_size=self.world_size)
        except LayoutError as error:
            self._creation.abandon(f"has a list of groups that can't be: {error}")
            raise
        self._agree(communicators)
        for communicator in communicators:
            ranks = tuple(sorted(communicator.ranks))
            if ranks in self._created:
                continue
            self._created.add(ranks)
            group = self._create(communicator.name, ranks)
            if group is not None:
                self._groups[ranks] = group
                self._warm_up(group)

    def close(self) -> None:
        """Destroy the groups, last created first; every rank does. Closing twice is allowed."""
        self._take_down(dist.destroy_process_group)

    def abort(self) -> None:
        """Take the groups down without waiting for what is in flight: after a failure (see the note "repair")."""
        self._take_down(_abort_process_group if self.backend == "nccl" else dist.destroy_process_group)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close, or abort after an error."""
        if error is None:
            self.close()
        else:
            self.abort()

    def _agree(self, communicators: Sequence[Communicator]) -> None:
        listed = [f"{c.name} of {list(c.ranks)}" for c in communicators]
        digest = communicators_digest(communicators)
        self._creation.arrive("creation of groups", "\n".join((f"{self.backend} {digest}", *listed)))
        self._creation.wait(timeout_s=self.timeout_s)
        lists = {rank: text.split("\n") for rank, text in self._creation.payloads().items()}
        differing = [rank for rank, lines in lists.items() if lines != lists[0]]
        if differing:
            other = lists[differing[0]]
            at = next((i for i, (a, b) in enumerate(zip(lists[0], other, strict=False)) if i and a != b), 0)
            here, there = (lines[at] if at else f"{len(lines) - 1} groups" for lines in (lists[0], other))
            raise LayoutError(
                f"ranks {differing} list other groups than rank 0: where rank 0 has {here}, rank {differing[0]} has "
                f"{there}. Make the list from the same meshes on every rank; nothing was created"
            )

    def _create(self, name: str, ranks: tuple[int, ...]) -> Group | None:
        self.record.enter(f"creating group {name!r}")
        timeout = datetime.timedelta(seconds=self.timeout_s)
        begin = time.monotonic()
        try:
            handle = dist.new_group(
                list(ranks), timeout=timeout, backend=self.backend, pg_options=self._options(), group_desc=name
            )
        except RuntimeError as error:
            late = time.monotonic() - begin >= self.timeout_s
            raise self._failure(name, ranks, "could not be created", error=error, late=late) from error
        return Group(name, ranks, handle, self.device) if self.rank in ranks else None

    def _options(self) -> BackendOfTorch.Options | None:
        if self.backend != "nccl":
            return None
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=self._nccl.high_priority_stream)
        if self._nccl.min_ctas is not None:
            options.config.min_ctas = self._nccl.min_ctas
        if self._nccl.max_ctas is not None:
            options.config.max_ctas = self._nccl.max_ctas
        return options

    def _warm_up(self, group: Group) -> None:
        """One all-gather of a word: the connections are made now, and the members are those that the list says."""
        self.record.enter(f"warming up group {group.name!r}")
        own = torch.tensor([self.rank], dtype=torch.int64, device=group.device)
        found = torch.full((len(group.ranks),), -1, dtype=torch.int64, device=group.device)
        deadline = time.monotonic() + self.timeout_s
        try:
            work = group.handle.allgather_into_tensor_coalesced([found], [own])
            in_time = finish(work, group.device, deadline=deadline)
        except RuntimeError as error:
            late = time.monotonic() >= deadline
            raise self._failure(group.name, group.ranks, "failed to warm up", error=error, late=late) from error
        if not in_time:
            raise self._failure(group.name, group.ranks, "did not warm up", error=None, late=True)
        if tuple(found.tolist()) != group.ranks:
            what = f"has the members {found.tolist()}"
            raise self._failure(group.name, group.ranks, what, error=None, late=False)
        self.record.enter(f"group {group.name!r} is ready")

    def _failure(
        self, name: str, ranks: tuple[int, ...], what: str, *, error: RuntimeError | None, late: bool
    ) -> TransportError:
        message = f"rank {self.rank}: group {name!r} of ranks {list(ranks)} {what}"
        after = f" within {self.timeout_s:g} s" if late else ""
        cause = f": {error}" if error is not None else ""
        return (PeerTimeout if late else TransportError)(f"{message}{after}{cause}; {self.record.report(ranks)}")

    def _take_down(self, destroy: Callable[[dist.ProcessGroup], None]) -> None:
        if self._closed:
            return
        self._closed = True
        for group in reversed(self._groups.values()):
            self.record.enter(f"taking down group {group.name!r}")
            destroy(group.handle)
        self._groups.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("these process groups are closed: make new ones")


def finish(work: dist.Work, device: torch.device, *, deadline: float) -> bool:
    """Block until `work` is done, or `deadline` (of time.monotonic) has come, and return which.

    With NCCL ``work.wait(timeout)`` would block this thread inside torch, so the stream waits and the host polls.

    Raises:
        RuntimeError: the work failed; with gloo also when the deadline has come, and then its group is broken.
    """
    if device.type != "cuda":
        left = max(deadline - time.monotonic(), 0.001)
        work.wait(datetime.timedelta(seconds=left))
        return True
    with torch.cuda.device(device):
        work.wait()
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_S / 1000)
    return True


def meeting_store(store: StoreOfTorch | None = None, prefix: str = "") -> Store:
    """The part of `store`, the default group's where left out, that holds meetings and last steps under `prefix`."""
    return PrefixStore(f"{STORE_PREFIX}/{prefix}", store if store is not None else _get_default_store())


def _default_device(backend: Backend) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
