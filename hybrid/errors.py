"""The errors that hybrid raises: callers' mistakes, missing resources, and workers that failed or kept silent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.messages import Failure


class HybridError(Exception):
    """Base of every error that hybrid raises on purpose."""


class DispatchError(HybridError, ValueError):
    """A call's arguments or results don't fit its dispatch: not divisible, row counts differ, wrong number of parts."""


class ResourceError(HybridError, RuntimeError):
    """The machine or cluster lacks what a pool asks for; the message names the resource and by how much it is short."""


class BackendUnavailable(HybridError, RuntimeError):
    """A backend that was asked for isn't usable here; the message says why and what to do."""


class WorkerError(HybridError, RuntimeError):
    """A worker raised. `failures` has one entry per rank that did, with the worker's own traceback as text."""

    def __init__(self, message: str, failures: Sequence[Failure]) -> None:
        """Keep the failures beside the message, which names ranks and shows the first traceback."""
        super().__init__(message)
        self.failures = tuple(failures)


class WorkerTimeout(HybridError, TimeoutError):
    """Workers did not answer before the call's deadline. `ranks` are the silent ones."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        """Keep the silent ranks beside the message."""
        super().__init__(message)
        self.ranks = tuple(ranks)


class GroupStuck(HybridError, RuntimeError):
    """A worker group or call can't be used any more: a call never came back, a shutdown, a result taken twice."""
