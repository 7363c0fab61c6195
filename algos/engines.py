"""The engines of a run, made from its keys: one that trains, one that samples, perhaps one that stays as it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from algos.config import Config
from algos.config_check import uses_vllm
from algos.preflight import Prepared
from algos.weights import Publisher, SyncPublisher, WeightPublisher
from hybrid.engines.optim import Schedule
from hybrid.engines.rollout_torch import TorchRolloutEngine
from hybrid.engines.rollout_vllm import Placement, VllmOptions, VllmRolloutEngine
from hybrid.engines.train_torch import OptimConfig, TorchTrainEngine

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """A run's engines; ``reference`` is None where no KL is wanted."""

    train: TorchTrainEngine
    rollout: TorchRolloutEngine | VllmRolloutEngine
    reference: TorchTrainEngine | None
    weights: Publisher


def make_engines(prepared: Prepared, *, weights_from: Path) -> Engines:
    """Load the models of a run: the trainer from ``weights_from`` (a checkpoint's model, or the first one's folder).

    The reference always has the first model's weights. The rollout engine's are overwritten by the first transition.
    """
    config, device, folder = prepared.config, prepared.device, prepared.model_folder
    train = TorchTrainEngine(
        weights_from,
        optim=_optim(config, prepared.num_steps),
        device=device,
        gradient_checkpointing=config.model.enable_gradient_checkpointing,
        **_computing(config, device, micro_batch_size=config.actor.ppo_micro_batch_size_per_gpu),
    )
    rollout = _rollout(prepared)
    reference = None
    if config.actor.use_kl_loss or config.algorithm.use_kl_in_reward or config.ref.kl_metric_samples:
        micro = config.ref.log_prob_micro_batch_size_per_gpu or config.actor.ppo_micro_batch_size_per_gpu
        computing = _computing(config, device, micro_batch_size=micro)
        reference = TorchTrainEngine(folder, optim=None, device=device, **computing)
    weights: Publisher
    if isinstance(rollout, TorchRolloutEngine):
        weights = WeightPublisher(train.tensors(), rollout.tensors())
    else:
        weights = SyncPublisher(rollout.connect(train.tensors()))
    return Engines(train=train, rollout=rollout, reference=reference, weights=weights)


def _rollout(prepared: Prepared) -> TorchRolloutEngine | VllmRolloutEngine:
    config, data = prepared.config.rollout, prepared.config.data
    common: dict[str, Any] = {
        "dtype": DTYPES[config.dtype],
        "device": prepared.device,
        "pad_token_id": prepared.pad_token_id,
    }
    if not uses_vllm(prepared.config):
        return TorchRolloutEngine(prepared.model_folder, **common)
    parallel = config.tensor_model_parallel_size
    options = VllmOptions(
        placement="separate" if config.placement == "colocated" and parallel > 1 else cast(Placement, config.placement),
        tensor_parallel_size=parallel,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_model_len=config.max_model_len or data.max_prompt_length + data.max_response_length,
        enforce_eager=config.enforce_eager,
    )
    return VllmRolloutEngine(prepared.model_folder, **common, options=options)


def updates_per_step(config: Config) -> int:
    """Optimizer steps that one step of the loop takes."""
    prompts = config.data.train_batch_size
    return config.actor.ppo_epochs * (prompts // (config.actor.ppo_mini_batch_size or prompts))


def _optim(config: Config, num_steps: int) -> OptimConfig:
    optim = config.actor.optim
    return OptimConfig(
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        betas=(optim.betas[0], optim.betas[1]),
        clip_grad=config.actor.grad_clip,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_warmup_steps_ratio=optim.lr_warmup_steps_ratio,
        lr_scheduler_type=cast(Schedule, optim.lr_scheduler_type),
        min_lr_ratio=optim.min_lr_ratio,
        total_training_steps=num_steps * updates_per_step(config),
    )


def _computing(config: Config, device: torch.device, *, micro_batch_size: int | None) -> dict[str, Any]:
    """Precision, packing and micro-batches of a train engine."""
    actor = config.actor
    compute = actor.compute_dtype
    if compute == "auto":
        compute = "bfloat16" if device.type == "cuda" else "float32"
    by_tokens = actor.use_dynamic_bsz or micro_batch_size is None
    return {
        "compute_dtype": DTYPES[compute],
        "packing": "shared_prefix" if config.model.use_remove_padding else "padded",
        "max_tokens_per_micro_batch": actor.ppo_max_token_len_per_gpu if by_tokens else None,
        "micro_batch_size": None if by_tokens else micro_batch_size,
    }
