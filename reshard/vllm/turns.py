"""Pushes of several trainer ranks, one after another and in step.

The first rank alone speaks to the engine; the others learn from it when the engine is open, and what came of the push.
So all ranks of a push end with it or with an error that says where it went wrong, and none goes on generating from an
engine that another one knows to be broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from reshard.errors import StateError, TransportError
from reshard.vllm.exchange import Exchange


class Turns:
    """One trainer rank's count of a session's pushes; ``lead`` is for rank 0, ``follow`` for the others."""

    def __init__(self, exchange: Exchange) -> None:
        """``exchange``: the session's."""
        self._exchange, self._num_turns = exchange, 0

    @contextmanager
    def lead(self) -> Iterator[Callable[[], None]]:
        """Push as rank 0; yields a call by which it says that the engine is open. Its error is the others' as well."""
        self._num_turns += 1
        turn, told = f"push/{self._num_turns}", False

        def opened() -> None:
            nonlocal told
            self._exchange.put(f"{turn}/opened", b"")
            told = True

        self._exchange.put(f"{turn}/called", b"")
        try:
            yield opened
        except BaseException as error:
            words = (str(error) or repr(error)).encode()
            self._exchange.put(f"{turn}/{'ended' if told else 'opened'}", words)
            raise
        self._exchange.put(f"{turn}/ended", b"")

    def follow(self, run: Callable[[], object], *, deadline_s: float) -> None:
        """Push as another rank: ``run`` is its own part, once the engine is open.

        A rank that comes when its push has ended gets what came of it: all ranks count the same transitions.

        Raises:
            PeerTimeout: rank 0 did not push within ``deadline_s``; this rank may try again.
            StateError: rank 0 could not open the engine; nothing has changed.
            TransportError: the push failed elsewhere, in rank 0's words, or rank 0 is gone.
        """
        turn = f"push/{self._num_turns + 1}"
        self._exchange.get(f"{turn}/called", waiting_for="trainer rank 0 to push", timeout_s=deadline_s)
        self._num_turns += 1
        refusal = self._exchange.get(f"{turn}/opened", waiting_for="the engine to open", timeout_s=math.inf)
        if refusal:
            raise StateError(refusal.decode())
        run()
        outcome = self._exchange.get(f"{turn}/ended", waiting_for="the engine to finish", timeout_s=math.inf)
        if outcome:
            raise TransportError(f"the push failed, as trainer rank 0 saw it: {outcome.decode()}")
