"""Every key of a run, with its type, default and meaning.

The names are verl's with the prefix ``actor_rollout_ref.`` left out. One vocabulary for sizes: a *prompt* is one row of
the data, a *sample* is one response to it (``rollout.n`` samples per prompt), a *micro-batch* is the samples of one
forward and backward pass. ``algos.config_load`` reads a Config, ``algos.config_check`` holds
keys against one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
CRITIC_FREE = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def key(
    default: T,
    meaning: str,
    *,
    choices: Sequence[str] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> T:
    """Declare one key: its default, its meaning for ``--help``, and the values it may take."""
    rules = {"meaning": meaning, "choices": tuple(choices), "at_least": at_least, "above": above, "at_most": at_most}
    return field(default=default, metadata=rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """``data.*``: where prompts come from and how long they and their responses may be (in tokens)."""

    train_files: tuple[str, ...] = key((), "parquet, JSON lines, dataset folder or reasoning_gym spec; one or a list")
    val_files: tuple[str, ...] = key((), "the same for validation")
    train_max_samples: int = key(-1, "first rows of the data that are used; -1 uses all", at_least=-1)
    val_max_samples: int = key(-1, "the same for validation", at_least=-1)
    prompt_key: str = key("prompt", "column of the prompt: text, or a list of chat messages")
    answer_key: str = key("reward_model.ground_truth", "column of the right answer; a dot reaches into a nested one")
    reward_fn_key: str = key("data_source", "column that names a row's source")
    extra_info_key: str = key("extra_info", "column of what else the reward function is told")
    prompt_template: str = key("", "the prompt's text, with columns in braces, instead of data.prompt_key")
    prompt_suffix: str = key("", "text added to the prompt's last message")
    system_prompt: str = key("", "system message put before the prompt")
    train_batch_size: int = key(1024, "prompts per step; each gets rollout.n samples", at_least=1)
    val_batch_size: int | None = key(None, "prompts per validation batch; empty means the training one", at_least=1)
    max_prompt_length: int = key(512, "longest prompt, in tokens of the chat template's output", at_least=1)
    max_response_length: int = key(512, "longest response, in tokens; generation stops there", at_least=1)
    filter_overlong_prompts: bool = key(False, "drop prompts longer than data.max_prompt_length")
    truncation: str = key(
        "error", "what to do with a prompt that is too long", choices=("error", "left", "right", "middle")
    )
    shuffle: bool = key(True, "draw prompts in a new random order each epoch")
    seed: int | None = key(None, "seed of that order; empty means trainer.seed", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """``model.*``: the model that is trained."""

    path: str = key("", "folder of a Hugging Face model, or the id of one that is in the local cache")
    enable_gradient_checkpointing: bool = key(True, "recompute activations in the backward pass to save memory")
    use_remove_padding: bool = key(True, "pack samples without padding; false pads, for attention that can't be packed")
    trust_remote_code: bool = key(False, "refused when true: code from a model folder is never run")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """``actor.optim.*``: AdamW and its schedule."""

    lr: float = key(1e-6, "peak learning rate", at_least=0)
    weight_decay: float = key(0.01, "decoupled weight decay", at_least=0)
    betas: tuple[float, ...] = key((0.9, 0.999), "AdamW's two decay rates")
    lr_warmup_steps: int = key(-1, "optimizer steps of linear warm-up; -1 means lr_warmup_steps_ratio", at_least=-1)
    lr_warmup_steps_ratio: float = key(0.0, "warm-up as a share of all optimizer steps", at_least=0, at_most=1)
    lr_scheduler_type: str = key("constant", "schedule after the warm-up", choices=("constant", "linear", "cosine"))
    min_lr_ratio: float = key(0.0, "where cosine ends, as a share of lr", at_least=0, at_most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorOffloadConfig:
    """``actor.fsdp_config.*``: what leaves the device between phases."""

    param_offload: bool = key(False, "keep the trainer's weights on the host while generating")
    optimizer_offload: bool = key(False, "keep optimizer state on the host while generating")


@dataclass(frozen=True, slots=True, kw_only=True)
class RefOffloadConfig:
    """``ref.fsdp_config.*``: what leaves the device between phases."""

    param_offload: bool = key(False, "keep the reference weights on the host while they are not needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    """``actor.policy_loss.*``: the objective."""

    loss_mode: str = key(
        "vanilla", "vanilla is PPO's clipped objective with dual clip", choices=("vanilla", "gspo", "cispo", "gpg")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """``actor.*``: the policy's update."""

    ppo_mini_batch_size: int | None = key(
        None, "prompts per optimizer step; empty means 256, or data.train_batch_size if that is less", at_least=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "samples per micro-batch; empty means as many as fit actor.ppo_max_token_len_per_gpu", at_least=1
    )
    compute_dtype: str = key(
        "auto",
        "precision of matrix products; weights stay fp32; auto is bfloat16 on a GPU and float32 on a CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    use_dynamic_bsz: bool = key(False, "fill micro-batches by tokens, not by a number of samples")
    ppo_max_token_len_per_gpu: int = key(16384, "most tokens (prompt and response) of a micro-batch", at_least=1)
    ppo_epochs: int = key(1, "passes over the samples of a step", at_least=1)
    shuffle: bool = key(False, "split prompts into mini-batches in random order, new in every pass")
    clip_ratio: float = key(0.2, "PPO clips the probability ratio to 1 ± this", above=0)
    clip_ratio_low: float | None = key(None, "lower clip distance; empty means actor.clip_ratio", above=0, at_most=1)
    clip_ratio_high: float | None = key(None, "upper clip distance; empty means actor.clip_ratio", above=0)
    clip_ratio_c: float = key(3.0, "dual clip: bound on the loss where the advantage is negative", above=1)
    loss_agg_mode: str = key(
        "token-mean",
        "how token losses become one number",
        choices=("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    )
    loss_scale_factor: float | None = key(
        None, "divisor of seq-mean-token-sum-norm; empty means data.max_response_length", above=0
    )
    entropy_coeff: float = key(0.0, "weight of the entropy bonus", at_least=0)
    use_kl_loss: bool = key(False, "add KL(policy, reference) to the loss")
    kl_loss_coef: float = key(0.001, "weight of that KL", at_least=0)
    kl_loss_type: str = key(
        "low_var_kl", "its estimator; + has the gradient of k2", choices=(*KL, *(f"{name}+" for name in KL))
    )
    grad_clip: float = key(1.0, "largest norm of the gradient", above=0)
    tensor_model_parallel_size: int = key(1, "tensor-parallel size t of training", at_least=1)
    pipeline_model_parallel_size: int = key(1, "pipeline-parallel size p of training", at_least=1)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: ActorOffloadConfig = field(default_factory=ActorOffloadConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSamplingConfig:
    """``rollout.val_kwargs.*``: how validation samples."""

    do_sample: bool = key(False, "sample; false means greedy")
    temperature: float = key(1.0, "temperature when sampling", above=0)
    top_p: float = key(1.0, "nucleus mass when sampling", above=0, at_most=1)
    top_k: int = key(-1, "best tokens kept when sampling; -1 or 0 keeps all", at_least=-1)
    n: int = key(1, "samples per validation prompt", at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """``rollout.*``: generation."""

    name: str = key(
        "torch", "generation engine: torch or, where it is installed, vllm", choices=("torch", "hf", "vllm", "sglang")
    )
    n: int = key(8, "samples per prompt, the group of GRPO", at_least=1)
    temperature: float = key(1.0, "sampling temperature, used for log-probs too", above=0)
    top_p: float = key(1.0, "nucleus mass", above=0, at_most=1)
    top_k: int = key(-1, "best tokens kept; -1 or 0 keeps all", at_least=-1)
    dtype: str = key("bfloat16", "type of the generation weights", choices=("bfloat16", "float16", "float32"))
    tensor_model_parallel_size: int = key(1, "tensor-parallel size t_g of generation", at_least=1)
    pipeline_model_parallel_size: int = key(1, "pipeline-parallel size p_g of generation", at_least=1)
    gpu_memory_utilization: float = key(0.5, "share of GPU memory that vllm plans with", above=0, at_most=1)
    placement: str = key(
        "colocated",
        "where vllm runs: in the trainer's process, in its own, or in a Ray actor",
        choices=("colocated", "separate", "ray"),
    )
    enforce_eager: bool = key(False, "vllm without CUDA graphs")
    max_model_len: int | None = key(
        None, "longest prompt and response together that vllm plans for; empty means what data.* allows", at_least=2
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "samples per micro-batch of the old log-probs; empty means the actor's", at_least=1
    )
    val_kwargs: ValidationSamplingConfig = field(default_factory=ValidationSamplingConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefConfig:
    """``ref.*``: the frozen reference policy."""

    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "samples per micro-batch of the reference's log-probs; empty means the actor's", at_least=1
    )
    kl_metric_samples: int = key(
        0,
        "where no KL term needs a reference: samples a step that it scores for kl/mean; 0 loads no reference",
        at_least=0,
    )
    fsdp_config: RefOffloadConfig = field(default_factory=RefOffloadConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """``reward.*``: what a response is worth."""

    function: str = key("", "gsm8k, math, reasoning_gym, package.module:function or path/to/file.py:function")


@dataclass(frozen=True, slots=True, kw_only=True)
class KlControlConfig:
    """``algorithm.kl_ctrl.*``: weight of the KL in the reward."""

    type: str = key("fixed", "fixed, or adaptive towards target_kl", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "weight, or the first weight when adaptive", at_least=0)
    horizon: float = key(10000, "samples over which adaptation acts", above=0)
    target_kl: float = key(0.1, "KL per token that adaptation aims at", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """``algorithm.rollout_correction.*``: generation's probabilities are not quite the trainer's."""

    rollout_is: str = key(
        "none",
        "weigh the loss by trainer's over generation's probability, a token or a whole response at a time",
        choices=("none", "token", "sequence"),
    )
    rollout_is_threshold: float = key(2.0, "largest such weight", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """``algorithm.*``: from scores to advantages."""

    adv_estimator: str = key("grpo", "advantage estimator, one that needs no critic", choices=CRITIC_FREE)
    norm_adv_by_std_in_grpo: bool = key(True, "divide by the group's standard deviation (false is Dr. GRPO)")
    use_kl_in_reward: bool = key(False, "subtract KL(policy, reference) from the reward")
    gamma: float = key(1.0, "discount of later tokens, for reinforce_plus_plus", above=0, at_most=1)
    kl_penalty: str = key("kl", "its estimator", choices=KL)
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """``engine.*``: how weights cross from training to generation."""

    type: str = key(
        "3d_hybrid", "grouping of the ranks in the transition", choices=("3d_hybrid", "full_gather", "vanilla")
    )
    micro_dp_size: int | None = key(None, "expected size of a micro data-parallel group, p·t/(p_g·t_g)", at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """``trainer.*``: the run."""

    project_name: str = key("reshard", "name of the project in logs")
    experiment_name: str = key("grpo", "name of the run in logs and of its folder")
    output_dir: str = key("", "run folder; empty means runs/<project_name>/<experiment_name>")
    total_epochs: int = key(30, "passes over the training prompts", at_least=1)
    total_training_steps: int | None = key(None, "steps, instead of total_epochs", at_least=1)
    save_freq: int = key(-1, "steps between checkpoints; -1 saves at the end only", at_least=-1)
    max_ckpt_to_keep: int | None = key(None, "newest checkpoints kept; empty keeps all", at_least=1)
    resume: str = key("auto", "auto continues the run folder's newest checkpoint; never; or a checkpoint's folder")
    test_freq: int = key(-1, "steps between validations; -1 never validates", at_least=-1)
    val_before_train: bool = key(True, "validate before the first step, where test_freq is set")
    logger: tuple[str, ...] = key(("console", "tensorboard"), "where metrics go besides metrics.jsonl")
    completions_per_step: int = key(4, "samples written to completions.jsonl each step", at_least=0)
    critic_warmup: int = key(0, "steps before the actor learns; GRPO has no critic, so 0", at_least=0)
    n_gpus_per_node: int = key(1, "GPUs per node", at_least=1)
    nnodes: int = key(1, "nodes", at_least=1)
    device: str = key("auto", "auto takes the first GPU, or else the CPU", choices=("auto", "cpu", "cuda"))
    seed: int = key(0, "seed of everything random", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
