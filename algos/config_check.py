"""Hold the keys of a Config against one another, and fill in those that depend on others.

Sizes are in prompts (rows of the data), samples (``rollout.n`` per prompt) and micro-batches (samples of one forward
pass).
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from algos.config import Config
from algos.config_load import Loaded, to_flat
from algos.errors import InputError

VERL_MINI_BATCH_PROMPTS = 256
UNGROUPED = ("reinforce_plus_plus",)
NO_EFFECT = {
    "actor.tensor_model_parallel_size": 1,
    "actor.pipeline_model_parallel_size": 1,
    "actor.fsdp_config.param_offload": False,
    "actor.fsdp_config.optimizer_offload": False,
    "rollout.pipeline_model_parallel_size": 1,
    "rollout.log_prob_micro_batch_size_per_gpu": None,
    "ref.fsdp_config.param_offload": False,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
}
"""Keys that this backend accepts without effect, with the value that says nothing new."""
NO_EFFECT_WITHOUT_VLLM = {
    "rollout.name": "torch",
    "rollout.tensor_model_parallel_size": 1,
    "rollout.gpu_memory_utilization": None,
    "rollout.placement": None,
    "rollout.enforce_eager": None,
    "rollout.max_model_len": None,
}
"""Keys that only the vllm engine knows."""


def resolve(config: Config) -> Config:
    """Check ``config`` and return it with every dependent default filled in; raise InputError where keys conflict."""
    _check_present(config)
    config = _fill(config)
    _check_batch_sizes(config)
    _check_algorithm(config)
    _check_engine(config)
    _check_trainer(config)
    return config


def notices(loaded: Loaded) -> list[str]:
    """Return what the caller should know about keys that were set: no effect here, or a bias that they bring."""
    values = to_flat(loaded.config)
    neutrals = NO_EFFECT if uses_vllm(loaded.config) else NO_EFFECT | NO_EFFECT_WITHOUT_VLLM
    idle = [name for name, neutral in neutrals.items() if name in loaded.given and values[name] != neutral]
    found = []
    if idle:
        shown = ", ".join(f"{name}={values[name]}" for name in idle)
        backend = f"one process, one device, generation by {_generator(loaded.config)}"
        found.append(f"Without effect in this backend ({backend}): {shown}.")
    unknown = [name for name in loaded.config.trainer.logger if name not in ("console", "tensorboard")]
    if unknown:
        found.append(f"trainer.logger: {', '.join(unknown)} not available; metrics.jsonl is always written.")
    return found


def uses_vllm(config: Config) -> bool:
    """Whether vLLM generates: asked for, and installed."""
    return config.rollout.name == "vllm" and importlib.util.find_spec("vllm") is not None


def _generator(config: Config) -> str:
    if uses_vllm(config):
        return "vLLM"
    return "Transformers, as vLLM is not installed" if config.rollout.name == "vllm" else "Transformers"


def _check_present(config: Config) -> None:
    if not config.model.path:
        raise InputError("model.path is missing: set model.path=FOLDER, the folder of a Hugging Face model")
    if not config.data.train_files:
        raise InputError("data.train_files is missing: set data.train_files=FILE, prompts to train on")
    if not config.reward.function:
        raise InputError(
            "reward.function is missing: set reward.function to gsm8k, math, reasoning_gym, package.module:function "
            "or path/to/file.py:function"
        )
    if config.model.trust_remote_code:
        raise InputError("model.trust_remote_code=true is refused: code from a model folder is never run")
    betas = config.actor.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise InputError(f"actor.optim.betas: expected two numbers from 0 to below 1, got {list(betas)}")


def _fill(config: Config) -> Config:
    data, actor, trainer = config.data, config.actor, config.trainer
    prompts = actor.ppo_mini_batch_size or min(VERL_MINI_BATCH_PROMPTS, data.train_batch_size)
    folder = trainer.output_dir or f"runs/{trainer.project_name}/{trainer.experiment_name}"
    return replace(
        config,
        data=replace(
            data,
            val_batch_size=data.val_batch_size or data.train_batch_size,
            seed=trainer.seed if data.seed is None else data.seed,
        ),
        actor=replace(
            actor,
            ppo_mini_batch_size=prompts,
            clip_ratio_low=actor.clip_ratio_low or min(actor.clip_ratio, 1.0),
            clip_ratio_high=actor.clip_ratio_high or actor.clip_ratio,
            loss_scale_factor=actor.loss_scale_factor or float(data.max_response_length),
        ),
        trainer=replace(trainer, output_dir=str(Path(folder).expanduser())),
    )


def _check_batch_sizes(config: Config) -> None:
    actor, prompts = config.actor, config.data.train_batch_size
    mini = actor.ppo_mini_batch_size or prompts
    if prompts % mini:
        raise InputError(
            f"data.train_batch_size={prompts} prompts must be a multiple of actor.ppo_mini_batch_size={mini} prompts"
        )
    samples, micro = mini * config.rollout.n, actor.ppo_micro_batch_size_per_gpu
    if micro and not actor.use_dynamic_bsz and samples % micro:
        raise InputError(
            f"actor.ppo_mini_batch_size={mini} prompts x rollout.n={config.rollout.n} = {samples} samples must be "
            f"a multiple of actor.ppo_micro_batch_size_per_gpu={micro} samples per micro-batch"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if (micro is None or actor.use_dynamic_bsz) and longest > actor.ppo_max_token_len_per_gpu:
        raise InputError(
            f"actor.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} tokens per micro-batch is less than "
            f"one sample of data.max_prompt_length + data.max_response_length = {longest} tokens"
        )


def _check_algorithm(config: Config) -> None:
    name, num_samples = config.algorithm.adv_estimator, config.rollout.n
    if num_samples == 1 and name not in UNGROUPED:
        raise InputError(
            f"rollout.n=1: {name} compares the samples of one prompt, so rollout.n must be 2 samples or more"
        )
    if config.trainer.critic_warmup:
        raise InputError(
            f"trainer.critic_warmup={config.trainer.critic_warmup}: {name} trains no critic, so it must be 0 steps"
        )


def _check_engine(config: Config) -> None:
    if uses_vllm(config) and config.rollout.placement == "ray" and importlib.util.find_spec("ray") is None:
        raise InputError(
            "rollout.placement=ray: Ray is not installed; install reshard[ray], or set rollout.placement=separate, "
            "which gives vLLM processes of its own without it"
        )
    train = config.actor.pipeline_model_parallel_size * config.actor.tensor_model_parallel_size
    generation = config.rollout.pipeline_model_parallel_size * config.rollout.tensor_model_parallel_size
    expected = config.engine.micro_dp_size
    if expected is not None and expected * generation != train:
        raise InputError(
            f"engine.micro_dp_size={expected}: expected p*t/(p_g*t_g) = {train}/{generation} from the parallel "
            "sizes of actor (p, t) and rollout (p_g, t_g)"
        )


def _check_trainer(config: Config) -> None:
    trainer = config.trainer
    if trainer.test_freq > 0 and not config.data.val_files:
        raise InputError(f"trainer.test_freq={trainer.test_freq} needs prompts to validate on: set data.val_files")
    if trainer.save_freq == 0 or trainer.test_freq == 0:
        raise InputError("trainer.save_freq and trainer.test_freq: expected a number of steps, or -1 for never; got 0")
    if trainer.resume not in ("auto", "never") and not (Path(trainer.resume).expanduser() / "state.json").is_file():
        raise InputError(
            f"trainer.resume={trainer.resume}: expected auto, never or the folder of a checkpoint, with its state.json"
        )
