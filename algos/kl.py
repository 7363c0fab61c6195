"""KL between the policy and a reference, per token, from the sampled tokens' log-probs.

With x = log pi - log pi_ref at the sampled token (J. Schulman, "Approximating KL divergence", 2020):

- `k1` = x;  `abs` = |x|;  `k2` (also `mse`) = x^2 / 2
- `k3` (also `low_var_kl`) = exp(-x) + x - 1, with -x clamped to +-20 before exp and the result to +-10
- a trailing `+`: the value of the named estimator with the gradient of k2, which is the gradient of the KL itself

Every clamp stands before the exp whose overflow it prevents, so gradients are 0 or finite, never NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from algos.aggregate import masked_mean

KL_ESTIMATORS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
"""Names of the estimators; each may carry a trailing `+`."""

_LOG_RATIO_LIMIT = 20.0
_K3_LIMIT = 10.0


def parse_kl_estimator(name: str) -> str:
    """Return `name` if it is an estimator's, with or without `+`; ValueError lists them otherwise."""
    if name.removesuffix("+") not in KL_ESTIMATORS:
        raise ValueError(
            f"unknown KL estimator {name!r}; use one of {', '.join(KL_ESTIMATORS)}, each also with a trailing '+'"
        )
    return name


def kl_estimate(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, *, kind: str, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Estimate the KL at each token.

    Args:
        log_probs: the policy's, float [B, R], any float dtype; carries the gradient.
        ref_log_probs: the reference's, float [B, R].
        kind: an estimator's name, see the module's text.
        mask: bool [B, R]; where False the result is 0 and passes no gradient, whatever stands there.

    Returns:
        float32 [B, R].
    """
    base = parse_kl_estimator(kind).removesuffix("+")
    log_ratio = log_probs.float() - ref_log_probs.float()
    if mask is not None:
        log_ratio = torch.where(mask, log_ratio, 0.0)
    value = _estimate(log_ratio, base)
    if not kind.endswith("+"):
        return value
    straight = _estimate(log_ratio, "k2")
    return value.detach() + (straight - straight.detach())


def _estimate(log_ratio: torch.Tensor, base: str) -> torch.Tensor:
    if base in ("k1", "kl"):
        return log_ratio
    if base == "abs":
        return log_ratio.abs()
    if base in ("k2", "mse"):
        return 0.5 * log_ratio.square()
    reverse = (-log_ratio).clamp(min=-_LOG_RATIO_LIMIT, max=_LOG_RATIO_LIMIT)
    return (torch.expm1(reverse) - reverse).clamp(min=-_K3_LIMIT, max=_K3_LIMIT)


def rewards_with_kl(
    token_scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, *, coefficient: float
) -> torch.Tensor:
    """Token rewards r_t = score_t - coefficient * kl_t on valid tokens, 0 elsewhere (arXiv:2009.01325, section 3).

    All tensors are [B, R]; the result is float32 and detached.
    """
    rewards = token_scores.float() - coefficient * kl.float()
    return torch.where(mask, rewards, 0.0).detach()


def mean_kl(kl: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean over sequences of the mean over valid tokens; sequences without a valid token don't count."""
    per_sequence = masked_mean(kl.detach().float(), mask, dim=-1)
    return float(masked_mean(per_sequence, mask.any(dim=-1)))


class KLController(Protocol):
    """What sets the coefficient of the KL penalty in the reward."""

    @property
    def coefficient(self) -> float:
        """The coefficient to use now."""

    def update(self, *, current_kl: float, num_samples: int) -> None:
        """Tell the KL that the last batch of `num_samples` sequences showed."""


@dataclasses.dataclass(frozen=True, slots=True)
class FixedKL:
    """A coefficient that never changes."""

    coefficient: float

    def update(self, *, current_kl: float, num_samples: int) -> None:
        """Ignore what was measured: the coefficient is fixed."""

    def state_dict(self) -> dict[str, float]:
        """Return nothing that changes: an empty dict."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Accept what `state_dict` returned."""


class AdaptiveKL:
    """A coefficient steered so that the KL stays near a target (arXiv:1909.08593, section 2.2).

    beta <- beta (1 + e n / horizon) with e = clip(KL / target - 1, -0.2, 0.2) and n the batch's sequences.
    """

    def __init__(self, *, init_coefficient: float = 1e-3, target: float = 0.1, horizon: float = 10_000) -> None:
        """Start at `init_coefficient`; `target` is in nats per token, `horizon` in sequences; both above 0."""
        if not (target > 0 and horizon > 0):
            raise ValueError(f"AdaptiveKL needs target > 0 and horizon > 0, got {target} and {horizon}")
        self._coefficient = init_coefficient
        self._target = target
        self._horizon = horizon

    @property
    def coefficient(self) -> float:
        """The coefficient to use now."""
        return self._coefficient

    def update(self, *, current_kl: float, num_samples: int) -> None:
        """Move the coefficient by the last batch's KL."""
        error = min(max(current_kl / self._target - 1.0, -0.2), 0.2)
        self._coefficient *= 1.0 + error * num_samples / self._horizon

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        return {"coefficient": self._coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from what `state_dict` returned."""
        self._coefficient = float(state["coefficient"])


def make_kl_controller(
    kind: str, *, coefficient: float = 1e-3, target: float = 0.1, horizon: float = 10_000
) -> FixedKL | AdaptiveKL:
    """Make the controller that `algorithm.kl_ctrl.type` names: `fixed` or `adaptive`."""
    if kind == "fixed":
        return FixedKL(coefficient)
    if kind == "adaptive":
        return AdaptiveKL(init_coefficient=coefficient, target=target, horizon=horizon)
    raise ValueError(f"unknown KL controller {kind!r}; use fixed or adaptive")
