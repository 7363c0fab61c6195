"""RewardManager: responses in, scores and metrics out."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from algos.data.rows import Row
from algos.errors import InputError
from algos.rewards.base import Outcome, Reward, Sample

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    """DAPO's soft limit: 0 up to ``max_response_length`` - ``buffer_length`` tokens, then down to -``factor``.

    Source: DAPO (arXiv 2503.14476), equation 13, times ``factor``.
    """

    max_response_length: int
    buffer_length: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        """Checks the sizes."""
        if not 0 < self.buffer_length <= self.max_response_length:
            raise InputError(
                f"the overlong buffer must have 1 to max_response_length={self.max_response_length} tokens, "
                f"got {self.buffer_length}"
            )

    def of(self, response_length: int) -> float:
        """The penalty, in [-factor, 0], of a response of so many tokens."""
        excess = response_length - (self.max_response_length - self.buffer_length)
        return -self.factor * min(1.0, max(0.0, excess / self.buffer_length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A batch's rewards: ``scores`` float32 [B] (0 where unscored), ``scored`` bool [B], both on the CPU.

    ``metrics`` hold the reward function's own numbers by their names, each the mean over the scored samples that have
    it (those of no scored sample are absent), ``overlong_penalty`` likewise, and ``num_unscored``. ``outcomes`` say
    what each sample got, and why one has no score.
    """

    scores: torch.Tensor
    scored: torch.Tensor
    metrics: dict[str, float]
    outcomes: tuple[Outcome, ...]


class RewardManager:
    """Scores responses with one reward; of each kind of failure the first sample that it leaves unscored is logged."""

    def __init__(self, reward: Reward, *, overlong: OverlongPenalty | None = None) -> None:
        self._reward = reward
        self._overlong = overlong
        self._reported: set[str] = set()

    def score(
        self, rows: Sequence[Row], responses: Sequence[str], response_lengths: Sequence[int] | None = None
    ) -> Scores:
        """Scores ``responses[i]``, the text of response i up to its stop token, against ``rows[i]``.

        ``response_lengths``, in tokens, are needed with an overlong penalty, which is added to the score.

        Raises:
            ValueError: the lengths of the arguments differ, or the lengths in tokens are missing.
        """
        import torch  # only here: worker processes import this package and must start quickly

        samples = [
            Sample(data_source=row.data_source, response=text, ground_truth=row.ground_truth, extra_info=row.extra_info)
            for row, text in zip(rows, responses, strict=True)
        ]
        outcomes = self._reward.score(samples)
        self._report(samples, outcomes)
        penalties = self._penalties(len(samples), response_lengths)
        scores = [
            0.0 if outcome.score is None else outcome.score + penalty
            for outcome, penalty in zip(outcomes, penalties, strict=True)
        ]
        return Scores(
            scores=torch.tensor(scores, dtype=torch.float32),
            scored=torch.tensor([outcome.score is not None for outcome in outcomes], dtype=torch.bool),
            metrics=self._metrics(outcomes, penalties),
            outcomes=tuple(outcomes),
        )

    def close(self) -> None:
        """Ends the reward's worker processes."""
        self._reward.close()

    def _report(self, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> None:
        for idx, (sample, outcome) in enumerate(zip(samples, outcomes, strict=True)):
            if outcome.score is not None:
                continue
            reason = outcome.error or "the reward function returned None"
            kind = reason.partition(":")[0]
            if kind not in self._reported:
                self._reported.add(kind)
                logger.warning(
                    "sample %d (data_source %r) is unscored and its group's statistics leave it out: %s. "
                    "More of this kind are only counted, in num_unscored.",
                    idx,
                    sample.data_source,
                    reason,
                )

    def _penalties(self, num_samples: int, response_lengths: Sequence[int] | None) -> list[float]:
        if self._overlong is None:
            return [0.0] * num_samples
        if response_lengths is None or len(response_lengths) != num_samples:
            raise ValueError(f"the overlong penalty needs the lengths of all {num_samples} responses, in tokens")
        return [self._overlong.of(int(length)) for length in response_lengths]

    def _metrics(self, outcomes: Sequence[Outcome], penalties: Sequence[float]) -> dict[str, float]:
        values: dict[str, list[float]] = defaultdict(list)
        for outcome, penalty in zip(outcomes, penalties, strict=True):
            if outcome.score is None:
                continue
            if self._overlong is not None:
                values["overlong_penalty"].append(penalty)
            for name, value in outcome.metrics.items():
                values[name].append(value)
        means = {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
        return {**means, "num_unscored": float(sum(outcome.score is None for outcome in outcomes))}
