"""Advantages from rewards per token: GAE, REINFORCE++ and ReMax with a KL penalty in the reward.

All tensors are [B, R] and results float32. Tokens with mask False (observations between a model's turns, padding) are
stepped over: they neither earn, nor discount, nor carry a value, whatever stands there. A mask of none is all zeros.
"""

from __future__ import annotations

import torch

from algos.aggregate import masked_whiten


def token_rewards_from_scores(
    scores: torch.Tensor, mask: torch.Tensor, *, scored: torch.Tensor | None = None
) -> torch.Tensor:
    """Put each sample's score [B] on its last valid token; unscored samples and empty responses get none."""
    positions = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    last = torch.where(mask, positions, -1).amax(dim=-1, keepdim=True)
    at_last = mask & (positions == last)
    if scored is not None:
        at_last = at_last & scored.unsqueeze(-1)
    return torch.where(at_last, scores.float().unsqueeze(-1), 0.0)


def discounted_returns(token_rewards: torch.Tensor, mask: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """G_t = r_t + gamma G_{t'}, t' the next valid token; 0 on masked tokens."""
    rewards = torch.where(mask, token_rewards.float(), 0.0)
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.shape[0])
    for step in reversed(range(rewards.shape[1])):
        valid = mask[:, step]
        running = torch.where(valid, rewards[:, step] + gamma * running, running)
        returns[:, step] = torch.where(valid, running, 0.0)
    return returns


def gae_advantages(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), the last valid token being terminal.

    delta_t = r_t + gamma V_{t'} - V_t and A_t = delta_t + gamma lam A_{t'}, t' the next valid token.

    Returns:
        (advantages, returns). Returns are A + V of the unwhitened A; `whiten` then whitens A over valid tokens.
    """
    rewards = torch.where(mask, token_rewards.float(), 0.0)
    known = torch.where(mask, values.detach().float(), 0.0)
    advantages = torch.zeros_like(rewards)
    next_value = rewards.new_zeros(rewards.shape[0])
    running = rewards.new_zeros(rewards.shape[0])
    for step in reversed(range(rewards.shape[1])):
        valid = mask[:, step]
        delta = rewards[:, step] + gamma * next_value - known[:, step]
        running = torch.where(valid, delta + gamma * lam * running, running)
        next_value = torch.where(valid, known[:, step], next_value)
        advantages[:, step] = torch.where(valid, running, 0.0)
    returns = advantages + known
    return (masked_whiten(advantages, mask) if whiten else advantages), returns


def reinforce_plus_plus_advantages(
    token_rewards: torch.Tensor, mask: torch.Tensor, *, gamma: float = 1.0, scored: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++: discounted returns whitened over the batch's valid tokens (arXiv:2501.03262).

    Samples with `scored` False are left out of the whitening and get 0. Returns (advantages, returns).
    """
    counted = mask if scored is None else mask & scored.unsqueeze(-1)
    returns = discounted_returns(token_rewards, counted, gamma=gamma)
    return masked_whiten(returns, counted), returns


def remax_token_advantages(
    token_rewards: torch.Tensor,
    mask: torch.Tensor,
    *,
    baseline_scores: torch.Tensor,
    scored: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ReMax: A_t = sum_{k >= t} r_k - R(greedy), `baseline_scores` [B] (arXiv:2310.10505, algorithm 1).

    Returns (advantages, returns); both 0 for samples with `scored` False.
    """
    counted = mask if scored is None else mask & scored.unsqueeze(-1)
    returns = discounted_returns(token_rewards, counted, gamma=1.0)
    return torch.where(counted, returns - baseline_scores.float().unsqueeze(-1), 0.0), returns
