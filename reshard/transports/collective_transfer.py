"""A bound transfer of the `collective` transport: ranks meet, then rounds follow one another without a pause."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from reshard.errors import PeerTimeout, StateError, TransportError
from reshard.rendezvous import LOOK_S, Rendezvous
from reshard.transports.base import BoundTransfer, Words
from reshard.transports.collective_circle import Circle
from reshard.transports.collective_drafts import NUM_BUFFERS
from reshard.transports.collective_rounds import AllGather, Exchange, Round, Staging
from reshard.transports.runner import queue_of

START_PATIENCE_S = 0.005
"""How long the start of a transition waits for other ranks, so that the first round is sent at once."""
SPIN_S, NAP_S = 0.0002, 0.0005


@dataclass(frozen=True, slots=True)
class _Flying:
    """A round on the wire; `done` is recorded, on a device, once it is unpacked."""

    index: int
    works: list[dist.Work]


class CollectiveTransfer(BoundTransfer):
    """Rounds with two sets of buffers: round ``i`` is packed while round ``i - 1`` travels.

    On a device nothing here blocks until the end: NCCL orders the stream, and the host polls events. A transfer whose
    round failed is broken, see the note "repair" in `reshard.process_groups`.

    Attributes:
        num_gathers: regular gathers of the Plan that this rank takes part in and that travel as gathers, by way.
        num_wire_calls: batches of messages and calls of all-gathers in one transition.
        wire_bytes: bytes that arrive from other ranks in one transition, padding between boxes included.
    """

    def __init__(
        self,
        circle: Circle,
        device: torch.device,
        *,
        meeting: Rendezvous,
        rounds: list[Round],
        staging: Staging,
        num_parts: int,
        num_gathers: Mapping[str, int],
        in_place: frozenset[int],
    ) -> None:
        self._circle, self._device, self._meeting = circle, device, meeting
        self._rounds, self._staging, self._num_parts = rounds, staging, num_parts
        self.num_gathers, self.in_place = dict(num_gathers), in_place
        wires = [r.wire for r in rounds if r.wire is not None]
        tables = sum(runner.num_launches for r in rounds for runner in r.runners)
        self.num_wire_calls, self.wire_bytes = len(wires), sum(wire.received_bytes for wire in wires)
        self.num_launches = tables + (len(wires) if device.type == "cuda" else 0)
        self.staging_bytes = staging.num_bytes + sum(t.device_bytes for r in rounds for t in r.runners)
        self._landed = [torch.cuda.Event() for _ in rounds] if device.type == "cuda" else []
        self._flying: list[_Flying] = []
        self._next, self._num_pushed, self._has_met = 0, 0, False
        self._stream: int | None = None
        self._broken, self._closed = "", False

    def begin(self, *, stream: int | None) -> None:
        """Check that staging may be used. The ranks meet when the last part is pushed."""
        self._check_usable()
        try:
            self._staging.check()
        except StateError as error:
            self._meeting.abandon(str(error))
            raise
        self._stream = stream
        self._flying, self._next, self._num_pushed, self._has_met = [], 0, 0, False

    def push(self, part: int, *, stream: int | None) -> None:
        """Count parts. With the last one come to the meeting, and if all others come within 5 ms send the first round;
        the rest is for `wait`.
        """
        self._num_pushed += 1
        self._stream = stream
        if self._num_pushed == self._num_parts:
            self._meeting.arrive("transition")
            if self._meeting.is_complete(patience_s=START_PATIENCE_S):
                self._has_met = True
                self._post_what_can_be()

    def abandon(self) -> None:
        """Make the coming transition fail on every rank."""
        self._check_usable()
        self._meeting.abandon("can't take part in the transition; its own error says why")

    def wait(self, *, deadline_s: float) -> None:
        """Meet the other ranks if that is still to do, then run what is left of the rounds.

        Raises:
            PeerTimeout, TransportError: the message has the group, rank, round and what each rank was doing last.
        """
        self._check_usable()
        deadline = time.monotonic() + deadline_s
        if not self._has_met:
            self._meeting.wait(timeout_s=deadline_s)
            self._has_met = True
        with self._on_stream():
            while self._next < len(self._rounds) or self._flying:
                if self._can_post():
                    self._post()
                else:
                    self._land(deadline)
        self._finish(deadline)
        self._circle.record.enter(f"finished transition {self._meeting.number}")

    def exchange(self, words: Mapping[int, Words], *, deadline_s: float) -> dict[int, Words]:
        """Swap words as messages; see `BoundTransfer.exchange`."""
        self._check_usable()
        deadline = time.monotonic() + deadline_s
        sends = {peer: torch.from_numpy(w.view(np.int64)).to(self._device) for peer, w in words.items() if len(w)}
        receives = {peer: torch.empty_like(t) for peer, t in sends.items()}
        what = f"swapping words with ranks {sorted(sends)}"
        try:
            with self._on_stream():
                wire = Exchange(self._circle.handle, list(sends.items()), list(receives.items()))
                for work in wire.post() if sends else []:
                    self._await(work, deadline)
                self._poll(None, deadline, what)
                found = {peer: t.cpu().numpy().view(np.uint64) for peer, t in receives.items()}
        except RuntimeError as error:
            raise self._failure(what, error, late=time.monotonic() >= deadline) from error
        return {peer: found.get(peer, np.empty(0, np.uint64)) for peer in words}

    def warm_up(self, *, timeout_s: float) -> None:
        """On a device, have all ranks open their connections now and not in the first step; every rank calls it."""
        if self._device.type == "cuda":
            handle, size = self._circle.handle, self._circle.size
            words = torch.zeros(size, dtype=torch.uint8, device=self._device)
            for work in AllGather(handle, range(size), [words], [torch.zeros_like(words[:1])]).post():
                work.wait()
            peers = {peer for r in self._rounds if isinstance(r.wire, Exchange) for peer in r.wire.peers}
            self.exchange({peer: np.zeros(1, np.uint64) for peer in sorted(peers)}, deadline_s=timeout_s)

    def close(self) -> None:
        """Release staging and tables. Groups are the caller's."""
        self._closed = True
        for r in self._rounds:
            for runner in r.runners:
                runner.close()
        self._staging.close()
        self._rounds, self._flying = [], []

    def _can_post(self) -> bool:
        """Whether the next round may start: its hop has begun, it has a buffer, no other communicator is busy."""
        if self._next == len(self._rounds):
            return False
        upcoming = self._rounds[self._next]
        flying = [self._rounds[f.index] for f in self._flying]
        if any(r.hop != upcoming.hop for r in flying):
            return False
        if upcoming.is_staged and sum(r.is_staged for r in flying) == NUM_BUFFERS:
            return False
        gathers = any(isinstance(r.wire, AllGather) for r in (*flying, upcoming))
        handles = {id(r.wire.handle) for r in (*flying, upcoming) if r.wire is not None}
        return len(handles) <= 1 or not gathers

    def _post_what_can_be(self) -> None:
        with self._on_stream():
            while self._can_post():
                self._post()

    def _post(self) -> None:
        index = self._next
        upcoming = self._rounds[index]
        upcoming.pack.launch(self._stream)
        works: list[dist.Work] = []
        if upcoming.wire is not None:
            self._note(index)
            try:
                works = upcoming.wire.post()
            except RuntimeError as error:
                raise self._failure(f"{self._where(index)} could not start", error, late=False) from error
        upcoming.meanwhile.launch(self._stream)
        self._next += 1
        self._flying.append(_Flying(index, works))

    def _land(self, deadline: float) -> None:
        """Wait for the round that holds the oldest buffer, or else for the oldest, and unpack it."""
        staged = [f for f in self._flying if self._rounds[f.index].is_staged]
        chosen = (staged or self._flying)[0]
        self._flying.remove(chosen)
        landing = self._rounds[chosen.index]
        try:
            for work in chosen.works:
                self._await(work, deadline)
        except RuntimeError as error:
            what = f"{self._where(chosen.index)} failed while {landing.wire}"
            raise self._failure(what, error, late=time.monotonic() >= deadline) from error
        landing.unpack.launch(self._stream)
        if self._landed:
            self._landed[chosen.index].record()

    def _await(self, work: dist.Work, deadline: float) -> None:
        """On the host block until `work` is done; on a device let the stream wait (with a time-out, torch blocks)."""
        if self._device.type == "cuda":
            work.wait()
        else:
            work.wait(datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    def _finish(self, deadline: float) -> None:
        """On a device, poll the rounds' events in order."""
        for index, event in enumerate(self._landed):
            self._poll(event, deadline, self._where(index))

    def _poll(self, event: torch.cuda.Event | None, deadline: float, what: str) -> None:
        """Wait for an event (of all that is queued where None); from time to time see whether the other ranks live."""
        if self._device.type != "cuda":
            return
        if event is None:
            event = torch.cuda.Event()
            event.record()
        begin = time.monotonic()
        look = begin + LOOK_S
        while not event.query():
            now = time.monotonic()
            if now >= deadline:
                raise self._failure(f"{what} did not finish on {self._device}", None, late=True)
            if now >= look:
                look = now + LOOK_S
                self._circle.record.enter(f"waiting in {what}")
                if gone := self._circle.record.gone():
                    raise self._failure(f"{what} can't finish: the process of ranks {gone} is gone", None, late=False)
            if now - begin > SPIN_S:
                time.sleep(NAP_S)

    def _note(self, index: int) -> None:
        """Say which round comes now: each on the host; on a device, where the host runs ahead, only the first."""
        if self._device.type != "cuda" or index == 0:
            self._circle.record.enter(self._where(index))

    def _where(self, index: int) -> str:
        current = self._rounds[index]
        within = [i for i, r in enumerate(self._rounds) if r.hop == current.hop]
        return f"transition {self._meeting.number}, hop {current.hop}, round {within.index(index)}"

    def _failure(self, what: str, error: RuntimeError | None, *, late: bool) -> TransportError:
        """The error to raise; from here on the communicator can't be trusted."""
        cause = f": {error}" if error is not None else ""
        self._broken = f"rank {self._circle.rank} of group {self._circle.name!r}: {what}{cause}"
        return (PeerTimeout if late else TransportError)(
            f"{self._broken}; {self._circle.record.report()}. Training weights are intact. The group is broken: abort "
            "it on every rank, make a new one, and bind again"
        )

    def _check_usable(self) -> None:
        if self._closed:
            raise StateError("this transfer is closed")
        if self._broken:
            raise StateError(
                f"the group of this transfer is broken ({self._broken}): abort the process groups on every rank, make "
                "new ones, and bind a new Resharder to them"
            )

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(queue_of(self._device, self._stream))
