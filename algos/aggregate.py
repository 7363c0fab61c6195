"""Aggregation: from a value per token to one number, with the whole mini-batch's denominators.

Modes carry verl's names. With m the mask, B the number of sequences that have a valid token and every count taken over
the whole mini-batch (`Totals`), not over the micro-batch at hand:

- `token-mean`               sum(x m) / sum(m)                 (DAPO, arXiv:2503.14476, eq. 8)
- `token-sum`                sum(x m)
- `seq-mean-token-sum`       sum_i sum_t x m / B
- `seq-mean-token-mean`      sum_i mean_t(x) / B               (GRPO, arXiv:2402.03300, eq. 3)
- `seq-mean-token-sum-norm`  sum_i sum_t x m / (B L), L a constant   (Dr. GRPO, arXiv:2503.20783)
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from hybrid.totals import Totals

__all__ = ["AGGREGATIONS", "Aggregation", "Totals", "aggregate", "masked_mean", "masked_whiten", "parse_aggregation"]

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def parse_aggregation(name: str) -> Aggregation:
    """Return `name` as an `Aggregation`; ValueError lists the modes if it is none of them."""
    if name not in AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {name!r}; use one of {', '.join(AGGREGATIONS)}")
    return name


def aggregate(values: torch.Tensor, mask: torch.Tensor, *, mode: Aggregation, totals: Totals) -> torch.Tensor:
    """Reduce per-token `values` to this micro-batch's share of the mini-batch's value.

    Args:
        values: float [B, R]; anything, NaN included, may stand where `mask` is False.
        mask: bool [B, R].
        mode: one of `AGGREGATIONS`.
        totals: the mini-batch's counts; `seq-mean-token-sum-norm` also needs its `loss_scale_factor`.

    Returns:
        A scalar with gradient. Shares of all micro-batches and ranks add up to the mini-batch's value (times
        `totals.num_replicas`). A mini-batch with no valid token gives 0 with zero gradient.
    """
    mode = parse_aggregation(mode)
    kept = torch.where(mask, values, 0.0)
    if mode == "seq-mean-token-mean":
        kept = kept / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    denominator = _denominator(mode, totals)
    return kept.sum() * (totals.num_replicas / denominator if denominator else 0.0)


def _denominator(mode: Aggregation, totals: Totals) -> float:
    """Return what the sum is divided by; 0 says that the mini-batch is empty."""
    if mode == "token-mean":
        return totals.num_tokens
    if mode == "token-sum":
        return 1.0
    if mode == "seq-mean-token-sum-norm":
        if totals.loss_scale_factor is None:
            raise ValueError(
                "seq-mean-token-sum-norm divides by a constant length, and loss_scale_factor is not set; "
                "set it, usually to the longest allowed response"
            )
        return totals.num_sequences * totals.loss_scale_factor
    return totals.num_sequences


def masked_mean(values: torch.Tensor, mask: torch.Tensor, *, dim: int | None = None) -> torch.Tensor:
    """Mean of `values` where `mask` is True, over `dim` or over all; 0 where nothing is valid."""
    kept = torch.where(mask, values, 0.0)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim=dim) / mask.sum(dim=dim).clamp(min=1)


def masked_whiten(
    values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True, eps: float = 1e-8
) -> torch.Tensor:
    """Return (x - mean) * rsqrt(var + eps) over the valid tokens, 0 elsewhere; var is unbiased, sums are in fp64.

    With one valid token there is no variance: its value is kept as it is. With none, the result is all 0.
    """
    exact = torch.where(mask, values, 0.0).double()
    num_valid = int(mask.sum())
    if num_valid < 2:
        return exact.to(values.dtype)
    mean = exact.sum() / num_valid
    centred = torch.where(mask, exact - mean, 0.0)
    variance = centred.square().sum() / (num_valid - 1)
    whitened = centred * torch.rsqrt(variance + eps)
    if not shift_mean:
        whitened = torch.where(mask, whitened + mean, 0.0)
    return whitened.to(values.dtype)
