"""Log-probs and entropies from logits whose vocabulary is cut over the ranks of a tensor-parallel group.

The definitions are those of `hybrid.logprobs`. Forward takes two all-reduces of a few numbers per position, whatever
the vocabulary: the maximum, then the sums over exp(z), exp(z) z and the target's z. Backward takes none: each rank owns
the gradient of its own columns, onehot - softmax, also where it doesn't own the target. A plain differentiable
all-reduce would drop the gradient of the ranks that don't.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hybrid.logprobs import LOG_P_FLOOR, TokenLogProbs, apply_function, check_inputs, scale_logits, shaped


def parallel_token_log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
) -> TokenLogProbs:
    """Log-prob of each target and entropy of its distribution, the same on every rank of the group.

    Every rank calls it with the same targets, and computes the same loss from the result.

    Args:
        logits: [..., C], this rank's columns, any float dtype; C may differ between ranks.
        targets: int64 [...], global ids in [0, vocab_size), the same on every rank.
        vocab_start: global id of this rank's first column.
        vocab_size: of the whole vocabulary without padding; columns from there on are padding and don't count.
        group: the ranks that hold the columns.
        temperature: above 0; logits are divided by it.

    Raises:
        ValueError: shapes that don't belong together, or a temperature that isn't above 0.
    """
    check_inputs(logits.shape[:-1], targets, temperature)
    flat, flat_targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    num_real = min(max(vocab_size - vocab_start, 0), flat.shape[-1])
    local = flat_targets - vocab_start
    local = torch.where((local >= 0) & (local < num_real), local, -1)
    return shaped(apply_function(_Parallel, flat, local, num_real, float(temperature), group), targets)


class _Parallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        local_targets: torch.Tensor,
        num_real: int,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = scale_logits(logits[:, :num_real], temperature)
        peak = scaled.new_full((logits.shape[0],), -torch.inf)
        if num_real:
            peak = scaled.amax(dim=-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shifted = scaled - peak.unsqueeze(-1)
        weights = shifted.exp()
        owned = local_targets >= 0
        at_target = shifted.new_zeros(logits.shape[0])
        if num_real:
            at_target = torch.where(owned, _take(shifted, local_targets), 0.0)
        sums = torch.stack([weights.sum(-1), (weights * shifted.clamp(min=LOG_P_FLOOR)).sum(-1), at_target])
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, local_targets, peak + log_sum, entropy)
        ctx.set_materialize_grads(False)
        ctx.num_real, ctx.temperature = num_real, temperature
        return sums[2] - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        logits, local_targets, log_normalizer, entropy = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        if ctx.num_real and (grad_log_probs is not None or grad_entropy is not None):
            log_p = scale_logits(logits[:, : ctx.num_real], ctx.temperature) - log_normalizer.unsqueeze(-1)
            p = log_p.exp()
            total = torch.zeros_like(p)
            if grad_entropy is not None:
                total -= grad_entropy.unsqueeze(-1) * p * (log_p.clamp(min=LOG_P_FLOOR) + entropy.unsqueeze(-1))
            if grad_log_probs is not None:
                ones = (local_targets >= 0).to(p.dtype).unsqueeze(-1)
                p.scatter_add_(-1, local_targets.clamp(min=0).unsqueeze(-1), -ones)
                total -= grad_log_probs.unsqueeze(-1) * p
            grad[:, : ctx.num_real] = total / ctx.temperature
        return grad, None, None, None, None


def _take(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1)
