"""Totals: the denominators of one mini-batch, which every micro-batch of it shares."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over one whole optimizer step: all of its micro-batches on all data-parallel ranks.

    A loss divides by these and never by what it sees in one micro-batch, so summing the losses (and metrics) of the
    micro-batches gives the mini-batch's value whatever the split.

    Attributes:
        num_tokens: valid (unmasked) response tokens.
        num_sequences: sequences with at least one valid token.
        num_replicas: ranks over which the engine *averages* gradients; losses are multiplied by it, metrics are not.
            1 where gradients are summed or there is one rank.
        loss_scale_factor: the constant length of `seq-mean-token-sum-norm`; None where another mode is used.
    """

    num_tokens: int
    num_sequences: int
    num_replicas: int = 1
    loss_scale_factor: float | None = None

    def __post_init__(self) -> None:
        """Refuse counts that can't be counts, and a scale that can't divide."""
        if self.num_tokens < 0 or self.num_sequences < 0 or self.num_replicas < 1:
            raise ValueError(
                f"Totals needs num_tokens >= 0, num_sequences >= 0 and num_replicas >= 1, got {self.num_tokens}, "
                f"{self.num_sequences} and {self.num_replicas}; count them over the whole mini-batch"
            )
        if self.loss_scale_factor is not None and not self.loss_scale_factor > 0:
            raise ValueError(f"loss_scale_factor must be above 0, got {self.loss_scale_factor}")

    @classmethod
    def of(cls, mask: torch.Tensor, *, num_replicas: int = 1, loss_scale_factor: float | None = None) -> Totals:
        """Count a mini-batch's mask, bool [B, R]; with several ranks, add the ranks' counts before using them."""
        num_tokens = int(mask.sum())
        num_sequences = int(mask.any(dim=-1).sum())
        return cls(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            num_replicas=num_replicas,
            loss_scale_factor=loss_scale_factor,
        )

    def scaled(self, loss_scale_factor: float | None) -> Totals:
        """Return a copy with this `loss_scale_factor`; an engine counts, the caller's config names the scale."""
        return dataclasses.replace(self, loss_scale_factor=loss_scale_factor)

    def of_metrics(self) -> Totals:
        """Return a copy with `num_replicas` 1: metrics are summed over ranks, not averaged."""
        return dataclasses.replace(self, num_replicas=1)
