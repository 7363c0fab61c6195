"""Ctrl-C and SIGTERM: the first asks for a clean end, the second aborts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Aborted(KeyboardInterrupt):
    """A second signal came before the step was done."""

    def __init__(self, signum: int) -> None:
        """Keep the signal's number, from which the exit code follows."""
        super().__init__(f"aborted by a second {signal.Signals(signum).name}")
        self.signum = signum


class StopRequests:
    """Catches the two signals while it is entered; loops ask ``signum`` between steps.

    Handlers can be set in the main thread only; elsewhere this is inert and ``signum`` stays None. A third signal finds
    the handlers that were there before.
    """

    def __init__(self) -> None:
        """Start with no signal seen."""
        self.signum: int | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> StopRequests:
        """Set the handlers."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Put the former handlers back."""
        self._restore()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            self._restore()
            raise Aborted(signum)
        self.signum = signum
        name = signal.Signals(signum).name
        # A print could be inside another print that the signal interrupted; a write to the descriptor can't be.
        os.write(2, f"\n{name}: this step will be finished and a checkpoint written; again aborts\n".encode())

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
