"""Statistics over the samples of one prompt: means, spreads and the rules for groups that have none.

Rules, stated once. A sample counts if it is scored and its response has at least one valid token; one that doesn't
count gets advantage 0 and is left out of its group's statistics. A group with fewer than two counting samples, and one
whose counting scores are all equal, has no spread: its advantages are 0. Sums are in fp64, whatever the scores' dtype.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class GroupStats:
    """Per-sample views [B] of each sample's group.

    Attributes:
        scores: fp64; 0 where the sample doesn't count.
        counts: bool; whether the sample counts.
        index: int64; dense group number of the sample.
        size: fp64; counting samples in the group, at least 1 so that it divides.
        mean: fp64 mean over them.
        std: fp64 unbiased standard deviation over them; 0 for fewer than two.
        has_spread: bool; the sample counts, and its group has two counting samples with different scores.
    """

    scores: torch.Tensor
    counts: torch.Tensor
    index: torch.Tensor
    size: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    has_spread: torch.Tensor


def group_stats(
    scores: torch.Tensor, *, group_id: torch.Tensor, mask: torch.Tensor, scored: torch.Tensor | None = None
) -> GroupStats:
    """Compute the groups' statistics.

    Args:
        scores: any real dtype [B]; anything, NaN included, where `scored` is False.
        group_id: int64 [B]; equal for the samples of one prompt. Groups needn't be adjacent or of one size.
        mask: bool [B, R] of valid response tokens; a row without one doesn't count.
        scored: bool [B]; None says that all are.

    Raises:
        ValueError: shapes that don't belong together, or a counting score that isn't finite (rows are named).
    """
    counts = _counting(scores, group_id=group_id, mask=mask, scored=scored)
    exact = torch.where(counts, scores.double(), 0.0)
    index = torch.unique(group_id, return_inverse=True)[1]
    size = _group_sum(counts.double(), index).clamp(min=1.0)
    mean = _group_sum(exact, index) / size
    centred = torch.where(counts, exact - mean, 0.0)
    std = torch.sqrt(_group_sum(centred.square(), index) / (size - 1.0).clamp(min=1.0))
    lowest = _group_extreme(torch.where(counts, exact, torch.inf), index, "amin")
    highest = _group_extreme(torch.where(counts, exact, -torch.inf), index, "amax")
    has_spread = counts & (highest > lowest)
    return GroupStats(exact, counts, index, size, mean, torch.where(has_spread, std, 0.0), has_spread)


def group_sum(values: torch.Tensor, stats: GroupStats) -> torch.Tensor:
    """Sum of `values` [B] over each sample's group, seen by every sample of it."""
    return _group_sum(values, stats.index)


def group_max(values: torch.Tensor, stats: GroupStats) -> torch.Tensor:
    """Maximum of `values` [B] over each sample's group, seen by every sample of it."""
    return _group_extreme(values, stats.index, "amax")


def _group_sum(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(values).index_add_(0, index, values)[index]


def _group_extreme(values: torch.Tensor, index: torch.Tensor, reduce: str) -> torch.Tensor:
    return torch.empty_like(values).scatter_reduce_(0, index, values, reduce, include_self=False)[index]


def _counting(
    scores: torch.Tensor, *, group_id: torch.Tensor, mask: torch.Tensor, scored: torch.Tensor | None
) -> torch.Tensor:
    """Check the shapes and return bool [B]: scored, and with at least one valid token."""
    num_samples = mask.shape[0]
    if scores.shape != (num_samples,) or group_id.shape != (num_samples,) or mask.ndim != 2:
        raise ValueError(
            f"expected scores [B], group_id [B] and mask [B, R], got {tuple(scores.shape)}, {tuple(group_id.shape)} "
            f"and {tuple(mask.shape)}; pass one score and one group_id per sample"
        )
    counts = mask.any(dim=-1)
    if scored is not None:
        counts = counts & scored
    broken = counts & ~torch.isfinite(scores.double())
    if bool(broken.any()):
        rows = torch.nonzero(broken).flatten().tolist()
        raise ValueError(
            f"scores must be finite, got {scores[broken].tolist()} in rows {rows}; mark such samples unscored"
        )
    return counts
