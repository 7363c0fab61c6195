"""How one token is drawn from logits: temperature, top-k, top-p, greedy; with numbers that depend on the sample alone.

Random numbers: row i of a call with seed s draws from the counter-based stream Philox(key=(s, i)), one number a token.
So no two rows of a call share a stream, a row's text does not depend on which rows share its batch nor on the device
that draws, and the same seed gives the same text again. Take a different seed for each step: `step_seed`.

Log-probabilities: always of softmax(logits / temperature) over the whole vocabulary, in fp32, whatever top-k and top-p
left out, since that is what a train engine recomputes from the same weights. Where top-k or top-p cut the support to
mass S, the token was really drawn with probability p / S.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

_BLOCK = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How responses are sampled.

    Attributes:
        n: samples of each prompt.
        max_new_tokens: limit on a response's length, the stop token counted.
        temperature: logits are divided by it; above 0. Under `greedy` it only scales the log-probs reported.
        top_p: keep the most likely tokens whose mass reaches this; 1 keeps all.
        top_k: keep this many most likely tokens (and those as likely as the last of them); 0 keeps all.
        stop_token_ids: a response ends with the first of these, which is part of it.
        greedy: take the most likely token, the lowest id among equals.
        seed: of this call; 0 to 2**64 - 1.
    """

    n: int = 1
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    seed: int

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.n < 1 or self.max_new_tokens < 1:
            raise ValueError(f"Expected n >= 1 and max_new_tokens >= 1, but got {self.n} and {self.max_new_tokens}.")
        if not self.temperature > 0:
            raise ValueError(
                f"Expected temperature > 0, but got {self.temperature}; for the most likely token set greedy."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Expected 0 < top_p <= 1, but got {self.top_p}; 1 turns it off.")
        if self.top_k < 0:
            raise ValueError(f"Expected top_k >= 0, but got {self.top_k}; 0 turns it off.")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"Expected a seed between 0 and 2**64 - 1, but got {self.seed}.")

    @property
    def cuts_support(self) -> bool:
        """Whether top-k or top-p can leave tokens out."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0)


def check_prompts(prompts: Sequence[Sequence[int]], *, vocab_size: int, max_positions: int | None) -> None:
    """Refuse with ValueError what an engine can't continue: no prompt, an empty one, one too long, a strange id."""
    if not prompts:
        raise ValueError("Expected at least one prompt, but got none.")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"Expected prompts with at least one token, but prompt {i} is empty.")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(f"Expected ids below {vocab_size}, but prompt {i} holds {wrong}; check the tokenizer.")
        if max_positions is not None and len(prompt) >= max_positions:
            raise ValueError(
                f"Prompt {i} has {len(prompt)} tokens, which leaves no room for a response within the model's "
                f"{max_positions} positions; set data.max_prompt_length lower."
            )


def step_seed(base_seed: int, step: int, replica: int = 0) -> int:
    """Return the seed of one training step (and of one replica, where several sample the same rows)."""
    return int(np.random.SeedSequence([base_seed, step, replica]).generate_state(1, np.uint64)[0])


def uniforms(seed: int, rows: range, num_tokens: int) -> torch.Tensor:
    """Return float64 [len(rows), num_tokens] in [0, 1): the numbers that each row's tokens are drawn with."""
    streams = [np.random.Generator(np.random.Philox(key=[seed, row])).random(num_tokens) for row in rows]
    return torch.from_numpy(np.stack(streams))


def sample_tokens(
    logits: torch.Tensor, draws: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row.

    Args:
        logits: [N, V], any float dtype.
        draws: float64 [N] in [0, 1), on the same device.
        params: what to draw.

    Returns:
        Token ids, int64 [N], and their log-probs, fp32 [N]; NaN log-probs where the logits are not finite.
    """
    scaled = logits.float()
    if params.temperature != 1:
        scaled = scaled / params.temperature
    largest, most_likely = scaled.max(dim=-1)
    weights = torch.exp(scaled - largest[:, None])
    total = weights.sum(dim=-1, dtype=torch.float64)
    if params.greedy:
        tokens = most_likely
    else:
        kept = _keep(scaled, weights, params) if params.cuts_support else weights
        tokens = _invert(kept, draws)
    chosen = scaled.gather(1, tokens[:, None])[:, 0]
    return tokens, (chosen - largest - total.log()).float()


def _keep(scaled: torch.Tensor, weights: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return `weights` with 0 for the tokens that top-k, then top-p on what is left, do not keep."""
    if 0 < params.top_k < scaled.shape[-1]:
        threshold = scaled.topk(params.top_k, dim=-1).values[:, -1:]
        weights = weights.masked_fill(scaled < threshold, 0.0)
    if params.top_p < 1:
        ordered, order = weights.double().sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.cumsum(dim=-1) - ordered
        is_dropped = mass_before >= params.top_p * ordered.sum(dim=-1, keepdim=True)
        weights = weights.masked_fill(torch.zeros_like(is_dropped).scatter(1, order, is_dropped), 0.0)
    return weights


def _invert(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return for each row the token at which the cumulative weight passes `draws` of the total, int64 [N].

    In two levels, blocks first, so that only one block per row needs running sums; these are in fp64. A token of
    weight 0 is never returned.
    """
    num_rows, num_tokens = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -num_tokens % _BLOCK)) if num_tokens % _BLOCK else weights
    blocks = padded.view(num_rows, -1, _BLOCK)
    masses = blocks.sum(dim=-1, dtype=torch.float64)
    edges = masses.cumsum(dim=-1)
    target = draws[:, None] * edges[:, -1:]
    target = torch.minimum(target, torch.nextafter(edges[:, -1:], torch.zeros_like(target)))
    block = torch.searchsorted(edges, target, right=True).clamp(max=blocks.shape[1] - 1)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(dim=-1)
    rest = (target - edges.gather(1, block) + masses.gather(1, block)).clamp(min=0)
    rest = torch.minimum(rest, torch.nextafter(inside[:, -1:], torch.zeros_like(rest)))
    place = torch.searchsorted(inside, rest, right=True).clamp(max=_BLOCK - 1)
    return (block * _BLOCK + place)[:, 0].clamp(max=num_tokens - 1)
