"""The Resharder: a Plan bound to live tensors, run once a step.

States (one Resharder, one rank)::

    TRAINING --start()--> TRANSITION --wait()--> GENERATING --train()--> TRAINING
                              |                      |
                              +--(error)--> STALE    +--start()--> TRANSITION

TRAINING and GENERATING hold a whole set of weights on both sides. In TRANSITION the destination is being written.
STALE means that a transition ended part-way: the source (training weights) is intact, the destination must not be
sampled from, and the next `run` that succeeds makes it whole again.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard.errors import ReshardError, StateError
from reshard.plan import Plan
from reshard.transports.base import BoundTransfer, Tensors, Transport, endpoints, rank_copies
from reshard.transports.local import LocalTransport
from reshard.verify import verify_local_copies

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

    Bytes are per transition and known from the Plan; `seconds` is the last transition's wall clock, from `start`
    to the end of `wait`, on the host's clock.
    """

    transport: str
    num_copies: int
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

    Raises:
        LayoutError: the tensors are not those of the Layouts (names, dtypes, sizes).
        PlanError: the transport can't serve this Plan.
    """

    def __init__(
        self,
        plan: Plan,
        source: Tensors,
        destination: Tensors,
        *,
        rank: int = 0,
        transport: Transport | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self._transport: Transport = transport if transport is not None else LocalTransport()
        self._source, self._destination = endpoints(plan, rank, source, destination)
        self._bound: BoundTransfer = self._transport.bind(
            plan, rank=rank, source=self._source, destination=self._destination
        )
        self._state = State.TRAINING
        self._version = 0
        self._started = 0.0
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

        Args:
            version: the number that the new weights get; one more than the last where left out.
            stream: raw handle of the CUDA stream to queue on; the current one where left out.
            deadline_s: seconds until a PeerTimeout names what was still missing.
        """
        self.start(version=version, stream=stream)
        return self.wait(deadline_s=deadline_s)

    def start(self, *, version: int | None = None, stream: int | None = None) -> None:
        """Begin a transition and return; on a device the copies are queued on `stream`. Training weights must not
        change until `wait`.

        Raises:
            StateError: a transition is in flight, the Resharder is closed, or tensors were re-allocated since binding.
        """
        if self._state is State.TRANSITION:
            raise StateError("a transition is in flight: call wait() before the next start()")
        if self._state is State.CLOSED:
            raise StateError("this Resharder is closed: bind a new one")
        if version is not None and version <= self._version:
            raise StateError(f"weights version {version} is not newer than {self._version}: versions only grow")
        self._source.check_in_place()
        self._destination.check_in_place()
        self._next_version = self._version + 1 if version is None else version
        self._started = time.perf_counter()
        self._state = State.TRANSITION
        try:
            self._bound.begin(stream=stream)
            self._bound.push(0, stream=stream)
        except ReshardError:
            self._state = State.STALE
            raise

    def wait(self, *, deadline_s: float = 60.0) -> TransitionStats:
        """Block until the transition that `start` began is complete, then publish its version.

        Raises:
            StateError: no transition is in flight.
            TransportError, PeerTimeout: the transition failed; the state is STALE and training weights are intact.
        """
        if self._state is not State.TRANSITION:
            raise StateError(f"no transition is in flight (state {self._state.value}): call start() first")
        try:
            self._bound.wait(deadline_s=deadline_s)
        except ReshardError:
            self._state = State.STALE
            raise
        self._state, self._version = State.GENERATING, self._next_version
        seconds = time.perf_counter() - self._started
        self._stats = replace(self._stats, num_transitions=self._stats.num_transitions + 1, seconds=seconds)
        return self._stats

    def train(self) -> None:
        """Generation is over: the training side may change its weights again.

        Raises:
            StateError: a transition is in flight or the Resharder is closed.
        """
        if self._state in (State.TRANSITION, State.CLOSED):
            raise StateError(f"cannot go to training from state {self._state.value}")
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

    def verify(self) -> int:
        """Compare every byte that this rank's own copies wrote with its source. Slow (it reads both sides once);
        returns the bytes compared.

        Raises:
            StateError: the destination is not whole.
            VerifyError: names the tensor, the index and both values of the first element that differs.
        """
        self.require_complete()
        return verify_local_copies(self.plan, self.rank, self._source, self._destination)

    def close(self) -> None:
        """Release what the transport holds. Tensors of both sides stay as they are."""
        if self._state is not State.CLOSED:
            self._bound.close()
            self._state = State.CLOSED

    def __enter__(self) -> Resharder:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _initial_stats(self) -> TransitionStats:
        copies = rank_copies(self.plan, self.rank)
        arriving = [c for c in copies if c.dst_rank == self.rank]
        return TransitionStats(
            transport=self._transport.name,
            num_copies=len(copies),
            num_launches=self._bound.num_launches,
            received_bytes=sum(c.moved_bytes for c in arriving),
            local_bytes=sum(c.written_bytes for c in arriving if c.is_local and not c.is_alias),
            aliased_bytes=sum(c.written_bytes for c in arriving if c.is_alias),
            staging_bytes=self._bound.staging_bytes,
        )
