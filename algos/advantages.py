"""Advantage estimators by name, over one set of inputs.

Names are verl's: `grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `remax`, `opo`, `gpg`, `gae`
and `grpo_passk`. The mathematics is in `algos.group_advantages` and `algos.token_advantages` and is re-exported here.

    inputs = AdvantageInputs(mask=mask, group_id=group_id, scores=scores)
    advantages = compute_advantages("grpo", inputs, AdvantageOptions()).advantages
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from algos.aggregate import masked_whiten
from algos.group_advantages import (
    gpg_advantages,
    grpo_advantages,
    grpo_passk_advantages,
    opo_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)
from algos.token_advantages import (
    discounted_returns,
    gae_advantages,
    reinforce_plus_plus_advantages,
    remax_token_advantages,
    token_rewards_from_scores,
)

__all__ = [
    "AdvantageInputs",
    "AdvantageOptions",
    "Advantages",
    "advantage_estimators",
    "compute_advantages",
    "discounted_returns",
    "gae_advantages",
    "gpg_advantages",
    "grpo_advantages",
    "grpo_passk_advantages",
    "opo_advantages",
    "register_advantage",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_token_advantages",
    "rloo_advantages",
    "token_rewards_from_scores",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may look at.

    Attributes:
        mask: bool [B, R]; the response's valid tokens.
        group_id: int64 [B]; equal for the samples of one prompt.
        scores: any real dtype [B]; one score per sample, used where `token_rewards` is None.
        token_rewards: float32 [B, R], for example scores less a KL penalty; a sample's score is then their sum.
        scored: bool [B]; None says all.
        values: float [B, R]; the critic's, for `gae`.
        baseline_scores: float [B]; the greedy response's score, for `remax`.
    """

    mask: torch.Tensor
    group_id: torch.Tensor
    scores: torch.Tensor | None = None
    token_rewards: torch.Tensor | None = None
    scored: torch.Tensor | None = None
    values: torch.Tensor | None = None
    baseline_scores: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse inputs with no reward in them, or with two."""
        if (self.scores is None) == (self.token_rewards is None):
            raise ValueError("AdvantageInputs needs exactly one of scores [B] and token_rewards [B, R]")

    def sample_scores(self) -> torch.Tensor:
        """Return one score per sample, [B]."""
        if self.scores is not None:
            return self.scores
        assert self.token_rewards is not None
        return torch.where(self.mask, self.token_rewards.float(), 0.0).sum(dim=-1)

    def rewards(self) -> torch.Tensor:
        """Return one reward per token, float32 [B, R]; a score stands on its response's last valid token."""
        if self.token_rewards is not None:
            return self.token_rewards.float()
        assert self.scores is not None
        return token_rewards_from_scores(self.scores, self.mask, scored=self.scored)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOptions:
    """Settings of the estimators; each uses those that its formula has.

    Attributes:
        gamma: discount, for `gae` and `reinforce_plus_plus`.
        lam: GAE's lambda.
        norm_by_std: divide by the group's spread, for `grpo` and `grpo_passk`; False makes `grpo` Dr. GRPO.
        f_norm: GPG's divisor.
    """

    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    f_norm: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Advantages:
    """Both float32 [B, R]: advantages for the policy, returns as the critic's target (or for the record).

    Samples that are unscored have 0 in both. That makes no policy gradient, but 0 is no target for a critic: leave such
    rows out of the value loss's mask.
    """

    advantages: torch.Tensor
    returns: torch.Tensor


AdvantageEstimator = Callable[[AdvantageInputs, AdvantageOptions], Advantages]
_ESTIMATORS: dict[str, AdvantageEstimator] = {}


def register_advantage(name: str) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Decorate an estimator to give it a name; ValueError if another function has the name already."""

    def add(estimator: AdvantageEstimator) -> AdvantageEstimator:
        if name in _ESTIMATORS and _ESTIMATORS[name] is not estimator:
            raise ValueError(f"advantage estimator {name!r} is registered already; choose another name")
        _ESTIMATORS[name] = estimator
        return estimator

    return add


def advantage_estimators() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_ESTIMATORS))


def compute_advantages(name: str, inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """Run the estimator `name`; ValueError lists the names if there is no such one."""
    if name not in _ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}; use one of {', '.join(advantage_estimators())}")
    with torch.no_grad():
        return _ESTIMATORS[name](inputs, options)


@register_advantage("grpo")
def _grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    advantages = grpo_advantages(
        inputs.sample_scores(),
        group_id=inputs.group_id,
        mask=inputs.mask,
        scored=inputs.scored,
        norm_by_std=options.norm_by_std,
    )
    return Advantages(advantages, advantages)


@register_advantage("grpo_passk")
def _grpo_passk(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    advantages = grpo_passk_advantages(
        inputs.sample_scores(),
        group_id=inputs.group_id,
        mask=inputs.mask,
        scored=inputs.scored,
        norm_by_std=options.norm_by_std,
    )
    return Advantages(advantages, advantages)


@register_advantage("rloo")
def _rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    advantages = rloo_advantages(
        inputs.sample_scores(), group_id=inputs.group_id, mask=inputs.mask, scored=inputs.scored
    )
    return Advantages(advantages, advantages)


@register_advantage("opo")
def _opo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    advantages = opo_advantages(
        inputs.sample_scores(), group_id=inputs.group_id, mask=inputs.mask, scored=inputs.scored
    )
    return Advantages(advantages, advantages)


@register_advantage("gpg")
def _gpg(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    advantages = gpg_advantages(
        inputs.sample_scores(),
        group_id=inputs.group_id,
        mask=inputs.mask,
        scored=inputs.scored,
        f_norm=options.f_norm,
    )
    return Advantages(advantages, advantages)


@register_advantage("reinforce_plus_plus_baseline")
def _reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    advantages = reinforce_plus_plus_baseline_advantages(
        inputs.sample_scores(), group_id=inputs.group_id, mask=inputs.mask, scored=inputs.scored
    )
    return Advantages(advantages, advantages)


@register_advantage("reinforce_plus_plus")
def _reinforce_plus_plus(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    return Advantages(
        *reinforce_plus_plus_advantages(inputs.rewards(), inputs.mask, gamma=options.gamma, scored=inputs.scored)
    )


@register_advantage("remax")
def _remax(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    if inputs.baseline_scores is None:
        raise ValueError("remax needs baseline_scores [B], the score of the greedy response to each sample's prompt")
    return Advantages(
        *remax_token_advantages(
            inputs.rewards(), inputs.mask, baseline_scores=inputs.baseline_scores, scored=inputs.scored
        )
    )


@register_advantage("gae")
def _gae(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    if inputs.values is None:
        raise ValueError("gae needs values [B, R], the critic's; use grpo where there is no critic")
    counted = inputs.mask if inputs.scored is None else inputs.mask & inputs.scored.unsqueeze(-1)
    raw, returns = gae_advantages(
        inputs.rewards(), inputs.values, counted, gamma=options.gamma, lam=options.lam, whiten=False
    )
    return Advantages(masked_whiten(raw, counted), returns)
