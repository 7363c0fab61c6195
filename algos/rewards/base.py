"""What a reward function is given and gives, and the plain way of calling one: here, sample by sample.

A reward function is called by keyword as ``f(data_source=, solution_str=, ground_truth=, extra_info=)``, and
``solution_str`` is the response's text alone. It returns a number; or a dict with ``score`` and further numbers that
become metrics (anything else in it is ignored); or None for a sample that it can't score.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import TracebackType
from typing import Any, Protocol

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response and what its row says about the right one."""

    data_source: str
    response: str
    ground_truth: Any
    extra_info: dict[str, Any] | None = None

    def arguments(self) -> dict[str, Any]:
        """The sample as a reward function's keyword arguments."""
        return {
            "data_source": self.data_source,
            "solution_str": self.response,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A sample's score, or None with the reason why it has none."""

    score: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


class Reward(Protocol):
    """Scores samples. ``close`` ends whatever processes belong to it; it may be closed twice."""

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One Outcome a sample, in order; never raises for what a sample holds."""
        ...

    def close(self) -> None:
        """Ends the reward's processes, if it has any."""
        ...


class InlineReward:
    """Calls a function in this process, one sample after the other."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One Outcome a sample; a sample on which the function raises is unscored."""
        return [call(self._function, sample) for sample in samples]

    def close(self) -> None:
        """Nothing to end."""


class _Catch:
    """Keeps the error that its block raised, whatever its type: user code may raise anything."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> "_Catch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False


def call(function: RewardFunction, sample: Sample) -> Outcome:
    """Calls a reward function on one sample; an error or a result that is no score makes the sample unscored."""
    outcome = Outcome(score=None)
    with _Catch() as caught:
        outcome = to_outcome(function(**sample.arguments()))
    if caught.error is None:
        return outcome
    return Outcome(score=None, error=f"{type(caught.error).__name__}: {caught.error}")


def to_outcome(result: Any) -> Outcome:
    """What a reward function returned, as an Outcome.

    Raises:
        TypeError: the result is neither a number, a dict with ``score``, nor None.
        ValueError: the score is not finite.
    """
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(f"a reward function's dict needs the key 'score', got {', '.join(map(str, result))}")
        numbers = {str(name): value for name, value in result.items() if name != "score" and _is_number(value)}
        return Outcome(score=_to_score(result["score"]), metrics={name: float(n) for name, n in numbers.items()})
    return Outcome(score=_to_score(result))


def _to_score(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping | list | tuple):
        raise TypeError(f"a reward function returns a number, a dict with 'score', or None; got {value!r}"[:200])
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"a reward must be finite, got {score}")
    return score


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
