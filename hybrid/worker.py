"""Workers: a class with registered methods, told its place by a context, run by a host that answers every call."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hybrid.dispatch import Dispatch, RegisteredMethod, part_of
from hybrid.messages import Call, Failure, Message, Reply
from hybrid.profiler import record_phases
from reshard.mesh import Mesh

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """A worker's place.

    Attributes:
        rank: in [0, world_size), the same in both meshes.
        world_size: workers in the group.
        mesh: the group's training mesh (`pp`, `dp`, `tp`, ...).
        generation_mesh: the group's generation mesh (`pp`, `dp`, `micro_dp`, `tp`); `mesh` if none was given.
        store: a store that the group's processes share, ready for `torch.distributed.init_process_group(store=...)`;
            None where the group has one process.
    """

    rank: int
    world_size: int
    mesh: Mesh
    generation_mesh: Mesh
    store: Store | None = None

    def part(self, dispatch: Dispatch) -> int:
        """Return the index of the part that this rank gets of what `dispatch` cuts; parts are all of one size."""
        return part_of(dispatch, self.rank, mesh=self.mesh, generation_mesh=self.generation_mesh)


class Worker:
    """Base of classes that run in a worker group. Decorate what the controller may call with `register`.

    A method must not write into its arguments (in one process they are the caller's own), and what it returns must be
    a value: another process may be on the other end.
    """

    def __init__(self, context: WorkerContext) -> None:
        """Keep the context; subclasses call this first and take their settings as keyword arguments."""
        self.context = context


class WorkerHost:
    """Makes one worker and runs its calls, one at a time. What the worker raises is answered, not raised."""

    def __init__(self, context: WorkerContext) -> None:
        """Take the context; the worker is made by `construct`."""
        self._context = context
        self._worker: Worker | None = None

    def construct(self, worker_class: type[Worker], settings: Mapping[str, object]) -> Message:
        """Make the worker as `worker_class(context, **settings)`."""
        call = Call(call_id=0, method="__init__", arguments=settings, wants_value=False)
        with _Answering(call, self._context.rank) as answer:
            self._worker = worker_class(self._context, **settings)
        return answer.message()

    def run(self, call: Call) -> Message:
        """Run one call and return its reply, or its failure with the traceback."""
        with _Answering(call, self._context.rank) as answer, record_phases() as record:
            assert self._worker is not None, "construct comes first and has succeeded"
            method = registered_methods(type(self._worker))[call.method]
            answer.value = method.function(self._worker, **call.arguments)
        return answer.message(record.seconds)


class _Answering:
    """Turns what the block raises into a Failure: the end of one process's stack is another's message."""

    def __init__(self, call: Call, rank: int) -> None:
        self.value: object = None
        self._call = call
        self._rank = rank
        self._failure: Failure | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> bool:
        if kind is None or not isinstance(error, (Exception, SystemExit)):
            return False
        self._failure = Failure(
            call_id=self._call.call_id,
            rank=self._rank,
            method=self._call.method,
            error_type=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
        )
        return True

    def message(self, phase_seconds: Mapping[str, float] | None = None) -> Message:
        if self._failure is not None:
            return self._failure
        return Reply(
            call_id=self._call.call_id,
            rank=self._rank,
            value=self.value if self._call.wants_value else None,
            phase_seconds=phase_seconds or {},
        )


def registered_methods(worker_class: type[Worker]) -> dict[str, RegisteredMethod]:
    """Return the class's registered methods by name, inherited ones included."""
    found: dict[str, RegisteredMethod] = {}
    for base in reversed(worker_class.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, RegisteredMethod):
                found[name] = value
            else:
                found.pop(name, None)
    return found
