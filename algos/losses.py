"""Policy and value losses per mini-batch, from log-probs of the sampled tokens.

Shapes: log-probs, advantages, values and returns are float [B, R]; mask is bool [B, R]. Anything may stand where the
mask is False. Every function returns (loss, metrics): the loss is a scalar with gradient, already aggregated over the
micro-batch with the mini-batch's `Totals`, and each metric is a detached scalar tensor holding this micro-batch's
*share* of the mini-batch's value. So losses and metrics alike are summed over micro-batches.
"""

from __future__ import annotations

import torch

from algos.aggregate import Aggregation
from algos.aggregate import aggregate as reduce_tokens
from hybrid.totals import Totals

LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]

_LOG_RATIO_LIMIT = 20.0


def ppo_clip_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = 3.0,
    aggregate: Aggregation = "token-mean",
    totals: Totals,
    weights: torch.Tensor | None = None,
) -> LossResult:
    """PPO's clipped objective (arXiv:1707.06347, eq. 7), with the dual clip (arXiv:1912.09729, eq. 5).

    L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A); where A < 0 it is bounded above by -clip_dual A.

    Args:
        log_probs: the policy's, with gradient.
        old_log_probs: of the policy that the ratio is anchored to.
        advantages: per token.
        mask: valid response tokens.
        clip_low: epsilon below 1.
        clip_high: epsilon above 1; larger than `clip_low` is DAPO's clip-higher (arXiv:2503.14476).
        clip_dual: the dual clip's c > 1; None leaves it out.
        aggregate: see `algos.aggregate`.
        totals: the mini-batch's counts.
        weights: detached importance weights per token from `algos.rollout_correction`, multiplied in; None is 1.

    Returns:
        (loss, metrics) with `pg_clipfrac` (tokens whose clipped term is the larger), `pg_clipfrac_lower` (tokens
        bounded by the dual clip) and `ppo_kl` (mean of old minus new log-prob).
    """
    if clip_dual is not None and not clip_dual > 1.0:
        raise ValueError(f"clip_dual must be above 1, got {clip_dual}; use None to leave the dual clip out")
    log_ratio, gain = _masked_inputs(log_probs, old_log_probs, advantages, mask)
    ratio = torch.exp(log_ratio)
    unclipped = -ratio * gain
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * gain
    loss = torch.maximum(unclipped, clipped)
    bounded = torch.zeros_like(mask)
    if clip_dual is not None:
        bound = -clip_dual * gain
        bounded = (gain < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
    metrics = {
        "pg_clipfrac": _share(clipped > unclipped, mask, totals),
        "pg_clipfrac_lower": _share(bounded, mask, totals),
        "ppo_kl": _share(-log_ratio, mask, totals),
    }
    return _reduce(loss, mask, weights, aggregate, totals), metrics


def gspo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    totals: Totals,
    weights: torch.Tensor | None = None,
) -> LossResult:
    """GSPO in its token form: the ratio is the sequence's geometric mean (arXiv:2507.18071, eq. 7 and 14).

    s_i = exp(mean_t log r_t) in value; the gradient goes through each token's own log-prob. The aggregation is
    `seq-mean-token-mean` by definition. Arguments and result as in `ppo_clip_loss`; `pg_clipfrac_lower` is always 0.
    """
    log_ratio, gain = _masked_inputs(log_probs, old_log_probs, advantages, mask)
    num_valid = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    sequence_log_ratio = (log_ratio.sum(dim=-1, keepdim=True) / num_valid).detach()
    ratio = torch.exp(sequence_log_ratio + (log_ratio - log_ratio.detach()))
    unclipped = -ratio * gain
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * gain
    metrics = {
        "pg_clipfrac": _share(clipped > unclipped, mask, totals),
        "pg_clipfrac_lower": _share(torch.zeros_like(mask), mask, totals),
        "ppo_kl": _share(-log_ratio, mask, totals),
    }
    loss = torch.maximum(unclipped, clipped)
    return _reduce(loss, mask, weights, "seq-mean-token-mean", totals), metrics


def cispo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregate: Aggregation = "token-mean",
    totals: Totals,
    weights: torch.Tensor | None = None,
) -> LossResult:
    """CISPO: the clipped ratio is a constant weight, so no token loses its gradient (arXiv:2506.13585, eq. 4).

    L = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi. Arguments and result as in `ppo_clip_loss`.
    """
    log_ratio, gain = _masked_inputs(log_probs, old_log_probs, advantages, mask)
    ratio = torch.exp(log_ratio.detach())
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -clipped * gain * torch.where(mask, log_probs.float(), 0.0)
    metrics = {
        "pg_clipfrac": _share(clipped != ratio, mask, totals),
        "pg_clipfrac_lower": _share(torch.zeros_like(mask), mask, totals),
        "ppo_kl": _share(-log_ratio, mask, totals),
    }
    return _reduce(loss, mask, weights, aggregate, totals), metrics


def gpg_loss(
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    aggregate: Aggregation = "token-mean",
    totals: Totals,
    weights: torch.Tensor | None = None,
) -> LossResult:
    """GPG: the plain policy gradient, L = -A log pi (arXiv:2504.02546, eq. 6); no metrics."""
    kept = torch.where(mask, log_probs.float(), 0.0)
    loss = -torch.where(mask, advantages.float(), 0.0) * kept
    return _reduce(loss, mask, weights, aggregate, totals), {}


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_range: float = 0.5,
    aggregate: Aggregation = "token-mean",
    totals: Totals,
) -> LossResult:
    """Clipped value loss: 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), c = `clip_range`.

    The pessimistic form of PPO's reference implementation (arXiv:2005.12729, section 3). Metrics: `vf_clipfrac`
    (tokens whose clipped term is the larger) and `vpred_mean`.
    """
    kept = torch.where(mask, values.float(), 0.0)
    anchor = torch.where(mask, old_values.float(), 0.0)
    target = torch.where(mask, returns.float(), 0.0)
    clipped = torch.clamp(kept, min=anchor - clip_range, max=anchor + clip_range)
    error = (kept - target).square()
    clipped_error = (clipped - target).square()
    loss = 0.5 * torch.maximum(error, clipped_error)
    metrics = {
        "vf_clipfrac": _share(clipped_error > error, mask, totals),
        "vpred_mean": _share(kept, mask, totals),
    }
    return reduce_tokens(loss, mask, mode=aggregate, totals=totals), metrics


def metric_share(values: torch.Tensor, mask: torch.Tensor, totals: Totals) -> torch.Tensor:
    """Return this micro-batch's share of the token-mean of `values` over the mini-batch, detached.

    Use it for metrics of one's own, such as entropy; the shares add up over micro-batches and ranks.
    """
    return _share(values, mask, totals)


def _masked_inputs(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the clamped log-ratio and the advantages in fp32, 0 where masked."""
    log_ratio = torch.where(mask, log_probs.float() - old_log_probs.detach().float(), 0.0)
    gain = torch.where(mask, advantages.detach().float(), 0.0)
    return log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT), gain


def _reduce(
    loss: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor | None, mode: Aggregation, totals: Totals
) -> torch.Tensor:
    if weights is not None:
        loss = loss * torch.where(mask, weights.detach().float(), 0.0)
    return reduce_tokens(loss, mask, mode=mode, totals=totals)


def _share(values: torch.Tensor, mask: torch.Tensor, totals: Totals) -> torch.Tensor:
    return reduce_tokens(values.detach().float(), mask, mode="token-mean", totals=totals.of_metrics())
