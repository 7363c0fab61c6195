"""AdamW's settings and the learning rate's schedule, by verl's names."""

import dataclasses
import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW with decoupled weight decay on every parameter, gradient clipping, warm-up and a schedule.

    Attributes:
        lr: the largest learning rate.
        weight_decay: decoupled weight decay.
        betas: AdamW's two decay rates.
        eps: AdamW's epsilon.
        clip_grad: gradients are scaled down to this global norm; infinity leaves them as they are.
        lr_warmup_steps: updates of linear warm-up from 0; -1 takes `lr_warmup_steps_ratio` of all updates.
        lr_warmup_steps_ratio: warm-up as a share of `total_training_steps`.
        lr_scheduler_type: what follows the warm-up: "constant", or "linear" or "cosine" down to `min_lr_ratio`.
        min_lr_ratio: smallest learning rate after the warm-up, as a share of `lr`.
        num_cycles: cosine waves; 0.5 is one fall.
        total_training_steps: updates of the whole run; needed by a ratio of warm-up and by a falling schedule.
    """

    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_grad: float = 1.0
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    lr_scheduler_type: Schedule = "constant"
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5
    total_training_steps: int = -1

    def __post_init__(self) -> None:
        """Refuse a schedule that can't be computed, and a clip that would stop all learning."""
        if self.lr_scheduler_type not in SCHEDULES:
            raise ValueError(
                f"Unknown lr_scheduler_type {self.lr_scheduler_type!r}; use one of {', '.join(SCHEDULES)}."
            )
        if not self.clip_grad > 0:
            raise ValueError(f"Expected clip_grad > 0, but got {self.clip_grad}; use infinity for no clipping.")
        uses_ratio = self.lr_warmup_steps < 0 and self.lr_warmup_steps_ratio > 0
        if (uses_ratio or self.lr_scheduler_type != "constant") and self.total_training_steps <= 0:
            raise ValueError(
                f"lr_scheduler_type={self.lr_scheduler_type} with lr_warmup_steps_ratio={self.lr_warmup_steps_ratio} "
                "needs total_training_steps, the number of updates of the whole run; set it."
            )

    @property
    def num_warmup_steps(self) -> int:
        """Updates of warm-up."""
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * max(self.total_training_steps, 0))


def learning_rate(config: OptimConfig, update_idx: int) -> float:
    """Return the learning rate of update number `update_idx`, counted from 0 (so a warm-up begins with 0)."""
    num_warmup = config.num_warmup_steps
    if update_idx < num_warmup:
        return config.lr * update_idx / num_warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (update_idx - num_warmup) / max(1, config.total_training_steps - num_warmup))
    height = 1.0 - progress
    if config.lr_scheduler_type == "cosine":
        height = 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * height)
