"""What every loop shares: the order of steps, validation, records, checkpoints, exact resume and a clean end.

A Learner knows one algorithm's step; a Trainer repeats it. What a step may depend on is its number, the weights, the
optimizer, the data position, controllers and random state: all of it is in a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from algos import checkpoint as ckpt
from algos.config import Config
from algos.config_load import to_flat
from algos.metrics import MetricsLog, Row, RunPaths, memory_row
from algos.progress import Reporter
from algos.stop import StopRequests
from hybrid.profiler import record_phases

HARMLESS_KEYS = ("trainer.",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to.

    Attributes:
        metrics: a row a step, those before a resume included.
        paths: the run folder's files.
        model_folder: the last checkpoint's model, which Transformers loads; None if no step was done.
        num_steps: steps done in all.
        stopped_by: the signal that ended the run early, if one did.
    """

    metrics: list[Row]
    paths: RunPaths
    model_folder: Path | None
    num_steps: int
    stopped_by: int | None


class Learner(Protocol):
    """One algorithm: what a Trainer asks of it."""

    def step(self, step: int) -> tuple[Row, list[dict[str, Any]]]:
        """Do step number ``step`` (from 1); return its numbers, ``tokens`` among them, and some of its samples."""

    def validate(self, step: int) -> Row:
        """Measure the weights as they are after ``step`` steps; must not change what later steps do."""

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All that the next step depends on besides weights and random state: JSON values, and tensors."""

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""

    def write_model(self, folder: Path) -> None:
        """Write the weights in fp32, config and tokenizer for Transformers."""


class Trainer:
    """Repeats a Learner's step until the last one or a signal."""

    def __init__(
        self,
        learner: Learner,
        config: Config,
        paths: RunPaths,
        *,
        num_steps: int,
        device: torch.device,
        reporter: Reporter,
        checkpoint: ckpt.Checkpoint | None = None,
    ) -> None:
        """Open the records; with ``checkpoint`` put everything back as it was (the Learner has its weights already)."""
        self._learner, self._config, self._paths, self._reporter = learner, config, paths, reporter
        self._num_steps, self._device = num_steps, device
        self._step = checkpoint.step if checkpoint else 0
        self._saved: Path | None = checkpoint.folder if checkpoint else None
        self._before: Row = {}
        self._log = MetricsLog(paths, last_step=self._step, tensorboard="tensorboard" in config.trainer.logger)
        if checkpoint:
            self._restore(checkpoint)

    def fit(self, stop: StopRequests) -> Result:
        """Run the steps that are left, or until ``stop`` has seen a signal; leave a checkpoint of the last one."""
        save_freq = self._config.trainer.save_freq
        self._reporter.begin(num_steps=self._num_steps, step=self._step)
        try:
            if self._step == 0 and self._validates() and self._config.trainer.val_before_train and stop.signum is None:
                self._before = self._learner.validate(0)
                self._say_validation(self._before)
            while self._step < self._num_steps and stop.signum is None:
                self._one_step()
                if save_freq > 0 and self._step % save_freq == 0:
                    self._save()
            self._save()
        finally:
            self._reporter.end()
            self._log.close()
        return Result(
            metrics=self._log.rows,
            paths=self._paths,
            model_folder=self._saved / ckpt.MODEL if self._saved else None,
            num_steps=self._step,
            stopped_by=stop.signum,
        )

    def _one_step(self) -> None:
        started = time.perf_counter()
        with record_phases() as phases:
            numbers, completions = self._learner.step(self._step + 1)
        seconds = time.perf_counter() - started
        self._step += 1
        numbers["tokens/s"] = numbers.pop("tokens") / seconds
        row: Row = {"step": self._step, **numbers, **phases.metrics(), "time/step": seconds}
        row.update(memory_row(self._device))
        row.update({f"before/{name}": value for name, value in self._before.items()})
        self._before = {}
        if self._validates() and self._step % self._config.trainer.test_freq == 0:
            row.update(self._learner.validate(self._step))
            self._say_validation(row)
        self._log.write(row, completions)
        self._reporter.show(row)

    def _validates(self) -> bool:
        return self._config.trainer.test_freq > 0

    def _say_validation(self, row: Row) -> None:
        self._reporter.say(f"validation after step {self._step}: mean reward {row['val/reward/mean']:.3f}")

    def _save(self) -> None:
        folder = self._paths.checkpoint(self._step)
        if self._step == 0 or (self._saved is not None and self._saved.resolve() == folder.resolve()):
            return
        state, tensors = self._learner.state_dict()
        self._saved = ckpt.save_checkpoint(
            folder,
            self._step,
            state={"learner": state, "random": ckpt.host_random_state(), "keys": to_flat(self._config)},
            tensors={"learner": tensors, "random": ckpt.torch_random_state()},
            write_model=self._learner.write_model,
            max_to_keep=self._config.trainer.max_ckpt_to_keep,
        )

    def _restore(self, checkpoint: ckpt.Checkpoint) -> None:
        self._learner.load_state_dict(checkpoint.state["learner"], checkpoint.tensors["learner"])
        ckpt.restore_host_random_state(checkpoint.state["random"])
        ckpt.restore_torch_random_state(checkpoint.tensors["random"])
        self._reporter.say(f"Resuming after step {checkpoint.step} of {self._num_steps} from {checkpoint.folder}.")
        then = checkpoint.state["keys"]
        now = {
            name: list(value) if isinstance(value, tuple) else value for name, value in to_flat(self._config).items()
        }
        changed = [f"{name} {then.get(name)} -> {value}" for name, value in now.items() if then.get(name) != value]
        changed = [text for text in changed if not text.startswith(HARMLESS_KEYS)]
        if changed:
            self._reporter.say(f"Changed since that checkpoint: {', '.join(changed)}.")
