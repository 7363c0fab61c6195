"""Log-probs and entropies of given tokens, in fp32 and in bounded memory, with their exact gradients.

For one position with logits z, temperature T and target y, let l = log_softmax(z / T) and p = exp(l):

    log_prob = l_y                    d log_prob / d z = (onehot(y) - p) / T
    entropy  = -sum_v p_v l_v         d entropy / d z_v = -p_v (l_v + entropy) / T

The sampler must divide by the same T, or ratios of policies are wrong. A vocabulary entry whose logit is -inf (a padded
or forbidden id) has probability 0 and adds 0 to the entropy and to every gradient. Rows are worked through in chunks,
which bounds the fp32 temporaries of vocabulary width, forward and backward, and changes no bit of a row's result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

_CHUNK_BYTES = 64 * 2**20
# exp of it is exactly 0 in fp32 and fp64, and 0 * it is 0, where 0 * -inf would be NaN.
LOG_P_FLOOR = -1.0e4


class TokenLogProbs(NamedTuple):
    """Both of the targets' shape, float32 (float64 for float64 logits); entropy in nats, None if not asked for."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None


def token_log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = True,
    consume_logits: bool = False,
    max_chunk_bytes: int = _CHUNK_BYTES,
) -> TokenLogProbs:
    """Log-prob of each target under its logits, with the distribution's entropy from the same pass.

    Args:
        logits: [..., V], any float dtype; `logits[i]` is the distribution that `targets[i]` was drawn from, so the
            caller has shifted by one already.
        targets: int64 [...], each in [0, V).
        temperature: above 0; logits are divided by it.
        with_entropy: False skips the entropy and gives None.
        consume_logits: True lets backward write the gradient into the logits' own memory, which saves a tensor of
            their size; nothing may read the logits afterwards.
        max_chunk_bytes: bound on one fp32 temporary; two to three live at once.

    Raises:
        ValueError: shapes that don't belong together, or a temperature that isn't above 0.
    """
    check_inputs(logits.shape[:-1], targets, temperature)
    vocab = logits.shape[-1]
    flat = logits.reshape(-1, vocab)
    rows = _rows_per_chunk(vocab, max_chunk_bytes)
    outputs = apply_function(
        _FromLogits, flat, targets.reshape(-1), float(temperature), with_entropy, consume_logits, rows
    )
    return shaped(outputs, targets)


def linear_token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = True,
    max_chunk_bytes: int = _CHUNK_BYTES,
) -> TokenLogProbs:
    """`token_log_probs(hidden @ weight.T, targets)` without ever holding the logits of all positions.

    Backward computes each chunk's logits again: one more product with the head buys O(chunk) memory instead of O(N V).

    Args:
        hidden: [..., H], the last layer's output; same dtype as `weight`.
        weight: [V, H], the head (or tied embedding); a plain tensor. Its gradient is summed over chunks in fp32.
        targets: int64 [...].
        temperature: above 0.
        with_entropy: False skips the entropy and gives None.
        max_chunk_bytes: bound on one fp32 temporary.

    Raises:
        ValueError: as `token_log_probs`.
    """
    check_inputs(hidden.shape[:-1], targets, temperature)
    rows = _rows_per_chunk(weight.shape[0], max_chunk_bytes)
    flat = hidden.reshape(-1, hidden.shape[-1])
    outputs = apply_function(_FromHidden, flat, weight, targets.reshape(-1), float(temperature), with_entropy, rows)
    return shaped(outputs, targets)


def entropy_from_logits(logits: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """Entropy in nats of each row of logits [..., V] -> [...]; -inf entries count as impossible."""
    entropy = token_log_probs(logits, torch.zeros_like(logits[..., 0], dtype=torch.int64), temperature=temperature)[1]
    assert entropy is not None
    return entropy


def check_inputs(leading: torch.Size, targets: torch.Tensor, temperature: float) -> None:
    """Raise ValueError unless there is one distribution per target and the temperature can divide."""
    if leading != targets.shape:
        raise ValueError(
            f"expected one distribution per target, got {tuple(leading)} of them for targets {tuple(targets.shape)}; "
            "shift and slice before the call"
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be above 0 and finite, got {temperature}; score greedy samples at 1.0")


def _rows_per_chunk(vocab: int, max_chunk_bytes: int) -> int:
    return max(1, max_chunk_bytes // (4 * vocab))


def shaped(outputs: tuple[torch.Tensor, torch.Tensor | None], targets: torch.Tensor) -> TokenLogProbs:
    """Give flat log-probs and entropy the shape of the targets."""
    log_probs, entropy = outputs
    shape = targets.shape
    return TokenLogProbs(log_probs.reshape(shape), None if entropy is None else entropy.reshape(shape))


def scale_logits(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits / T in the dtype that statistics are computed in."""
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return exact if temperature == 1.0 else exact / temperature


def _forward(
    scaled_logits: Callable[[slice], torch.Tensor], targets: torch.Tensor, with_entropy: bool, rows: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    log_probs, entropy = [], []
    for start in range(0, max(1, targets.shape[0]), rows):
        chunk = slice(start, start + rows)
        log_p = torch.log_softmax(scaled_logits(chunk), dim=-1)
        log_probs.append(log_p.gather(-1, targets[chunk].unsqueeze(-1)).squeeze(-1))
        if with_entropy:
            p = log_p.exp()
            entropy.append(-p.mul_(log_p.clamp_(min=LOG_P_FLOOR)).sum(dim=-1))
    return torch.cat(log_probs), torch.cat(entropy) if with_entropy else None


def _chunk_backward(
    scaled: torch.Tensor,
    targets: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient with respect to `scaled`, [rows, V]: -g (p - onehot) - g_H p (l + H)."""
    column, at_target = -grad_log_probs.unsqueeze(-1), targets.unsqueeze(-1)
    minus_one = scaled.new_full((), -1.0).expand_as(at_target)
    if entropy is None or grad_entropy is None:
        return torch.softmax(scaled, dim=-1).scatter_add_(-1, at_target, minus_one).mul_(column)
    log_p = torch.log_softmax(scaled, dim=-1)
    p = log_p.exp()
    spread = log_p.clamp_(min=LOG_P_FLOOR).add_(entropy.unsqueeze(-1)).mul_(p)
    p.scatter_add_(-1, at_target, minus_one).mul_(column)
    return p.sub_(spread.mul_(grad_entropy.unsqueeze(-1)))


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        consume_logits: bool,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        def scaled_logits(chunk: slice) -> torch.Tensor:
            return scale_logits(logits[chunk], temperature)

        log_probs, entropy = _forward(scaled_logits, targets, with_entropy, rows)
        ctx.save_for_backward(logits, targets, entropy)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.consume_logits, ctx.rows = temperature, consume_logits, rows
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        logits, targets, entropy = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 6
        grad, grad_entropy = _per_logit(grad_log_probs, grad_entropy, ctx.temperature)
        out = logits.detach() if ctx.consume_logits else torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.rows):
            chunk = slice(start, start + ctx.rows)
            scaled = scale_logits(logits[chunk], ctx.temperature)
            grad_scaled = _chunk_backward(
                scaled, targets[chunk], _part(entropy, chunk), grad[chunk], _part(grad_entropy, chunk)
            )
            out[chunk] = grad_scaled
        return out, None, None, None, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        def scaled_logits(chunk: slice) -> torch.Tensor:
            return scale_logits(hidden[chunk] @ weight.T, temperature)

        log_probs, entropy = _forward(scaled_logits, targets, with_entropy, rows)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.rows = temperature, rows
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        hidden, weight, targets, entropy = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 6
        grad, grad_entropy = _per_logit(grad_log_probs, grad_entropy, ctx.temperature)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if wants_weight else None
        for start in range(0, hidden.shape[0], ctx.rows):
            chunk = slice(start, start + ctx.rows)
            scaled = scale_logits(hidden[chunk] @ weight.T, ctx.temperature)
            grad_scaled = _chunk_backward(
                scaled, targets[chunk], _part(entropy, chunk), grad[chunk], _part(grad_entropy, chunk)
            )
            grad_logits = grad_scaled.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[chunk]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def apply_function(
    function: type[torch.autograd.Function], *inputs: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call an autograd function that returns log-probs and entropy (or None)."""
    outputs: tuple[torch.Tensor, torch.Tensor | None] = function.apply(*inputs)
    return outputs


def _per_logit(
    grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Divide both gradients by T, which the logits were divided by; zeros where log-probs got none."""
    if grad_entropy is not None:
        grad_entropy = grad_entropy / temperature
    if grad_log_probs is not None:
        return grad_log_probs / temperature, grad_entropy
    assert grad_entropy is not None
    return torch.zeros_like(grad_entropy), grad_entropy


def _part(values: torch.Tensor | None, chunk: slice) -> torch.Tensor | None:
    return None if values is None else values[chunk]
