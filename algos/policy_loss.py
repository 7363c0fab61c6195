"""The loss of one mini-batch by ``actor.*``: the objective, less an entropy bonus, plus a KL to the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from algos.aggregate import Aggregation, aggregate, parse_aggregation
from algos.config import ActorConfig
from algos.kl import kl_estimate
from algos.losses import LossResult, cispo_loss, gpg_loss, gspo_loss, metric_share, ppo_clip_loss
from algos.rollout_correction import Importance, correct_rollout
from hybrid.batch import loss_mask
from hybrid.totals import Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss function as train engines call it, once per micro-batch.

    Attributes:
        actor: the keys.
        on_policy: the samples come from the very weights that are updated, so the current log-probs, detached, are the
            old ones and every ratio is 1.
        importance: weights for the gap between the old log-probs and those of generation; None for no weights.
        num_ref_tokens: tokens of the whole mini-batch that have a reference log-prob and count in ``kl/mean``.
    """

    actor: ActorConfig
    on_policy: bool
    importance: Importance | None = None
    num_ref_tokens: int = 0

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor, micro_batch: TensorDict, totals: Totals
    ) -> LossResult:
        """Return the micro-batch's share of the loss, with gradient, and of the metrics; all tensors are [B, R]."""
        mask = loss_mask(micro_batch)
        totals = totals.scaled(self.actor.loss_scale_factor)
        mode = parse_aggregation(self.actor.loss_agg_mode)
        old = log_probs.detach() if self.on_policy else micro_batch["old_log_probs"]
        common: dict[str, Any] = {"totals": totals, "weights": self._weights(old, micro_batch, mask)}
        loss, shares = self._objective(log_probs, old, micro_batch["advantages"], mask, mode, common)
        metrics = {f"actor/{name}": share for name, share in shares.items()}
        if common["weights"] is not None:
            metrics["actor/rollout_is_mean"] = metric_share(common["weights"], mask, totals)
        metrics["actor/pg_loss"] = loss.detach()
        metrics["entropy/mean"] = metric_share(entropy, mask, totals)
        if self.actor.entropy_coeff:
            loss = loss - self.actor.entropy_coeff * aggregate(entropy, mask, mode=mode, totals=totals)
        if self.actor.use_kl_loss:
            kl = kl_estimate(log_probs, micro_batch["ref_log_probs"], kind=self.actor.kl_loss_type, mask=mask)
            kl_loss = aggregate(kl, mask, mode=mode, totals=totals)
            loss = loss + self.actor.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = kl_loss.detach()
        metrics.update(self._divergences(log_probs.detach(), micro_batch, mask, totals))
        metrics["actor/loss"] = loss.detach()
        return loss, metrics

    def _objective(
        self,
        log_probs: torch.Tensor,
        old: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        mode: Aggregation,
        common: dict[str, Any],
    ) -> LossResult:
        actor, name = self.actor, self.actor.policy_loss.loss_mode
        if name == "gpg":
            return gpg_loss(log_probs, advantages, mask, aggregate=mode, **common)
        clip = {"clip_low": actor.clip_ratio_low, "clip_high": actor.clip_ratio_high, **common}
        if name == "gspo":
            return gspo_loss(log_probs, old, advantages, mask, **clip)
        if name == "cispo":
            return cispo_loss(log_probs, old, advantages, mask, aggregate=mode, **clip)
        dual = actor.clip_ratio_c
        return ppo_clip_loss(log_probs, old, advantages, mask, clip_dual=dual, aggregate=mode, **clip)

    def _weights(self, old: torch.Tensor, micro_batch: TensorDict, mask: torch.Tensor) -> torch.Tensor | None:
        if self.importance is None:
            return None
        return correct_rollout(old, micro_batch["rollout_log_probs"], mask, importance=self.importance).weights

    def _divergences(
        self, log_probs: torch.Tensor, micro_batch: TensorDict, mask: torch.Tensor, totals: Totals
    ) -> dict[str, torch.Tensor]:
        """KL (k3) of the policy that trains to the reference, and to the policy that sampled.

        On policy the latter are the same weights, and ``kl/old`` is what two engines and two precisions make of them.
        """
        sampled = micro_batch["rollout_log_probs" if self.on_policy else "old_log_probs"]
        found = {"kl/old": metric_share(kl_estimate(log_probs, sampled, kind="k3", mask=mask), mask, totals)}
        if self.num_ref_tokens:
            known = mask & micro_batch["ref_known"].unsqueeze(-1)
            kl = kl_estimate(log_probs, micro_batch["ref_log_probs"], kind="k3", mask=known)
            found["kl/mean"] = kl.sum() / self.num_ref_tokens
        return found
