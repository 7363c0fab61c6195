"""The numbers of one step, from its batch of samples and their scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from algos.data import Prompt
from algos.groups import group_stats
from algos.metrics import Row
from algos.rewards import Scores
from hybrid.batch import response_mask


def sample_metrics(batch: TensorDict, scores: Scores) -> Row:
    """Rewards (of scored samples), lengths in tokens, and the share of groups that teach nothing: all rewards equal."""
    kept = scores.scores[scores.scored].double()
    lengths = batch["response_len"].double()
    stats = group_stats(scores.scores, group_id=batch["group_id"], mask=response_mask(batch), scored=scores.scored)
    num_groups = int(stats.index.max()) + 1
    with_spread = len(torch.unique(stats.index[stats.has_spread]))
    row = {f"reward/{name}": value for name, value in scores.metrics.items()}
    row.update(
        {
            "reward/mean": float(kept.mean()),
            "reward/std": float(kept.std(correction=0)) if len(kept) else math.nan,
            "response_length/mean": float(lengths.mean()),
            "response_length/max": float(lengths.max()),
            "response_length/truncated": float(batch["truncated"].double().mean()),
            "prompt_length/mean": float(batch["prompt_len"].double().mean()),
            "groups/without_spread": 1.0 - with_spread / num_groups,
        }
    )
    return row


def completion_rows(
    step: int, prompts: Sequence[Prompt], responses: Sequence[str], scores: Scores, *, limit: int
) -> list[dict[str, Any]]:
    """Rows for ``completions.jsonl``: the first sample of each prompt, then the second of each, up to ``limit``.

    ``responses`` are the samples' texts, ``len(responses) // len(prompts)`` adjacent ones per prompt.
    """
    num_samples = len(responses) // len(prompts)
    order = [prompt_idx * num_samples + turn for turn in range(num_samples) for prompt_idx in range(len(prompts))]
    rows = []
    for sample_idx in order[:limit]:
        prompt = prompts[sample_idx // num_samples]
        score = float(scores.scores[sample_idx]) if bool(scores.scored[sample_idx]) else None
        rows.append(
            {
                "step": step,
                "prompt": prompt.row.prompt,
                "response": responses[sample_idx],
                "reward": score,
                "ground_truth": prompt.row.ground_truth,
            }
        )
    return rows
