"""Seconds of one GRPO step of SmolLM2-135M on a CPU: ours and TRL's, in turns within one run.

    flock /tmp/heavy.lock python -m bench.grpo_step_cpu [--steps 6] [--only ours]

The same work for both: 4 prompts "What is a + b? Answer with the number only.", 8 samples of each, at most 12 new
tokens, temperature 1, one AdamW update at lr 2e-5 on all 32 samples, no KL, fp32 training, 2 threads. Ours includes
the transition of the new weights into the rollout engine's own bf16 tensors. The two policies learn apart, so lengths
of responses are recorded beside the times. Step 0 warms up and is left out of the medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from bench.record import ROOT, save, summary

MODEL = ROOT / ".cache" / "smollm2-135m-instruct"


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A prompt's text and its answer."""

    text: str
    answer: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The sizes of a step."""

    num_steps: int
    num_prompts: int = 4
    num_samples: int = 8
    max_new_tokens: int = 12
    lr: float = 2e-5

    def questions(self, step: int) -> list[Question]:
        """Return the prompts of one step, the same for whoever asks."""
        numbers = random.Random(step)
        pairs = [(numbers.randint(1, 20), numbers.randint(1, 20)) for _ in range(self.num_prompts)]
        return [Question(f"What is {a} + {b}? Answer with the number only.", a + b) for a, b in pairs]


def reward_of(text: str, answer: int) -> float:
    """Half for a bare number, half for the right one."""
    text = text.strip()
    return 0.5 * bool(re.fullmatch(r"\d+", text)) + 0.5 * (text == str(answer))


class OurStep:
    """Our engines, with one GRPO step as a method, and the seconds of each of its phases."""

    def __init__(self, task: Task, model: Path) -> None:
        """Load both engines and plan the transition between them."""
        from transformers import AutoTokenizer

        from algos.weights import WeightPublisher
        from hybrid.engines.rollout_torch import TorchRolloutEngine
        from hybrid.engines.train_torch import OptimConfig, TorchTrainEngine

        self.task = task
        self.seconds: dict[str, list[float]] = {}
        self.lengths: list[float] = []
        self.rewards: list[float] = []
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        stop = int(self._tokenizer.eos_token_id)
        self._stop_token_ids = (stop,)
        self._rollout = TorchRolloutEngine(model, pad_token_id=stop)
        self._train = TorchTrainEngine(model, optim=OptimConfig(lr=task.lr, weight_decay=0.0))
        self._weights = WeightPublisher(self._train.tensors(), self._rollout.tensors())

    def run(self, step: int) -> None:
        """Do one step and note its seconds."""
        begin = time.perf_counter()
        questions = self.task.questions(step)
        with_phase = _Phases(self.seconds)
        self._weights.publish(step + 1)
        self._rollout.version = step + 1
        with_phase.done("transition")
        batch = self._sample(questions, step)
        with_phase.done("rollout")
        self._score(questions, batch)
        with_phase.done("reward")
        self._train.update(batch, self._loss, temperature=1.0)
        with_phase.done("update")
        self.seconds.setdefault("step", []).append(time.perf_counter() - begin)
        self.lengths.append(float(batch["response_len"].float().mean()))
        self.rewards.append(float(batch["scores"].mean()))

    def _sample(self, questions: list[Question], step: int) -> TensorDict:
        from hybrid.engines.rollout_torch import SamplingParams, step_seed

        chats = [[{"role": "user", "content": question.text}] for question in questions]
        prompts = self._tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
        params = SamplingParams(
            n=self.task.num_samples,
            max_new_tokens=self.task.max_new_tokens,
            stop_token_ids=self._stop_token_ids,
            seed=step_seed(0, step),
        )
        return self._rollout.generate(prompts, params)

    def _score(self, questions: list[Question], batch: TensorDict) -> None:
        from algos.group_advantages import grpo_advantages
        from hybrid.batch import response_mask

        ids = zip(batch["response_ids"].tolist(), batch["response_len"].tolist(), strict=True)
        texts = [self._tokenizer.decode(row[:length], skip_special_tokens=True) for row, length in ids]
        answers = [question.answer for question in questions for _ in range(self.task.num_samples)]
        batch["scores"] = torch.tensor([reward_of(text, a) for text, a in zip(texts, answers, strict=True)])
        mask = response_mask(batch)
        batch["advantages"] = grpo_advantages(batch["scores"], group_id=batch["group_id"], mask=mask)

    @staticmethod
    def _loss(log_probs: torch.Tensor, _entropy: torch.Tensor, micro_batch: TensorDict, totals: Any) -> Any:
        from algos.losses import ppo_clip_loss
        from hybrid.batch import loss_mask

        old, mask = log_probs.detach(), loss_mask(micro_batch)
        return ppo_clip_loss(log_probs, old, micro_batch["advantages"], mask, totals=totals)


class _Phases:
    """Seconds since the last phase ended, by phase."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self._seconds = seconds
        self._begin = time.perf_counter()

    def done(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds.setdefault(name, []).append(now - self._begin)
        self._begin = now


def main() -> None:
    """Run both in turns, print the medians and their ratio, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=6, help="steps of each, the first a warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--only", choices=("ours",), help="leave TRL out")
    parser.add_argument("--folder", type=Path, help="where the result file goes; build/bench if left out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from hybrid.models import prepare_model

    task = Task(num_steps=options.steps)
    ours = OurStep(task, prepare_model("smollm2", options.model))
    result: dict[str, Any] = {"task": dataclasses.asdict(task)}
    if options.only:
        for step in range(task.num_steps):
            ours.run(step)
    else:
        from bench import trl_step_cpu

        theirs = trl_step_cpu.run(task, options.model, between_steps=ours.run)
        result["trl"] = {"step": summary(theirs["seconds"][1:]), **theirs}
    result["ours"] = {name: summary(values[1:]) for name, values in ours.seconds.items()}
    result["ours"].update(seconds=ours.seconds["step"], response_length=ours.lengths, mean_reward=ours.rewards)
    if "trl" in result:
        result["ratio"] = result["ours"]["step"]["median"] / result["trl"]["step"]["median"]
    print(json.dumps(result, indent=1))
    print(save("grpo-step-cpu", result, folder=options.folder))


if __name__ == "__main__":
    main()
