"""Correction for a sampler that isn't quite the policy: weights for its bias, rejection of what went too far.

The inference engine's log-probs differ from the trainer's (kernels, precision, stale weights). With
x_t = log pi_old(train) - log pi_rollout at each sampled token, clamped to +-20, and per sequence its sum or mean:

- importance weights, `token` exp(x_t) or `sequence` exp(sum_t x_t), truncated from above at C (TIS: F. Yao et al.,
  "Your efficient RL framework secretly brings you off-policy RL training", 2025), or set to 0 outside [lo, hi] while
  the token stays in every denominator (IcePop: Ling team, "Small leak can sink a great ship", 2025);
- rejection, which takes tokens or whole sequences out of the mask: `k1` keeps ratios within [lo, hi], `k2` = x^2 / 2
  and `k3` = exp(x) - 1 - x keep divergences up to a limit; over single tokens (`token_*`) or a sequence's sum, mean or
  maximum (`seq_sum_*`, `seq_mean_*`, `seq_max_*`).

Weights are detached and multiply the policy loss. Correct a batch before its mini-batches are counted: the mask that
comes back is the one whose tokens `Totals` counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

from algos.aggregate import masked_mean

RejectionName = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]

_LOG_RATIO_LIMIT = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """A closed range of ratios, 0 <= low <= high."""

    low: float
    high: float

    def __post_init__(self) -> None:
        """Refuse ranges that hold nothing."""
        if not 0 <= self.low <= self.high:
            raise ValueError(f"bounds need 0 <= low <= high, got {self.low} and {self.high}")

    @classmethod
    def parse(cls, text: str | float) -> Bounds:
        """From "0.5_2.0", or one number h above 1, which stands for 1/h .. h."""
        parts = str(text).split("_")
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) == 2:
            return cls(numbers[0], numbers[1])
        if len(numbers) == 1 and numbers[0] > 1:
            return cls(1.0 / numbers[0], numbers[0])
        raise ValueError(f"expected bounds like 0.5_2.0, or one number above 1, got {text!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """How weights are made.

    Attributes:
        level: a weight per token, or one per sequence.
        limit: a number truncates weights from above; `Bounds` set weights outside to 0.
        normalize: divide by the batch's mean weight (over tokens, or over sequences).
    """

    level: Literal["token", "sequence"] = "token"
    limit: float | Bounds = 2.0
    normalize: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """One rule; `limit` is `Bounds` for k1 and the largest allowed divergence for k2 and k3."""

    name: RejectionName
    limit: float | Bounds

    def __post_init__(self) -> None:
        """Refuse a limit of the wrong kind."""
        if self.name.endswith("_k1") != isinstance(self.limit, Bounds):
            wanted = "Bounds of the ratio" if self.name.endswith("_k1") else "a number, the largest divergence"
            raise ValueError(f"rejection {self.name} needs {wanted}, got {self.limit!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Correction:
    """What a batch gets.

    Attributes:
        weights: float32 [B, R], detached, 0 outside `mask`; None if no weights were asked for.
        mask: bool [B, R], the tokens that still count.
        metrics: floats by name, prefix `rollout_corr/`.
    """

    weights: torch.Tensor | None
    mask: torch.Tensor
    metrics: dict[str, float]


def correct_rollout(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    importance: Importance | None = None,
    rejections: Sequence[Rejection] = (),
) -> Correction:
    """Compare the trainer's log-probs of the sampled tokens with the sampler's, [B, R] each, and correct for the gap.

    Every rule looks at the given mask; a token stays if all rules keep it. Weights are computed for all valid tokens
    and are then 0 where one was rejected.
    """
    log_ratio = torch.where(mask, old_log_probs.detach().float() - rollout_log_probs.detach().float(), 0.0)
    metrics = _gap_metrics(log_ratio, mask)
    kept = mask.clone()
    for rule in rejections:
        kept &= _keeps(rule, log_ratio, mask)
    if rejections:
        metrics["rs_masked_fraction"] = _fraction(mask & ~kept, mask)
        metrics["rs_seq_masked_fraction"] = _fraction(mask.any(-1) & ~kept.any(-1), mask.any(-1))
    weights = None
    if importance is not None:
        weights, found = _weights(importance, log_ratio, mask)
        metrics.update(found)
        weights = torch.where(kept, weights, 0.0)
    return Correction(weights, kept, {f"rollout_corr/{name}": value for name, value in metrics.items()})


def _weights(
    importance: Importance, log_ratio: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    per_sequence = importance.level == "sequence"
    exponent = log_ratio.sum(dim=-1, keepdim=True) if per_sequence else log_ratio
    raw = torch.exp(exponent.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))
    units = mask.any(dim=-1, keepdim=True) if per_sequence else mask
    if isinstance(importance.limit, Bounds):
        outside = (raw < importance.limit.low) | (raw > importance.limit.high)
        weights = torch.where(outside, 0.0, raw)
    else:
        outside = raw > importance.limit
        weights = raw.clamp(max=importance.limit)
    metrics = _weight_metrics(weights, outside, units)
    if importance.normalize:
        mean = masked_mean(weights, units)
        weights = torch.where(mean > 0, weights / mean, weights)
    return torch.where(mask, weights.expand_as(mask), 0.0), metrics


def _weight_metrics(weights: torch.Tensor, outside: torch.Tensor, units: torch.Tensor) -> dict[str, float]:
    """Over tokens or sequences: mean, spread, range, share out of bounds, and (sum w)^2 / (n sum w^2)."""
    if not bool(units.any()):
        return {}
    valid = weights[units]
    squares = valid.square().sum()
    size = float(valid.sum().square() / (valid.numel() * squares)) if squares > 0 else 0.0
    return {
        "is_mean": float(valid.mean()),
        "is_std": float(valid.std(unbiased=False)),
        "is_min": float(valid.min()),
        "is_max": float(valid.max()),
        "is_oob_fraction": _fraction(outside & units, units),
        "is_eff_sample_size": size,
    }


def _keeps(rule: Rejection, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Bool [B, R] or [B, 1]: whether the rule keeps the token, or its sequence."""
    over, estimator = rule.name.rsplit("_", 1)
    measured = _over(over, _divergence(estimator, log_ratio), mask)
    if isinstance(rule.limit, Bounds):
        ratio = torch.exp(measured.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))
        return (ratio >= rule.limit.low) & (ratio <= rule.limit.high)
    return measured <= rule.limit


def _divergence(estimator: str, log_ratio: torch.Tensor) -> torch.Tensor:
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    clamped = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return torch.expm1(clamped) - clamped


def _over(over: str, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if over == "token":
        return values
    if over == "seq_sum":
        return torch.where(mask, values, 0.0).sum(dim=-1, keepdim=True)
    if over == "seq_mean":
        return masked_mean(values, mask, dim=-1).unsqueeze(-1)
    return torch.where(mask, values, 0.0).amax(dim=-1, keepdim=True)


def _gap_metrics(log_ratio: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """KL(rollout || old) two ways, and the largest gap of a single token in nats."""
    return {
        "kl": float(masked_mean(-log_ratio, mask)),
        "k3_kl": float(masked_mean(_divergence("k3", log_ratio), mask)),
        "max_abs_log_ratio": float(log_ratio.abs().max()) if log_ratio.numel() else 0.0,
    }


def _fraction(part: torch.Tensor, whole: torch.Tensor) -> float:
    return float(part.sum()) / max(1, int(whole.sum()))
