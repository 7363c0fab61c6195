"""The demo: SmolLM2-135M-Instruct learns to answer sums with a bare number, with GRPO, on two CPU cores.

    python -m algos.demo [seed=0] [key=value ...]

Task: "What is 3 + 4? Answer with the number only.", sums from reasoning-gym. Reward: half for a bare number, half for
the right one. 8 prompts of 8 samples a step, at most 12 new tokens, AdamW at a constant 1e-5, no KL term, token weights
for generation in bf16; ``kl/mean`` is the KL to the starting model, estimated on four samples a step. Any key of
``python -m algos.grpo`` may be set.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from algos.cli import refuse, run_and_report
from algos.config_load import load_config
from algos.errors import InputError

SUMS = (
    "reasoning_gym:basic_arithmetic:operators=+:min_terms=2:max_terms=2:min_digits=1:max_digits=1"
    ":allow_parentheses=false:allow_negation=false:size=1000:seed={seed}"
)
MODEL, MODEL_FOLDER = "smollm2", ".cache/smollm2-135m-instruct"


def settings(seed: int) -> dict[str, Any]:
    """The demo's keys that differ from the defaults."""
    return {
        "model.path": MODEL_FOLDER,
        "model.enable_gradient_checkpointing": False,
        "data.train_files": SUMS.format(seed=seed),
        "data.prompt_template": "What is {expression}?",
        "data.prompt_suffix": " Answer with the number only.",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 64,
        "data.max_response_length": 12,
        "reward.function": "reasoning_gym:format=number",
        "rollout.n": 8,
        "actor.optim.lr": 1e-5,
        "actor.optim.weight_decay": 0.0,
        "algorithm.rollout_correction.rollout_is": "token",
        "ref.kl_metric_samples": 4,
        "trainer.total_training_steps": 25,
        "trainer.project_name": "demo",
        "trainer.experiment_name": f"seed{seed}",
        "trainer.seed": seed,
    }


def main(args: Sequence[str]) -> int:
    """Run the demo in a run folder of its own and return the exit code."""
    given = dict(arg.partition("=")[::2] for arg in args)
    try:
        seed = load_config(None, [f"trainer.seed={given.pop('seed', '0')}"]).config.trainer.seed
        keys = settings(seed) | {"trainer.output_dir": str(_free_folder(Path("runs") / "demo", f"seed{seed}"))}
        loaded = load_config(keys, [f"{name}={value}" for name, value in given.items()])
        if loaded.config.model.path == MODEL_FOLDER:
            _make_model()
        return run_and_report(loaded)
    except InputError as error:
        return refuse(error)


def _make_model() -> None:
    from hybrid.models import prepare_model

    if not Path(MODEL_FOLDER).is_dir():
        print(f"Unpacking the model into {MODEL_FOLDER} (about 30 s, once) ...", flush=True)
    try:
        prepare_model(MODEL, MODEL_FOLDER)
    except (ValueError, FileNotFoundError) as error:
        raise InputError(str(error)) from None


def _free_folder(root: Path, name: str) -> Path:
    """The first of root/name-1, root/name-2, ... that does not exist."""
    return next(folder for number in count(1) if not (folder := root / f"{name}-{number}").exists())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
