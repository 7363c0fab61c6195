"""What each rank was doing last, in a key-value store that all of them reach: for messages about one that is missing.

The store is a ``torch.distributed.Store`` (TCP, file or in-process). Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from reshard.errors import TransportError

T = TypeVar("T")


class Store(Protocol):
    """What is needed of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102
    def add(self, key: str, amount: int, /) -> int: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...  # noqa: D102
    def delete_key(self, key: str, /) -> bool: ...  # noqa: D102


class ReachedStore:
    """A store whose failures are TransportErrors: every call needs the process that serves it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._call("set", lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        """Read a value that is there."""
        return self._call("get", lambda: self._store.get(key).decode())

    def count(self, key: str, amount: int = 0) -> int:
        """Add to a counter; returns its new value."""
        return self._call("add", lambda: self._store.add(key, amount))

    def has(self, key: str) -> bool:
        """Whether a key was written."""
        return self._call("check", lambda: self._store.check([key]))

    def decide(self, key: str, value: str) -> str:
        """Write a value unless the key has one; returns what it has now."""
        return self._call("compare_set", lambda: self._store.compare_set(key, "", value).decode())

    def forget(self, key: str) -> None:
        """Delete a key if it is there."""
        self._call("delete_key", lambda: self._store.delete_key(key))

    def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            raise TransportError(
                f"the store that ranks meet at can't be reached ({what}: {error}); the process that serves it, as a "
                "rule rank 0 or the launcher, may be gone"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStep:
    """What a rank wrote last: its step, how long ago (by both hosts' clocks), and whether its process is gone.

    A process is known to be gone only by ranks of its own host.
    """

    step: str
    seconds_ago: float
    process: str
    is_gone: bool

    def __str__(self) -> str:
        """One line."""
        state = f" ({self.process} is gone)" if self.is_gone else ""
        return f"{self.step}, {self.seconds_ago:.1f} s ago{state}"


class StepRecord:
    """This rank's last step, written into the store, and those of the others, read from it.

    Args:
        store: reached by every rank.
        rank: this rank.
        ranks: all that write here.
    """

    def __init__(self, store: Store, *, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, tuple(ranks)
        self._store = ReachedStore(store)
        self._self = {"host": socket.gethostname(), "boot": _boot_id(), "pid": os.getpid(), "born": _born(os.getpid())}

    def enter(self, step: str) -> None:
        """Say what this rank is about to do."""
        self._store.set(_last_key(self.rank), json.dumps({"step": step, "time": time.time(), **self._self}))

    def read(self, ranks: Collection[int] | None = None) -> dict[int, LastStep | None]:
        """The last steps of `ranks` (all where left out); None for a rank that has never written one."""
        found: dict[int, LastStep | None] = {}
        for rank in self.ranks if ranks is None else ranks:
            known = self._store.has(_last_key(rank))
            found[rank] = self._parse(json.loads(self._store.get(_last_key(rank)))) if known else None
        return found

    def gone(self, ranks: Collection[int] | None = None) -> list[int]:
        """Those of `ranks` whose process has ended, as far as this host can tell."""
        return [rank for rank, last in self.read(ranks).items() if last is not None and last.is_gone]

    def report(self, ranks: Collection[int] | None = None) -> str:
        """What each of `ranks` was doing last, for an error message; never raises."""
        try:
            lines = [f"rank {rank}: {last or 'nothing yet'}" for rank, last in self.read(ranks).items()]
        except TransportError as error:
            return f"last steps unknown: {error}"
        return "last steps: " + "; ".join(lines)

    def _parse(self, fields: Mapping[str, object]) -> LastStep:
        pid, born, at = fields["pid"], fields["born"], fields["time"]
        assert isinstance(pid, int) and isinstance(at, float)
        here = self._self["boot"] != "" and fields["boot"] == self._self["boot"]
        return LastStep(
            step=str(fields["step"]),
            seconds_ago=max(time.time() - at, 0.0),
            process=f"process {pid} on {fields['host']}",
            is_gone=here and _born(pid) != born,
        )


def _last_key(rank: int) -> str:
    return f"last/{rank}"


def _boot_id() -> str:
    """Equal for processes that see each other in /proc: one boot of one kernel, one namespace of process numbers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _born(pid: int) -> int:
    """When a process of this host started, in clock ticks since boot; -1 when there is none, or only a dead one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])
