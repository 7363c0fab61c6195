"""What the controller and its workers say to one another. Values only: no callables, no exceptions, no live handles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Run `method` with these keyword arguments on one rank.

    Attributes:
        call_id: the same on all ranks of one group call.
        method: name of a registered method.
        arguments: this rank's share, by parameter name.
        wants_value: False where the controller doesn't collect from this rank; the reply's value is then None.
    """

    call_id: int
    method: str
    arguments: Mapping[str, object]
    wants_value: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A call that ended well.

    Attributes:
        call_id: of the call.
        rank: who answers.
        value: what the method returned, or None if it wasn't wanted.
        phase_seconds: the worker's own phases, by path.
    """

    call_id: int
    rank: int
    value: object
    phase_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A call that raised, or whose worker is gone.

    Attributes:
        call_id: of the call.
        rank: who failed.
        method: what was called; "__init__" for a worker that could not be made.
        error_type: the exception's qualified name.
        message: the exception's text.
        traceback: the worker's traceback, as text.
    """

    call_id: int
    rank: int
    method: str
    error_type: str
    message: str
    traceback: str


Message = Reply | Failure


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """One call on one rank, for which a message will come."""

    call_id: int
    rank: int
