"""Advantages that compare the samples of one prompt: GRPO and its relatives.

Every function takes one score per sample and returns float32 [B, R], the sample's advantage on each of its valid
tokens and 0 elsewhere. Which samples count, and what groups without spread give, is written once in `algos.groups`.
Estimators that look at single tokens are in `algos.token_advantages`; `algos.advantages` names them all.
"""

from __future__ import annotations

import torch

from algos.aggregate import masked_whiten
from algos.groups import GroupStats, group_max, group_stats, group_sum


def grpo_advantages(
    scores: torch.Tensor,
    *,
    group_id: torch.Tensor,
    mask: torch.Tensor,
    scored: torch.Tensor | None = None,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> torch.Tensor:
    """GRPO: A_i = (R_i - mean_g) / (std_g + eps), std unbiased (arXiv:2402.03300, section 4.1.2).

    `norm_by_std=False` leaves the division out: Dr. GRPO (arXiv:2503.20783). Arguments as in `group_stats`.
    """
    stats = group_stats(scores, group_id=group_id, mask=mask, scored=scored)
    advantages = stats.scores - stats.mean
    if norm_by_std:
        advantages = advantages / (stats.std + eps)
    return _spread(advantages, stats, mask)


def rloo_advantages(
    scores: torch.Tensor,
    *,
    group_id: torch.Tensor,
    mask: torch.Tensor,
    scored: torch.Tensor | None = None,
    norm_by_std: bool = False,
) -> torch.Tensor:
    """RLOO: A_i = R_i - mean of the group's others = G / (G - 1) (R_i - mean_g) (arXiv:2402.14740, eq. 6).

    `norm_by_std=True` divides by the unbiased standard deviation of the others; where the others are fewer than two or
    all equal there is nothing to divide by, and A_i stays as it is.
    """
    stats = group_stats(scores, group_id=group_id, mask=mask, scored=scored)
    num_others = (stats.size - 1.0).clamp(min=1.0)
    centred = stats.scores - stats.mean
    advantages = centred * stats.size / num_others
    if norm_by_std:
        advantages = advantages / _std_of_others(centred, stats, num_others)
    return _spread(advantages, stats, mask)


def _std_of_others(centred: torch.Tensor, stats: GroupStats, num_others: torch.Tensor) -> torch.Tensor:
    """Leave-one-out unbiased std; 1 where it is 0 up to rounding, or undefined."""
    squares = group_sum(torch.where(stats.counts, centred, 0.0).square(), stats)
    # Removing x_i lowers the sum of squares about the mean by (x_i - mean)^2 G / (G - 1).
    rest = squares - centred.square() * stats.size / num_others
    usable = (num_others >= 2.0) & (rest > 1e-12 * squares)
    variance = torch.where(usable, rest, 1.0) / torch.where(usable, num_others - 1.0, 1.0)
    return torch.sqrt(variance)


def reinforce_plus_plus_baseline_advantages(
    scores: torch.Tensor, *, group_id: torch.Tensor, mask: torch.Tensor, scored: torch.Tensor | None = None
) -> torch.Tensor:
    """REINFORCE++ with a group baseline: R_i - mean_g, whitened over the batch's tokens (arXiv:2501.03262)."""
    stats = group_stats(scores, group_id=group_id, mask=mask, scored=scored)
    centred = _spread(stats.scores - stats.mean, stats, mask)
    return masked_whiten(centred, mask & stats.counts.unsqueeze(-1))


def opo_advantages(
    scores: torch.Tensor, *, group_id: torch.Tensor, mask: torch.Tensor, scored: torch.Tensor | None = None
) -> torch.Tensor:
    """OPO: A_i = R_i - sum_j l_j R_j / sum_j l_j, l the response lengths (arXiv:2505.23585, eq. 6)."""
    stats = group_stats(scores, group_id=group_id, mask=mask, scored=scored)
    lengths = torch.where(stats.counts, mask.sum(dim=-1).double(), 0.0)
    baseline = group_sum(lengths * stats.scores, stats) / group_sum(lengths, stats).clamp(min=1.0)
    return _spread(stats.scores - baseline, stats, mask)


def gpg_advantages(
    scores: torch.Tensor,
    *,
    group_id: torch.Tensor,
    mask: torch.Tensor,
    scored: torch.Tensor | None = None,
    f_norm: float = 1.0,
) -> torch.Tensor:
    """GPG: A_i = alpha (R_i - mean_g) / f_norm, alpha = B / #{R_i != 0} over counting samples (arXiv:2504.02546)."""
    stats = group_stats(scores, group_id=group_id, mask=mask, scored=scored)
    num_nonzero = torch.count_nonzero(stats.scores).clamp(min=1)
    alpha = stats.counts.sum().double() / num_nonzero
    return _spread(alpha * (stats.scores - stats.mean) / f_norm, stats, mask)


def grpo_passk_advantages(
    scores: torch.Tensor,
    *,
    group_id: torch.Tensor,
    mask: torch.Tensor,
    scored: torch.Tensor | None = None,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Pass@k: only a group's best sample learns, A = (r_best - r_second) / (std_g + eps) (arXiv:2503.19595).

    Two samples that share the best score leave no margin: 0.
    """
    stats = group_stats(scores, group_id=group_id, mask=mask, scored=scored)
    best = group_max(torch.where(stats.counts, stats.scores, -torch.inf), stats)
    is_best = stats.counts & (stats.scores == best)
    others = torch.where(stats.counts & ~is_best, stats.scores, -torch.inf)
    second = torch.where(group_sum(is_best.double(), stats) > 1.0, best, group_max(others, stats))
    advantages = torch.where(is_best & stats.has_spread, best - second, 0.0)
    if norm_by_std:
        advantages = advantages / (stats.std + eps)
    return _spread(advantages, stats, mask)


def _spread(advantages: torch.Tensor, stats: GroupStats, mask: torch.Tensor) -> torch.Tensor:
    """Write 0 for samples of groups without spread, and give each valid token its sample's advantage."""
    per_sample = torch.where(stats.has_spread, advantages, 0.0).float()
    return torch.where(mask, per_sample.unsqueeze(-1), 0.0)
