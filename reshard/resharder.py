"""The Resharder: a Plan bound to live tensors, run once a step.

States (one Resharder, one rank)::

    TRAINING --begin()--> TRANSITION --wait()--> GENERATING --train()--> TRAINING
                              |                      |
                              +--(error)--> STALE    +--begin()--> TRANSITION

In GENERATING both sides hold a whole set of weights. In TRAINING the source changes; the destination still holds its
version, except where it shares memory with the source (aliases): then generation is refused until the next transition.
In TRANSITION the destination is being written. STALE means that a transition ended part-way: the source (training
weights) is intact, the destination must not be sampled from, and the next `run` that succeeds makes it whole again.

Note "a transition by parts". Given `parts`, weights may travel as soon as they are final and be used as soon as they
are there: `begin` opens the destination (generation has stopped), `push(part)` sends a part whose training weights do
not change any more, `wait_part(part)` returns when it is complete here, `wait` ends the transition. `start` is `begin`
and all pushes; `run` is `start` and `wait`. `reshard.overlap.BackwardPush` pushes from within a backward pass.

Note "inside a CUDA graph of yours". Where nothing has to wait on the host (the ``local`` transport on a GPU), `run` may
be called while a stream is being captured. It then only queues its copies: state, version and stats stay as they are.
Each replay of the graph runs the transition; call `publish` after it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from reshard.errors import PlanError, ReshardError, StateError
from reshard.parts import Parts
from reshard.plan import Plan
from reshard.transports.base import BoundTransfer, Endpoint, Tensors, Transport, endpoints, rank_copies
from reshard.transports.kernels import Kernels, choose_kernels
from reshard.transports.local import LocalTransport
from reshard.transports.runner import common_device, is_capturing
from reshard.verify import Checks

if TYPE_CHECKING:
    from types import TracebackType


class State(enum.Enum):
    """Where the weights are in their life (see the module's note)."""

    TRAINING = "training"
    TRANSITION = "transition"
    GENERATING = "generating"
    STALE = "stale"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionStats:
    """What this rank's transitions cost.

    Bytes are per transition and known from the Plan; `seconds` is the last transition's wall clock, from `begin`
    to the end of `wait`, on the host's clock. Aliased bytes are those whose source is the same memory. `kernels` is
    what runs the copies: host threads, CUDA kernels or Triton (see `reshard.transports.kernels`).
    """

    transport: str
    kernels: Kernels
    num_copies: int
    num_parts: int
    num_launches: int
    received_bytes: int
    local_bytes: int
    aliased_bytes: int
    staging_bytes: int
    num_transitions: int = 0
    seconds: float = 0.0


class Resharder:
    """Carries one rank's weights from the source Layout's tensors into the destination Layout's, in place.

    Args:
        plan: where each byte comes from and goes to.
        source, destination: this rank's live tensors by the storage names of the two Layouts. Borrowed: the
        Resharder writes
            into `destination` and never re-binds or re-allocates either side.
        rank: this rank's number in the Plan.
        transport: how bytes travel; the default serves a Plan whose copies all stay on this rank.
        parts: the destination's tensors cut into parts that travel one by one: lists of names or shell patterns in the
            order of use, or ``"layers"`` for embeddings, each layer, and the rest. Equal on every rank.
        graph: True: launch by CUDA graphs (PlanError on the host); None: where that saves launches; False: never.

    Raises:
        LayoutError: the tensors are not those of the Layouts (names, dtypes, sizes).
        PlanError: the transport can't serve this Plan, or parts don't fit its tensors.
    """

    def __init__(
        self,
        plan: Plan,
        source: Tensors,
        destination: Tensors,
        *,
        rank: int = 0,
        transport: Transport | None = None,
        parts: Sequence[Sequence[str]] | Literal["layers"] | None = None,
        graph: bool | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.parts = _parts_of(plan, parts)
        self._transport: Transport = transport if transport is not None else LocalTransport()
        self._source, self._destination = endpoints(plan, rank, source, destination)
        self._bound: BoundTransfer = self._transport.bind(
            plan, rank=rank, source=self._source, destination=self._destination, parts=self.parts, graph=graph
        )
        self._device = common_device(self._source, self._destination)
        self._checks: Checks | None = None
        self._state = State.TRAINING
        self._version = 0
        self._started = 0.0
        self._pushed: set[int] = set()
        self._stream: int | None = None
        self._stats = self._initial_stats()

    @property
    def state(self) -> State:
        """The state now."""
        return self._state

    @property
    def version(self) -> int:
        """Number of the weights that the destination holds: 0 before the first transition, then one more each
        time, or as set by `run`.
        """
        return self._version

    @property
    def stats(self) -> TransitionStats:
        """What a transition costs on this rank, and how long the last one took."""
        return self._stats

    def run(
        self, *, version: int | None = None, stream: int | None = None, deadline_s: float = 60.0
    ) -> TransitionStats:
        """One whole transition: `start`, then `wait`. Blocks until the destination is complete.

        While `stream` is being captured it only queues the copies; see the module's note "inside a CUDA graph".

        Args:
            version: the number that the new weights get; one more than the last where left out.
            stream: raw handle of the CUDA stream to queue on; the current one where left out.
            deadline_s: seconds until a PeerTimeout names what was still missing.
        """
        if is_capturing(self._device, stream):
            self._check_may_begin(version)
            self._bound.queue(stream=stream)
            return self._stats
        self._begin(version, stream)
        self._push_all(stream)
        return self.wait(deadline_s=deadline_s)

    def start(self, *, version: int | None = None, stream: int | None = None) -> None:
        """Begin a transition, push every part, and return; on a device the copies are queued on `stream`. Training
        weights must not change until `wait`. Raises what `begin` and `push` raise.
        """
        self.begin(version=version, stream=stream)
        self._push_all(stream)

    def begin(self, *, version: int | None = None, stream: int | None = None) -> None:
        """Begin a transition: generation has stopped, and from here on the destination may be written.

        Raises:
            StateError: a transition is in flight, the Resharder is closed, the version is not newer, the stream is
                being captured, or tensors were re-allocated since binding (peers are told, and their transition
                fails).
            TransportError, DeviceError: the transition failed; the state is STALE.
        """
        if is_capturing(self._device, stream):
            raise StateError("the stream is being captured: call run(), which queues its copies for the graph")
        self._begin(version, stream)

    def _begin(self, version: int | None, stream: int | None) -> None:
        self._check_may_begin(version)
        self._next_version = self._version + 1 if version is None else version
        self._started = time.perf_counter()
        self._pushed, self._stream = set(), stream
        with self._failing_stale():
            self._bound.begin(stream=stream)
            self._state = State.TRANSITION

    def _push_all(self, stream: int | None) -> None:
        for part in range(self.parts.num):
            self.push(part, stream=stream)

    def push(self, part: int, *, stream: int | None = None) -> None:
        """Send a part: its source tensors are final once what is queued on `stream` is done, and must not change until
        `wait`. Returns at once on a device; on the host the copies that can be made now are made.

        Raises:
            StateError: no transition is in flight, or the part was pushed already.
            ValueError: there is no such part.
            TransportError, DeviceError: the transition failed; the state is STALE.
        """
        self._check_in_flight(part)
        if part in self._pushed:
            raise StateError(f"part {part} was pushed already in this transition: its weights may have changed since")
        self._pushed.add(part)
        with self._failing_stale():
            self._bound.push(part, stream=stream)

    def wait_part(self, part: int, *, deadline_s: float = 60.0) -> None:
        """Block until the part is complete in this rank's destination; other parts go on meanwhile.

        Raises:
            StateError: no transition is in flight, or this rank has not pushed its own share of the part.
            ValueError: there is no such part.
            TransportError, PeerTimeout: the transition failed; the state is STALE and training weights are intact.
        """
        self._check_in_flight(part)
        with self._failing_stale():
            self._bound.wait_part(part, deadline_s=deadline_s)

    def wait(self, *, deadline_s: float = 60.0) -> TransitionStats:
        """Push what was not pushed, block until the transition is complete, and publish its version.

        Raises:
            StateError: no transition is in flight.
            TransportError, PeerTimeout: the transition failed; the state is STALE and training weights are intact.
        """
        self._check_in_flight(0)
        for part in sorted(set(range(self.parts.num)) - self._pushed):
            self.push(part, stream=self._stream)
        with self._failing_stale():
            self._bound.wait(deadline_s=deadline_s)
        self._count(time.perf_counter() - self._started)
        return self._stats

    def publish(self, *, version: int | None = None) -> TransitionStats:
        """A replay of a CUDA graph that holds `run` was queued: whatever is queued after it sees the new weights.

        Raises:
            StateError: as `begin`.
        """
        self._check_may_begin(version)
        self._next_version = self._version + 1 if version is None else version
        self._count(0.0)
        return self._stats

    def train(self, *, deadline_s: float = 60.0) -> None:
        """Generation is over: the training side may change its weights again.

        Where other ranks read this rank's training weights in place, it blocks until generation is over there too.

        Raises:
            StateError: a transition is in flight or the Resharder is closed.
            PeerTimeout: names a rank that still generates from this rank's memory; weights must not change yet.
        """
        if self._state in (State.TRANSITION, State.CLOSED):
            raise StateError(f"cannot go to training from state {self._state.value}")
        self._bound.release(deadline_s=deadline_s)
        if self._state is State.GENERATING:
            self._state = State.TRAINING

    def require_complete(self) -> None:
        """Raise StateError unless the destination holds one whole set of weights: call it before sampling."""
        if self._version == 0:
            raise StateError("the destination has never been filled: call run() before generating")
        if self._state in (State.TRANSITION, State.STALE, State.CLOSED):
            raise StateError(
                f"the destination's weights are not whole (state {self._state.value}): "
                "run() a transition that succeeds before generating"
            )
        if self._state is State.TRAINING and self._stats.aliased_bytes:
            raise StateError(
                f"{self._stats.aliased_bytes} bytes of the destination are the training weights themselves, which "
                "change while training: run() a transition before generating"
            )

    def verify(self, *, deadline_s: float = 60.0) -> int:
        """Check every Copy that this rank sends or receives: a 64-bit checksum of the values as they arrive, computed
        on the device on both sides, must agree. Reads both sides once; returns the bytes of this rank's destination
        that were checked. Collective: all ranks call it after the same transition, before training weights change. A
        copy that differs raises on both of its ranks.

        Raises:
            StateError: the destination is not whole.
            VerifyError: names the tensor, the box and both ranks; inside a rank also the first element that differs.
            PeerTimeout, TransportError: a rank did not take part.
        """
        self.require_complete()
        if self._checks is None:
            self._checks = Checks(self.plan, self.rank, self._source, self._destination)
        return self._checks.run(self._bound, deadline_s=deadline_s)

    def close(self) -> None:
        """Release what the transport holds, and let go of the tensors of both sides, which stay as they are."""
        if self._state is not State.CLOSED:
            self._bound.close()
            self._state, self._checks = State.CLOSED, None
            self._source, self._destination = (
                Endpoint(side=each.side, tensors={}, addresses=()) for each in (self._source, self._destination)
            )

    def __enter__(self) -> Resharder:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _check_may_begin(self, version: int | None) -> None:
        if self._state is State.TRANSITION:
            raise StateError("a transition is in flight: call wait() before the next start()")
        if self._state is State.CLOSED:
            raise StateError("this Resharder is closed: bind a new one")
        if version is not None and version <= self._version:
            raise StateError(f"weights version {version} is not newer than {self._version}: versions only grow")
        try:
            self._source.check_in_place()
            self._destination.check_in_place()
        except StateError:
            self._bound.abandon()
            raise

    def _check_in_flight(self, part: int) -> None:
        if self._state is not State.TRANSITION:
            raise StateError(f"no transition is in flight (state {self._state.value}): call start() first")
        if not 0 <= part < self.parts.num:
            raise ValueError(f"part {part} of {self.parts.num}: expected 0 to {self.parts.num - 1}")

    @contextmanager
    def _failing_stale(self) -> Iterator[None]:
        """An error of the transport ends the transition; one of the caller's (StateError) leaves it as it is."""
        try:
            yield
        except StateError:
            raise
        except ReshardError:
            self._state = State.STALE
            raise

    def _count(self, seconds: float) -> None:
        self._state, self._version = State.GENERATING, self._next_version
        self._stats = replace(self._stats, num_transitions=self._stats.num_transitions + 1, seconds=seconds)

    def _initial_stats(self) -> TransitionStats:
        received = local = aliased = num_copies = 0
        for position, c in enumerate(rank_copies(self.plan, self.rank)):
            num_copies += 1
            if c.dst_rank != self.rank:
                continue
            if c.is_alias or position in self._bound.in_place:
                aliased += c.written_bytes
            elif c.is_local:
                local += c.written_bytes
            else:
                received += c.moved_bytes
        return TransitionStats(
            transport=self._transport.name,
            kernels=choose_kernels(self._device),
            num_copies=num_copies,
            num_parts=self.parts.num,
            num_launches=self._bound.num_launches,
            received_bytes=received,
            local_bytes=local,
            aliased_bytes=aliased,
            staging_bytes=self._bound.staging_bytes,
        )


def _parts_of(plan: Plan, parts: Sequence[Sequence[str]] | Literal["layers"] | None) -> Parts:
    tensors = plan.destination.specs
    if parts is None:
        return Parts.whole(tensors)
    if parts == "layers":
        return Parts.by_layer(tensors)
    if isinstance(parts, str) or any(isinstance(part, str) for part in parts):
        raise PlanError(f"parts: expected 'layers' or a list of lists of names, got {parts!r}")
    return Parts.of(tensors, parts)
