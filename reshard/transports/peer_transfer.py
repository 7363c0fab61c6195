"""How a transition runs on one rank of the ``peer`` transport.

Each part has a course of its own: wait until its receivers have opened their destination, write, say so, and wait for
what others send, hop by hop. A course goes on whenever this rank is in a call, so parts overlap and come in any order.
Counters on shared pages (`reshard.transports.peer_page`) carry all of it. A rank whose peer dies sees the closed
connection; one whose peer gives up sees its published failure; one whose peer stops waits until the deadline. All three
errors name the culprit, and this rank then publishes its own failure, so that nobody waits for it in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from reshard import _C
from reshard.arena import Channel, Deadline
from reshard.errors import DeviceError, PeerTimeout, StateError, TransportError
from reshard.transports.base import BoundTransfer, Words
from reshard.transports.peer_link import IncomingLink, OutgoingLink
from reshard.transports.peer_page import MAX_HOPS, Failed, OwnPage, Page
from reshard.transports.runner import Launches, drain_stream

if TYPE_CHECKING:
    import torch

WAIT_SLICE_S = 0.02
BUSY_SLICE_S = 0.0005
"""How long a wait for one part leaves others alone whose writes may end meanwhile."""
CLOSE_TIMEOUT_S = 30.0
WORDS_A_PACKET = 4000


@dataclass(frozen=True, slots=True)
class Leg:
    """What this rank writes of one part in one hop, and who is told."""

    launches: Launches
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """This rank's part in every transition.

    ``legs`` are by (part, hop); ``arrivals[part][sender]`` lists the hops that bring something; ``in_place`` has, by
    the other rank (this one for copies inside it), the positions of copies with nothing to do.
    """

    num_parts: int
    legs: Mapping[tuple[int, int], Leg]
    arrivals: Mapping[int, Mapping[int, Sequence[int]]]
    in_place: Mapping[int, frozenset[int]]

    def hops(self, part: int) -> list[int]:
        """The hops in which this rank writes something of the part."""
        return sorted(hop for p, hop in self.legs if p == part)


class Step(Protocol):
    """Something that a course waits for."""

    @property
    def what(self) -> str:
        """What is awaited, after 'for rank N'."""

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether it has come."""

    def late(self) -> list[int]:
        """The ranks that it still hangs on; none where it hangs on the device."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Counters of other ranks have reached their targets."""

    what: str
    targets: tuple[tuple[int, int, int], ...]
    """(rank, address, value)."""

    def wait(self, seconds: float) -> bool:
        """See `Step`."""
        if seconds <= 0:
            return not self.late()
        end = time.monotonic() + seconds
        return all(
            _C.counters_wait([address], value, max(end - time.monotonic(), 0.0)) < 0
            for _, address, value in self.targets
        )

    def late(self) -> list[int]:
        """See `Step`."""
        return [rank for rank, address, value in self.targets if _C.counter_load(address) < value]


@dataclass(frozen=True, slots=True)
class Written:
    """The device has done what was launched."""

    what: str
    launches: Launches

    def wait(self, seconds: float) -> bool:
        """See `Step`."""
        return self.launches.wait(seconds)

    def late(self) -> list[int]:
        """See `Step`."""
        return []


@dataclass(slots=True)
class Course:
    """A part on its way: the step that it waits at, and those after it."""

    rest: Iterator[Step]
    step: Step | None = field(init=False)

    def __post_init__(self) -> None:
        self.step = next(self.rest, None)

    def advance(self, seconds: float) -> bool:
        """Go on as far as it goes, waiting at most `seconds` at a step; return whether the part is complete."""
        while self.step is not None:
            if not self.step.wait(seconds):
                return False
            self.step = next(self.rest, None)
        return True


class PeerTransfer(BoundTransfer):
    """Counters, links and a course for each part."""

    def __init__(
        self,
        rank: int,
        device: torch.device | None,
        own: OwnPage,
        incoming: Sequence[IncomingLink],
        outgoing: Sequence[OutgoingLink],
        route: Route,
    ) -> None:
        self._rank, self._device, self._own, self._route = rank, device, own, route
        self._incoming = {link.rank: link for link in incoming}
        self._outgoing = {link.rank: link for link in outgoing}
        self._pages = {link.rank: Page(link.control.address, route.num_parts) for link in outgoing}
        self._epoch = 0
        self._courses: dict[int, Course] = {}
        self._closed = False
        launches = [leg.launches for leg in route.legs.values()]
        self.in_place = frozenset().union(*route.in_place.values())
        self.num_launches = sum(each.num_launches for each in launches)
        self.staging_bytes = sum(each.device_bytes for each in launches)

    # ---- a transition ----

    def begin(self, *, stream: int | None) -> None:
        """Open this rank's destination, and push the parts that this rank sends nothing of.

        On a GPU it first waits for what is queued on the stream: the destination may still be read there.
        """
        if self._closed:
            raise StateError("this transfer is closed")
        with self._reporting():
            if self._incoming:
                drain_stream(self._device, stream)
        self._courses = {}
        _C.counter_store(self._own.page.released, self._epoch)
        self._epoch += 1
        _C.counter_store(self._own.page.ready, self._epoch)
        with self._reporting():
            for part in range(self._route.num_parts):
                if (part, 0) not in self._route.legs:
                    self._courses[part] = Course(self._course(part, stream))
                    self._courses[part].advance(0.0)

    def push(self, part: int, *, stream: int | None) -> None:
        """Write the part at once where every receiver is ready already, else in a later call."""
        with self._reporting():
            if part not in self._courses:
                self._courses[part] = Course(self._course(part, stream))
            for course in self._courses.values():
                course.advance(0.0)

    def wait_part(self, part: int, *, deadline_s: float) -> None:
        """Block until the part is complete on this rank, and go on with the others meanwhile."""
        if part not in self._courses:
            raise StateError(f"part {part} was not pushed: this rank sends some of it, so push({part}) comes first")
        self._complete(part, time.monotonic() + deadline_s, deadline_s)

    def _complete(self, part: int, deadline: float, deadline_s: float) -> None:
        course = self._courses[part]
        others = [other for other in self._courses.values() if other is not course]
        with self._reporting():
            while not course.advance(BUSY_SLICE_S if others else WAIT_SLICE_S):
                assert course.step is not None
                self._check(course.step, deadline, deadline_s)
                others = [other for other in others if not other.advance(0.0)]

    def wait(self, *, deadline_s: float) -> None:
        """Wait for every part."""
        deadline = time.monotonic() + deadline_s
        for part in range(self._route.num_parts):
            self._complete(part, deadline, deadline_s)

    def _course(self, part: int, stream: int | None) -> Iterator[Step]:
        epoch = self._epoch
        for hop in self._route.hops(part):
            leg = self._route.legs[part, hop]
            yield self._arrivals(part, epoch, before_hop=hop, what=f"to send hop {hop - 1}")
            opened = tuple((receiver, self._pages[receiver].ready, epoch) for receiver in leg.receivers)
            yield Reached("to open its destination", opened)
            leg.launches.launch(stream)
            yield Written(f"rank {self._rank}'s writes of part {part}, hop {hop}", leg.launches)
            for receiver in leg.receivers:
                _C.counter_store(self._pages[receiver].done(self._rank, part), epoch * MAX_HOPS + hop + 1)
        yield self._arrivals(part, epoch, before_hop=MAX_HOPS, what="to send its last bytes")

    def _arrivals(self, part: int, epoch: int, *, before_hop: int, what: str) -> Reached:
        last = {
            sender: max((hop for hop in hops if hop < before_hop), default=-1)
            for sender, hops in self._route.arrivals.get(part, {}).items()
        }
        page = self._own.page
        targets = [(s, page.done(s, part), epoch * MAX_HOPS + hop + 1) for s, hop in sorted(last.items()) if hop >= 0]
        return Reached(what, tuple(targets))

    # ---- failures ----

    def abandon(self) -> None:
        """Count the coming transition as failed on this rank, and say so."""
        self._epoch += 1
        self._publish_failure(self._rank)

    def _check(self, step: Step, deadline: float, deadline_s: float) -> None:
        """Raise if a rank that the step hangs on can't come any more, or the time is up."""
        for peer in step.late():
            failed = self._failed(peer)
            if failed.epoch >= self._epoch and peer in step.late():
                culprit = failed.culprit
                blamed = "" if culprit == peer else f" because of rank {culprit}"
                raise self._broken(TransportError, culprit, f"rank {peer} gave up on it{blamed}; it had {step.what}")
            if self._channel(peer).peer_has_closed and peer in step.late():
                again = "bind again once the rank is back"
                raise self._broken(TransportError, peer, f"rank {peer} is gone; it had {step.what}", again)
        if time.monotonic() < deadline:
            return
        late = step.late()
        whom = f"rank {late[0]} {step.what}" if late else step.what
        again = "check that it is alive and that every rank runs the same number of transitions, or allow more time"
        culprit = late[0] if late else self._rank
        raise self._broken(PeerTimeout, culprit, f"waited {deadline_s:g} s for {whom}", again)

    def _broken(
        self, kind: type[TransportError], culprit: int, what: str, again: str = "run the next transition on every rank"
    ) -> TransportError:
        self._publish_failure(culprit)
        return kind(
            f"rank {self._rank}, transition {self._epoch}: {what}. This rank's training weights are intact; {again}"
        )

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Publish what this rank's own device did to it; failures of others are published where they are found."""
        try:
            yield
        except DeviceError:
            self._publish_failure(self._rank)
            raise

    def _publish_failure(self, culprit: int) -> None:
        self._courses = {}
        self._own.page.failed.store(self._epoch, culprit)
        for page in self._pages.values():
            page.sender_failed(self._rank).store(self._epoch, culprit)
        _C.counter_store(self._own.page.released, self._epoch)

    def _failed(self, peer: int) -> Failed:
        return self._pages[peer].failed if peer in self._pages else self._own.page.sender_failed(peer)

    def _channel(self, peer: int) -> Channel:
        """The connection to a peer; of two, that which the lower rank opened, so that both ends take the same."""
        first, second = (self._outgoing, self._incoming) if self._rank < peer else (self._incoming, self._outgoing)
        link = first.get(peer) or second[peer]
        return link.channel

    # ---- beside transitions ----

    def release(self, *, deadline_s: float) -> None:
        """Say that this rank's generation is over; wait for that of ranks which read this rank's weights in place."""
        _C.counter_store(self._own.page.released, self._epoch)
        readers = [peer for peer in self._outgoing if self._route.in_place.get(peer)]
        step = Reached(
            "to end its generation, which reads this rank's training weights in place: call train() there too",
            tuple((reader, self._pages[reader].released, self._epoch) for reader in sorted(readers)),
        )
        deadline = time.monotonic() + deadline_s
        while not step.wait(WAIT_SLICE_S):
            late = [peer for peer in step.late() if not self._channel(peer).peer_has_closed]
            if late and time.monotonic() >= deadline:
                raise PeerTimeout(f"rank {self._rank}: waited {deadline_s:g} s for rank {late[0]} {step.what}")
            if not late:
                return

    def exchange(self, words: Mapping[int, Words], *, deadline_s: float) -> dict[int, Words]:
        """Swap words over the connections, pair by pair in one order on all ranks; see `BoundTransfer.exchange`."""
        deadline = Deadline(deadline_s)
        found: dict[int, Words] = {}
        for peer in sorted(words, key=lambda other: (min(other, self._rank), max(other, self._rank))):
            what = f"rank {peer} to swap words"
            channel = self._channel(peer)
            try:
                if self._rank < peer:
                    _send_words(channel, words[peer], deadline, what)
                found[peer] = _receive_words(channel, len(words[peer]), deadline, what)
                if self._rank > peer:
                    _send_words(channel, words[peer], deadline, what)
            except TransportError as error:
                raise type(error)(f"rank {self._rank}, swapping words with rank {peer}: {error}") from error
        return found

    def close(self) -> None:
        """Unmap the peers' memory, wait until the peers have unmapped this rank's, and take it back."""
        if self._closed:
            return
        self._closed = True
        for leg in self._route.legs.values():
            leg.launches.close()
        for receiver in self._outgoing.values():
            receiver.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for link in self._incoming.values():
            while not link.channel.peer_has_closed:
                if time.monotonic() >= deadline:
                    raise PeerTimeout(
                        f"rank {link.rank} still has memory of rank {self._rank} mapped after {CLOSE_TIMEOUT_S:g} s: "
                        "close the transfer on every rank"
                    )
                link.channel.discard()
                time.sleep(WAIT_SLICE_S / 10)
            for share in link.shares:
                share.end()
            link.channel.close()
        self._own.arena.close()


def _send_words(channel: Channel, words: Words, deadline: Deadline, what: str) -> None:
    for start in range(0, len(words), WORDS_A_PACKET):
        body: dict[str, object] = {"words": words[start : start + WORDS_A_PACKET].tolist()}
        channel.send("words", body, timeout_s=deadline.remaining_s(what))


def _receive_words(channel: Channel, num: int, deadline: Deadline, what: str) -> Words:
    found: list[int] = []
    while len(found) < num:
        body, _ = channel.receive("words", timeout_s=deadline.remaining_s(what))
        packet = body.get("words")
        if not isinstance(packet, list) or not packet or len(found) + len(packet) > num:
            raise TransportError(f"expected {num} words from {channel.peer}, got a packet that can't be read")
        found += packet
    return np.array(found, dtype=np.uint64)
