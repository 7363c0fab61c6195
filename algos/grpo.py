"""GRPO and its critic-free relatives: ``train(config)`` and ``python -m algos.grpo key=value ...``.

One step, as ``Grpo.step`` has it: draw prompts; bring the trainer's weights into the generation engine; generate
``rollout.n`` samples a prompt; score their text; add log-probs where they are needed; estimate advantages; update over
the mini-batches. The weights that sample in step k have version k.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from omegaconf import DictConfig
from tensordict import TensorDict

from algos.advantages import AdvantageInputs, AdvantageOptions, compute_advantages, token_rewards_from_scores
from algos.checkpoint import load_checkpoint
from algos.config import Config
from algos.config_check import notices
from algos.config_load import Loaded, load_config, to_yaml
from algos.data import Prompt
from algos.engines import Engines, make_engines, updates_per_step
from algos.kl import kl_estimate, make_kl_controller, mean_kl, rewards_with_kl
from algos.metrics import Row
from algos.policy_loss import PolicyLoss
from algos.preflight import Prepared, prepared_run
from algos.progress import make_reporter
from algos.rewards import RewardManager, Scores
from algos.rollout_correction import Importance
from algos.rows import completion_rows, sample_metrics
from algos.stop import StopRequests
from algos.trainer import Result, Trainer
from hybrid.batch import response_mask, select
from hybrid.engines.sampling import SamplingParams, step_seed
from hybrid.profiler import phase

__all__ = ["Grpo", "Result", "run", "train"]

Level = Literal["token", "sequence"]
ROLLOUT, VALIDATION, SHUFFLE, REFERENCE = range(4)
"""What a step's seed is for; each use has a stream of its own."""


def train(config: Config | Mapping[str, Any] | DictConfig) -> Result:
    """Train as ``config`` says: a Config, a mapping with nested or dotted keys, or an OmegaConf.

    Raises:
        InputError: something in the input is wrong; no model has been loaded.
        CheckpointError: the checkpoint to resume from is not whole.
    """
    return run(load_config(config))


def run(loaded: Loaded) -> Result:
    """Train as ``loaded`` says; Ctrl-C and SIGTERM end the run after the current step, with a checkpoint."""
    with StopRequests() as stop, prepared_run(loaded) as prepared:
        config = prepared.config
        checkpoint = load_checkpoint(prepared.resume_from) if prepared.resume_from else None
        prepared.paths.config.write_text(to_yaml(config))
        reporter = make_reporter(enabled="console" in config.trainer.logger)
        for text in notices(loaded):
            reporter.say(text)
        torch.manual_seed(config.trainer.seed)
        engines = make_engines(prepared, weights_from=checkpoint.model_folder if checkpoint else prepared.model_folder)
        trainer = Trainer(
            Grpo(prepared, engines),
            config,
            prepared.paths,
            num_steps=prepared.num_steps,
            device=prepared.device,
            reporter=reporter,
            checkpoint=checkpoint,
        )
        return trainer.fit(stop)


class Grpo:
    """The step of GRPO over a pair of engines."""

    def __init__(self, prepared: Prepared, engines: Engines) -> None:
        """Borrow the engines; nothing is computed yet."""
        self._synchronize = torch.cuda.synchronize if prepared.device.type == "cuda" else None
        self._prepared, self._config, self._engines = prepared, prepared.config, engines
        self._rewards = RewardManager(prepared.reward)
        control = self._config.algorithm.kl_ctrl
        self._kl_control = make_kl_controller(
            control.type, coefficient=control.kl_coef, target=control.target_kl, horizon=control.horizon
        )
        self._num_updates = updates_per_step(self._config)
        self._on_policy = self._num_updates == 1
        correction = self._config.algorithm.rollout_correction
        level, limit = correction.rollout_is, correction.rollout_is_threshold
        self._importance = None if level == "none" else Importance(level=cast(Level, level), limit=limit)

    def step(self, step: int) -> tuple[Row, list[dict[str, Any]]]:
        """Do step number ``step`` (from 1); return its numbers and some of its samples."""
        prompts = self._prepared.loader.next_batch()
        with self._phase("transition"):
            self._publish(step)
        with self._phase("rollout"):
            batch = self._generate(prompts, self._sampling(step))
        with self._phase("reward"):
            responses, scores = self._score(prompts, batch)
        with self._engines.rollout.training_memory():
            with self._phase("log_probs"):
                self._add_log_probs(batch, step)
            row = self._add_advantages(batch, scores)
            self._engines.weights.begin_training()
            with self._phase("update"):
                row.update(self._update(batch, step))
        row.setdefault("kl/mean", row.get("kl/old", math.nan))
        row.update(sample_metrics(batch, scores))
        row["tokens"] = float(batch["prompt_len"].sum() + batch["response_len"].sum())
        limit = self._config.trainer.completions_per_step
        return row, completion_rows(step, prompts, responses, scores, limit=limit)

    def validate(self, step: int) -> Row:
        """Score the validation prompts under the current weights; the draws are the same at every step."""
        assert self._prepared.validation is not None
        started = time.perf_counter()
        self._publish(step + 1)
        rewards, lengths = [], []
        for prompts in self._prepared.validation:
            batch = self._generate(prompts, self._validation_sampling())
            _, scores = self._score(prompts, batch)
            rewards.append(scores.scores[scores.scored])
            lengths.append(batch["response_len"])
        return {
            "val/reward/mean": float(torch.cat(rewards).double().mean()),
            "val/response_length/mean": float(torch.cat(lengths).double().mean()),
            "time/validation": time.perf_counter() - started,
        }

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Data position and KL controller as JSON; optimizer and schedule as tensors."""
        state = {"loader": self._prepared.loader.state_dict(), "kl_control": self._kl_control.state_dict()}
        return state, self._engines.train.optimizer_state_dict()

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; the weights were loaded with the engines."""
        self._prepared.loader.load_state_dict(state["loader"])
        self._kl_control.load_state_dict(state["kl_control"])
        self._engines.train.load_optimizer_state_dict(tensors)

    def write_model(self, folder: Path) -> None:
        """Write the fp32 weights, config and tokenizer for Transformers."""
        self._engines.train.save_pretrained(folder)
        self._prepared.tokenizer.save_pretrained(folder)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return phase(name, synchronize=self._synchronize)

    def _publish(self, version: int) -> None:
        self._engines.weights.publish(version)
        self._engines.rollout.version = version

    def _generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> TensorDict:
        """Sample responses; the batch is on the host, from where the train engine takes its micro-batches."""
        return self._engines.rollout.generate([prompt.ids for prompt in prompts], params).to("cpu")

    def _sampling(self, step: int) -> SamplingParams:
        rollout = self._config.rollout
        return SamplingParams(
            n=rollout.n,
            max_new_tokens=self._config.data.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=max(rollout.top_k, 0),
            stop_token_ids=self._prepared.stop_token_ids,
            seed=step_seed(self._config.trainer.seed, step, ROLLOUT),
        )

    def _validation_sampling(self) -> SamplingParams:
        how = self._config.rollout.val_kwargs
        return SamplingParams(
            n=how.n,
            max_new_tokens=self._config.data.max_response_length,
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=max(how.top_k, 0),
            stop_token_ids=self._prepared.stop_token_ids,
            greedy=not how.do_sample,
            seed=step_seed(self._config.trainer.seed, 0, VALIDATION),
        )

    def _score(self, prompts: Sequence[Prompt], batch: TensorDict) -> tuple[list[str], Scores]:
        """Score the text of each response, special tokens left out."""
        num_samples = len(batch) // len(prompts)
        ids = zip(batch["response_ids"].tolist(), batch["response_len"].tolist(), strict=True)
        decode = self._prepared.tokenizer.decode
        responses = [decode(row[:length], skip_special_tokens=True) for row, length in ids]
        rows = [prompt.row for prompt in prompts for _ in range(num_samples)]
        return responses, self._rewards.score(rows, responses)

    def _add_log_probs(self, batch: TensorDict, step: int) -> None:
        """Add ``old_log_probs`` unless they are those of the one update, and what reference log-probs are wanted."""
        config, engines, temperature = self._config, self._engines, self._config.rollout.temperature
        if not self._on_policy or config.algorithm.use_kl_in_reward:
            batch["old_log_probs"] = engines.train.log_probs(batch, temperature=temperature)["log_probs"]
        if engines.reference is None:
            return
        chosen = torch.arange(len(batch))
        if not (config.actor.use_kl_loss or config.algorithm.use_kl_in_reward):
            generator = torch.Generator().manual_seed(step_seed(config.trainer.seed, step, REFERENCE) >> 1)
            chosen = torch.randperm(len(batch), generator=generator)[: config.ref.kl_metric_samples].sort().values
        part = select(batch, chosen)
        log_probs = engines.reference.log_probs(part, temperature=temperature)["log_probs"]
        batch["ref_log_probs"] = torch.zeros_like(batch["rollout_log_probs"])
        batch["ref_log_probs"][chosen, : log_probs.shape[1]] = log_probs
        batch["ref_known"] = torch.zeros(len(batch), dtype=torch.bool)
        batch["ref_known"][chosen] = True

    def _add_advantages(self, batch: TensorDict, scores: Scores) -> Row:
        """Add ``advantages``, and ``loss_mask``, which leaves out samples that could not be scored."""
        algorithm, mask = self._config.algorithm, response_mask(batch)
        batch["scores"], batch["scored"] = scores.scores, scores.scored
        batch["loss_mask"] = mask & scores.scored.unsqueeze(-1)
        inputs = {"mask": mask, "group_id": batch["group_id"], "scored": scores.scored}
        row: Row = {}
        if algorithm.use_kl_in_reward:
            kl = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], kind=algorithm.kl_penalty, mask=mask)
            coefficient, current = self._kl_control.coefficient, mean_kl(kl, mask)
            token_scores = token_rewards_from_scores(scores.scores, mask, scored=scores.scored)
            inputs["token_rewards"] = rewards_with_kl(token_scores, kl, mask, coefficient=coefficient)
            self._kl_control.update(current_kl=current, num_samples=len(batch))
            row = {"reward/kl_coefficient": coefficient, "reward/kl_penalty": current}
        else:
            inputs["scores"] = scores.scores
        options = AdvantageOptions(gamma=algorithm.gamma, norm_by_std=algorithm.norm_adv_by_std_in_grpo)
        batch["advantages"] = compute_advantages(
            algorithm.adv_estimator, AdvantageInputs(**inputs), options
        ).advantages.float()
        return row

    def _update(self, batch: TensorDict, step: int) -> Row:
        """Take the optimizer steps; metrics are means over them, the learning rate is the last one's."""
        rows = []
        for samples in self._mini_batches(batch, step):
            mini_batch = select(batch, samples)
            if not bool(mini_batch["loss_mask"].any()):
                continue
            num_ref_tokens = 0
            if "ref_known" in mini_batch:
                num_ref_tokens = int((mini_batch["loss_mask"] & mini_batch["ref_known"].unsqueeze(-1)).sum())
            loss = PolicyLoss(
                actor=self._config.actor,
                on_policy=self._on_policy,
                importance=self._importance,
                num_ref_tokens=num_ref_tokens,
            )
            rows.append(self._engines.train.update(mini_batch, loss, temperature=self._config.rollout.temperature))
        return _mean_of_updates(rows)

    def _mini_batches(self, batch: TensorDict, step: int) -> Iterator[torch.Tensor]:
        """Yield the sample indices of each mini-batch: whole prompts, each in every epoch once."""
        num_prompts = len(batch) // self._config.rollout.n
        by_prompt = torch.arange(len(batch)).view(num_prompts, self._config.rollout.n)
        generator = torch.Generator().manual_seed(step_seed(self._config.trainer.seed, step, SHUFFLE) >> 1)
        for _ in range(self._config.actor.ppo_epochs):
            shuffled = self._config.actor.shuffle
            order = torch.randperm(num_prompts, generator=generator) if shuffled else torch.arange(num_prompts)
            for part in order.chunk(self._num_updates // self._config.actor.ppo_epochs):
                yield by_prompt[part].flatten()


def _mean_of_updates(rows: Sequence[Row]) -> Row:
    """Mean of each number over the updates that have it; the last learning rate; the engine's own behind ``actor/``."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name if "/" in name else f"actor/{name}", []).append(value)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return means | {name: values[-1] for name, values in found.items() if name == "actor/lr"}


if __name__ == "__main__":
    from algos.cli import main

    sys.exit(main(sys.argv[1:]))
