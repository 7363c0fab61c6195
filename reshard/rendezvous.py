"""Meetings of ranks through a key-value store, before they touch a communicator.

Note: one fate
    A rank that is late or dead then costs an error, not the communicator. Each meeting has a number, counted by every
    rank alike, and one fate that all of them read: the last rank to arrive writes "go"; a rank whose patience ends, or
    that can't take part, writes its name instead. The store's compare-and-set lets one of them win. A rank that arrives
    after its meeting failed gets the same error at once, so all ranks count the same meetings and stay in step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from reshard.errors import PeerTimeout, TransportError
from reshard.step_record import ReachedStore, StepRecord, Store

GO = "go"
TIMED_OUT, ABANDONED = "timed out", "abandoned"
LOOK_S = 0.25
"""How often a rank that waits looks whether the others still live."""
SHORTEST_NAP_S, LONGEST_NAP_S = 5e-5, 0.05


class Rendezvous:
    """Numbered meetings of `ranks` (see the note "one fate").

    Args:
        store: reached by every rank.
        name: the same on every rank; one series of meetings a name.
        ranks: who has to come, in any one order.
        record: where steps are written; its rank is this rank.
    """

    def __init__(self, store: Store, name: str, *, ranks: Sequence[int], record: StepRecord) -> None:
        self.name, self.ranks = name, tuple(ranks)
        self._store, self._record, self._rank = ReachedStore(store), record, record.rank
        self._number = self._store.count(self._joined(record.rank))
        self._what = ""
        self._arrived_at = 0.0

    @property
    def number(self) -> int:
        """Meetings that this rank has come to, or given up, so far."""
        return self._number

    def arrive(self, what: str, payload: str = "") -> None:
        """Come to the next meeting without waiting; `what` names it in errors, `payload` is for `payloads`."""
        self._number += 1
        self._what = f"{what} {self._number}"
        self._arrived_at = time.monotonic()
        self._store.set(self._joined(self._rank), str(self._number))
        if payload:
            self._store.set(self._key(f"payload/{self._rank}"), payload)
        self._record.enter(f"arrived at {self._what}")
        if self._store.count(self._key("arrivals"), 1) == len(self.ranks):
            self._decide(GO)
            self._forget(self._number - 1)

    def is_complete(self, *, patience_s: float = 0.0) -> bool:
        """Whether all have come, waiting up to `patience_s` for it.

        Raises:
            PeerTimeout, TransportError: the meeting failed on this rank or another one.
        """
        end = time.monotonic() + patience_s
        while not self._store.has(self._key("fate")):
            now = time.monotonic()
            if now >= end:
                return False
            time.sleep(min(max((now - self._arrived_at) / 20, SHORTEST_NAP_S), LONGEST_NAP_S, end - now))
        fate = self._store.get(self._key("fate"))
        if fate != GO:
            self._fail(fate)
        return True

    def wait(self, *, timeout_s: float) -> None:
        """Wait until all have come.

        Raises:
            PeerTimeout: somebody has not within `timeout_s`; the message names them and what each rank did last.
            TransportError: the process of somebody who has not come is gone, or a rank abandoned the meeting.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_complete(patience_s=min(LOOK_S, max(deadline - time.monotonic(), 0.0))):
            gone = self._record.gone(self._missing())
            if gone or time.monotonic() >= deadline:
                waited = f"after {time.monotonic() - self._arrived_at:.1f} s"
                reason = f"the process of {_named(gone)} is gone" if gone else f"waited {timeout_s:g} s"
                kind = ABANDONED if gone else TIMED_OUT
                if self._decide(f"{kind}: rank {self._rank} gave up {waited}: {reason}") == GO:
                    return

    def payloads(self) -> dict[int, str]:
        """What each rank brought to the meeting that is complete now."""
        return {rank: self._store.get(self._key(f"payload/{rank}")) for rank in self.ranks}

    def abandon(self, why: str) -> None:
        """Make the coming meeting fail on every rank: this rank can't take part in it."""
        self._number += 1
        self._store.set(self._joined(self._rank), str(self._number))
        self._decide(f"{ABANDONED}: rank {self._rank} {why}")

    def _decide(self, fate: str) -> str:
        return self._store.decide(self._key("fate"), fate)

    def _missing(self) -> list[int]:
        """Ranks that have not come to this meeting."""
        return [rank for rank in self.ranks if self._store.count(self._joined(rank)) < self._number]

    def _fail(self, fate: str) -> None:
        """Raise what `fate` says."""
        kind, _, text = fate.partition(": ")
        missing = self._missing()
        absent = f"{_named(missing)} did not come" if missing else "all have come since"
        message = (
            f"rank {self._rank}, {self._what} of ranks {list(self.ranks)}: {absent}; {text}. Nothing was sent; "
            f"{self._record.report()}"
        )
        raise (PeerTimeout if kind == TIMED_OUT else TransportError)(message)

    def _joined(self, rank: int) -> str:
        return f"{self.name}/joined/{rank}"

    def _key(self, what: str) -> str:
        return f"{self.name}/{self._number}/{what}"

    def _forget(self, number: int) -> None:
        """Drop the keys of a meeting that all have left: whoever comes to the next one has."""
        fate = f"{self.name}/{number}/fate"
        if number > 0 and self._store.has(fate) and self._store.get(fate) == GO:
            for what in ("arrivals", "fate", *(f"payload/{rank}" for rank in self.ranks)):
                self._store.forget(f"{self.name}/{number}/{what}")


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
