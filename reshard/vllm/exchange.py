"""How the processes of one weight-transfer session tell each other what they hold, before any weight moves.

A key-value store that the first trainer rank serves carries bytes under names; nothing is unpickled. Whoever waits
looks for a failure note between slices, so that an error on one side ends the other side too, with the same words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from reshard.errors import PeerTimeout, ReshardError, TransportError

_POLL_S = 0.01


class Exchange:
    """One process's view of the session.

    Args:
        store: a ``torch.distributed`` store that all processes of the session reach.
        session: the session's name: its keys start with it.
        timeout_s: seconds after which a wait ends in a PeerTimeout.
    """

    def __init__(self, store: Store, *, session: str, timeout_s: float) -> None:
        self.session, self.timeout_s = session, timeout_s
        self._store, self._prefix = store, f"reshard/{session}/"

    @property
    def store(self) -> Store:
        """What it speaks through."""
        return self._store

    def claim(self, what: str, limit: int) -> int:
        """The next number of ``what``, from 0, that no other process has.

        Raises:
            TransportError: all ``limit`` numbers are taken.
        """
        number = int(self._store.add(self._prefix + what, 1)) - 1
        if number >= limit:
            raise TransportError(
                f"{number + 1} processes came as {what} but the session expects {limit}: pass the number of all engine "
                "ranks (tensor x pipeline x data parallel size) to WeightSync.connect"
            )
        return number

    def put(self, key: str, data: bytes) -> None:
        """Publish ``data`` under ``key``."""
        with _reaching_the_store():
            self._store.set(self._prefix + key, data)  # type: ignore[arg-type]

    def get(self, key: str, *, waiting_for: str, timeout_s: float | None = None) -> bytes:
        """What was published under ``key``; waits until it is there, at most ``timeout_s`` or the session's time.

        Raises:
            PeerTimeout: ``waiting_for`` (a phrase for the message) did not come in time.
            TransportError: another process of the session failed, and its words are in the message, or trainer rank 0,
                which serves the store, is gone.
        """
        with _reaching_the_store():
            self._wait(self._prefix + key, waiting_for, timeout_s)
            data: bytes = self._store.get(self._prefix + key)
        return data

    def all(self, key: str, ranks: Iterable[int], *, who: str) -> list[bytes]:
        """What every rank of ``ranks`` published under ``key/rank``, in their order."""
        return [self.get(f"{key}/{rank}", waiting_for=f"{key} of {who} rank {rank}") for rank in ranks]

    def fail(self, who: str, error: BaseException) -> None:
        """Tell the others that this process can't go on, if the store is still there."""
        with suppress(TransportError):
            self.put("failed", f"{who}: {error}".encode())

    def guarded(self, who: str, step: Callable[[], None]) -> None:
        """Run ``step``; an error of this package in it is published before it goes on."""
        try:
            step()
        except PeerTimeout as error:
            if note := self._failure():
                raise TransportError(note) from error
            self.fail(who, error)
            raise
        except ReshardError as error:
            self.fail(who, error)
            raise

    def _wait(self, key: str, waiting_for: str, timeout_s: float | None) -> None:
        seconds = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + seconds
        while not self._store.check([key]):
            if note := self._failure():
                raise TransportError(note)
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"waited {seconds:g} s for {waiting_for}: check that all trainer ranks make the same calls of "
                    "WeightSync (connect, push) and that the engine has as many ranks as was said"
                )
            time.sleep(_POLL_S)

    def _failure(self) -> str:
        """What another process said when it failed; empty if none did."""
        if not self._store.check([self._prefix + "failed"]):
            return ""
        words: str = self._store.get(self._prefix + "failed").decode()
        return f"another process of the weight-transfer session failed: {words}"


@contextmanager
def _reaching_the_store() -> Iterator[None]:
    """An error of the store's connection says whose process has ended."""
    try:
        yield
    except DistError as error:
        raise TransportError(
            "trainer rank 0 is gone, which serves the store that the session's processes meet at: start trainers and "
            f"engine again, and connect anew ({str(error).splitlines()[0]})"
        ) from error
