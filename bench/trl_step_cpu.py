"""TRL's GRPOTrainer on the work of `bench.grpo_step_cpu`, a step at a time: what a user would pick instead.

    python -m bench.trl_step_cpu [--steps 6]

Needs the package `trl`. The settings that differ from TRL's defaults are those of the task (group size, lengths,
learning rate, constant schedule) or make TRL faster here: no gradient checkpointing, everything in one micro-batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState

from bench.grpo_step_cpu import MODEL, Task, reward_of

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def run(task: Task, model: Path, *, between_steps: Callable[[int], object]) -> dict[str, list[float]]:
    """Train `task.num_steps` steps with TRL and return seconds and mean response length of each.

    A step runs from its beginning, before the samples are drawn, to the end of the optimizer's step.
    `between_steps(step)` is called after each, outside the time.
    """
    from trl import GRPOConfig, GRPOTrainer

    clock = _Clock(between_steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=_reward,
            train_dataset=_dataset(task),
            args=GRPOConfig(output_dir=folder, **_settings(task)),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.train()
    return {"seconds": clock.seconds, "response_length": clock.lengths}


class _Clock(TrainerCallback):
    def __init__(self, between_steps: Callable[[int], object]) -> None:
        self.seconds: list[float] = []
        self.lengths: list[float] = []
        self._between_steps = between_steps
        self._begin = 0.0

    def on_step_begin(self, _args: Any, _state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        self._begin = time.perf_counter()

    def on_step_end(self, _args: Any, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begin)
        self._between_steps(state.global_step - 1)

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
        if "completions/mean_length" in logs:
            self.lengths.append(logs["completions/mean_length"])


def _reward(completions: list[list[dict[str, str]]], answer: list[int], **_: Any) -> list[float]:
    return [reward_of(completion[0]["content"], a) for completion, a in zip(completions, answer, strict=True)]


def _dataset(task: Task) -> Dataset:
    questions = [question for step in range(task.num_steps) for question in task.questions(step)]
    prompts = [[{"role": "user", "content": question.text}] for question in questions]
    return Dataset.from_dict({"prompt": prompts, "answer": [question.answer for question in questions]})


def _settings(task: Task) -> dict[str, Any]:
    return {
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": task.num_prompts * task.num_samples,
        "gradient_accumulation_steps": 1,
        "num_generations": task.num_samples,
        "max_completion_length": task.max_new_tokens,
        "learning_rate": task.lr,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "num_iterations": 1,
        "max_steps": task.num_steps,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }


def main() -> None:
    """Print the seconds of TRL's steps alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=MODEL)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = run(Task(num_steps=options.steps), options.model, between_steps=lambda step: None)
    print("seconds per step:", [round(seconds, 2) for seconds in found["seconds"]])
    print("median after the first:", round(statistics.median(found["seconds"][1:]), 2))


if __name__ == "__main__":
    main()
