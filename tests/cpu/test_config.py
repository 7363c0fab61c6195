from pathlib import Path

import pytest
from omegaconf import OmegaConf

import algos.config_check
from algos.config import Config
from algos.config_check import notices, resolve
from algos.config_load import help_text, known_keys, load_config, to_flat, to_yaml
from algos.errors import InputError

NEEDED = ["model.path=m", "data.train_files=d.parquet", "reward.function=gsm8k", "data.train_batch_size=4"]
VERL_TEXT = """
algorithm.adv_estimator=grpo
data.train_files=/data/gsm8k/train.parquet
data.val_files=/data/gsm8k/test.parquet
data.train_batch_size=1024
data.max_prompt_length=512
data.max_response_length=1024
data.filter_overlong_prompts=True
data.truncation=error
actor_rollout_ref.model.path=Qwen/Qwen3-8B
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False
trainer.critic_warmup=0
trainer.logger=["console","wandb"]
trainer.project_name=verl_grpo_example_gsm8k
trainer.experiment_name=qwen3_8b_function_rm
trainer.n_gpus_per_node=8
trainer.nnodes=1
trainer.save_freq=20
trainer.test_freq=5
trainer.total_epochs=15
"""
VERL_SCRIPT = VERL_TEXT.split()


def error_of(*args: str) -> str:
    with pytest.raises(InputError) as caught:
        resolve(load_config(None, [*NEEDED, *args]).config)
    return str(caught.value)


def test_the_37_options_of_a_verl_script_are_accepted_and_mean_the_same() -> None:
    assert len(VERL_SCRIPT) == 37
    loaded = load_config(None, [*VERL_SCRIPT, "custom_reward_function.path=score.py"])
    config = resolve(loaded.config)
    assert config.model.path == "Qwen/Qwen3-8B"
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n) == (1024, 256, 5)
    assert config.actor.ppo_micro_batch_size_per_gpu == 32
    assert (config.actor.use_kl_loss, config.actor.kl_loss_coef, config.actor.kl_loss_type) == (
        True,
        1e-3,
        "low_var_kl",
    )
    assert config.actor.optim.lr == 1e-6
    assert config.reward.function == "score.py:compute_score"
    assert config.data.val_files == ("/data/gsm8k/test.parquet",)


@pytest.mark.parametrize("installed", [True, False])
def test_options_without_effect_are_said_once_in_one_line(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(algos.config_check, "uses_vllm", lambda config: installed)
    loaded = load_config(None, [*VERL_SCRIPT, "reward.function=gsm8k"])
    idle, logger = notices(loaded)
    assert idle.count("\n") == 0 and "trainer.n_gpus_per_node=8" in idle
    for shown in ("rollout.name=vllm", "rollout.tensor_model_parallel_size=2", "rollout.gpu_memory_utilization=0.6"):
        assert (shown in idle) != installed
    assert ("generation by vLLM" in idle) == installed and ("as vLLM is not installed" in idle) != installed
    assert "ref.fsdp_config.param_offload=True" in idle
    assert "trainer.nnodes" not in idle
    assert "wandb" in logger
    assert notices(load_config(None, NEEDED)) == []


@pytest.mark.parametrize(
    "source",
    [
        {"model": {"path": "m"}, "actor": {"optim": {"lr": 1e-4}}, "data": {"train_files": ["a", "b"]}},
        {"model.path": "m", "actor.optim.lr": "1e-4", "data.train_files": ("a", "b")},
        {"actor_rollout_ref": {"model.path": "m", "actor": {"optim.lr": 1e-4}}, "data": {"train_files": ["a", "b"]}},
        OmegaConf.create(
            {"model": {"path": "m"}, "actor": {"optim": {"lr": 1e-4}}, "data": {"train_files": ["a", "b"]}}
        ),
    ],
)
def test_a_mapping_may_be_nested_dotted_or_prefixed(source: object) -> None:
    config = load_config(source).config
    assert (config.model.path, config.actor.optim.lr, config.data.train_files) == ("m", 1e-4, ("a", "b"))


def test_a_config_object_is_taken_as_it_is_and_its_changed_keys_count_as_given() -> None:
    config = load_config(None, [*NEEDED, "rollout.name=vllm"]).config
    loaded = load_config(config, ["rollout.n=4"])
    assert loaded.config.rollout.n == 4
    assert loaded.config.model.path == "m"
    assert {"rollout.name", "rollout.n", "model.path"} <= loaded.given


def test_later_arguments_win_and_plus_signs_are_ignored() -> None:
    config = load_config(None, ["rollout.n=2", "++rollout.n=3", "actor_rollout_ref.rollout.n=4"]).config
    assert config.rollout.n == 4


def test_yaml_is_read_first_wherever_it_stands_and_written_back_whole(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 3\n")
    with pytest.raises(InputError, match="unknown key 'steps'"):
        load_config(None, [f"config={file}"])
    file.write_text("actor_rollout_ref:\n  model: {path: m}\n  rollout: {n: 3}\nactor: {optim: {lr: 1e-5}}\n")
    config = load_config(None, ["rollout.n=7", f"config={file}", "data.train_files=[x,y]"]).config
    assert (config.model.path, config.rollout.n, config.actor.optim.lr) == ("m", 7, 1e-5)
    file.write_text(to_yaml(config))
    assert load_config(None, [f"config={file}"]).config == config


def test_interpolation_reads_other_keys_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_FOLDER", "/models/tiny")
    assert load_config(None, ["model.path=${oc.env:TINY_FOLDER}"]).config.model.path == "/models/tiny"
    assert "Interpolation key 'nowhere' not found" in error_of("model.path=${nowhere}")


def test_text_keys_take_their_argument_literally() -> None:
    config = load_config(None, ["model.path=~/a b: c", "trainer.experiment_name=7", "reward.function='f.py:g'"]).config
    assert (config.model.path, config.trainer.experiment_name) == ("~/a b: c", "7")
    assert config.reward.function == "f.py:g"


@pytest.mark.parametrize(
    ("arg", "wording"),
    [
        (
            "actor.ppo_mini_batchsize=4",
            "unknown key 'actor.ppo_mini_batchsize'; the nearest is 'actor.ppo_mini_batch_size'",
        ),
        ("actor.lr=1", "unknown key 'actor.lr'; the nearest is 'actor.optim.lr'"),
        ("trainer.epochs=1", "the nearest is 'trainer.total_epochs'"),
        ("actor.optim=1", "actor.optim is a section, not a key; set one of its keys, such as actor.optim.lr"),
        ("rollout", "expected key=value, got 'rollout'"),
        ("rollout.n=two", "rollout.n: expected a whole number, got 'two'"),
        ("rollout.n=2.5", "rollout.n: expected a whole number, got 2.5"),
        ("rollout.n=true", "rollout.n: expected a whole number, got True"),
        ("rollout.n=", "rollout.n: expected a whole number, got nothing"),
        ("rollout.n=0", "rollout.n: expected 1 or more, got 0"),
        ("actor.optim.lr=fast", "actor.optim.lr: expected a number, got 'fast'"),
        ("actor.optim.lr=.inf", "actor.optim.lr: expected a number, got inf"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas: expected two numbers from 0 to below 1, got [0.9]"),
        ("data.shuffle=maybe", "data.shuffle: expected true or false, got 'maybe'"),
        ("data.truncation=top", "data.truncation: expected one of error, left, right, middle, got 'top'"),
        ("data.train_files={a: 1}", "unknown key 'data.train_files.a'"),
        ("data.train_files=[a", "data.train_files: can't read '[a' as a value"),
        ("rollout.top_p=1.5", "rollout.top_p: expected 1 or less, got 1.5"),
        ("rollout.temperature=0", "rollout.temperature: expected more than 0, got 0"),
        ("engine.type=4d", "engine.type: expected one of 3d_hybrid, full_gather, vanilla, got '4d'"),
        ("algorithm.adv_estimator=gae", "algorithm.adv_estimator: expected one of grpo,"),
        ("config=/nowhere.yaml", "config=/nowhere.yaml: no such file"),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what_was_expected(arg: str, wording: str) -> None:
    message = error_of(arg)
    assert wording in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("args", "wording"),
    [
        (
            ["rollout.n=1"],
            "rollout.n=1: grpo compares the samples of one prompt, so rollout.n must be 2 samples or more",
        ),
        (
            ["actor.ppo_mini_batch_size=3"],
            "data.train_batch_size=4 prompts must be a multiple of actor.ppo_mini_batch_size=3 prompts",
        ),
        (
            ["rollout.n=3", "actor.ppo_micro_batch_size_per_gpu=5"],
            "actor.ppo_mini_batch_size=4 prompts x rollout.n=3 = 12 samples must be a multiple of "
            "actor.ppo_micro_batch_size_per_gpu=5 samples per micro-batch",
        ),
        (
            ["actor.ppo_max_token_len_per_gpu=100"],
            "actor.ppo_max_token_len_per_gpu=100 tokens per micro-batch is less than one sample of "
            "data.max_prompt_length + data.max_response_length = 1024 tokens",
        ),
        (["trainer.critic_warmup=2"], "trainer.critic_warmup=2: grpo trains no critic, so it must be 0 steps"),
        (["trainer.test_freq=5"], "trainer.test_freq=5 needs prompts to validate on: set data.val_files"),
        (["trainer.save_freq=0"], "expected a number of steps, or -1 for never; got 0"),
        (["trainer.resume=/nowhere"], "trainer.resume=/nowhere: expected auto, never or the folder of a checkpoint"),
        (["model.trust_remote_code=true"], "model.trust_remote_code=true is refused"),
        (["model.path="], "model.path is missing: set model.path=FOLDER"),
        (["data.train_files="], "data.train_files is missing: set data.train_files=FILE"),
        (["reward.function="], "reward.function is missing: set reward.function to gsm8k"),
        (
            ["engine.micro_dp_size=2", "actor.tensor_model_parallel_size=4"],
            "engine.micro_dp_size=2: expected p*t/(p_g*t_g) = 4/1 from the parallel sizes",
        ),
    ],
)
def test_keys_that_conflict_are_refused_in_prompts_samples_and_micro_batches(args: list[str], wording: str) -> None:
    assert wording in error_of(*args)


def test_micro_dp_size_is_held_against_the_parallel_sizes() -> None:
    sizes = ["actor.tensor_model_parallel_size=4", "actor.pipeline_model_parallel_size=2"]
    sizes += ["rollout.tensor_model_parallel_size=2", "engine.micro_dp_size=4"]
    assert resolve(load_config(None, NEEDED + sizes).config).engine.micro_dp_size == 4


def test_dependent_defaults_are_filled_in_and_resolving_twice_changes_nothing() -> None:
    config = resolve(
        load_config(None, [*NEEDED, "trainer.seed=7", "actor.clip_ratio=0.3", "actor.clip_ratio_high=0.4"]).config
    )
    assert config.actor.ppo_mini_batch_size == 4
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.3, 0.4)
    assert (config.data.seed, config.data.val_batch_size, config.actor.loss_scale_factor) == (7, 4, 512.0)
    assert config.trainer.output_dir == "runs/reshard/grpo"
    assert resolve(config) == config


def test_a_group_of_one_is_allowed_where_no_group_is_compared() -> None:
    args = [*NEEDED, "rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus"]
    assert resolve(load_config(None, args).config).rollout.n == 1


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["trainer.resume_mode=disable"], "never"),
        (["trainer.resume_mode=auto"], "auto"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/c/step_000003"], "/c/step_000003"),
    ],
)
def test_verl_resume_modes(args: list[str], expected: str) -> None:
    assert load_config(None, args).config.trainer.resume == expected


def test_help_lists_every_key_with_its_default_and_meaning() -> None:
    text = help_text()
    assert all(f"  {name}=" in text for name in known_keys())
    assert "  actor.optim.lr=1e-06\n      peak learning rate" in text
    assert set(known_keys()) == set(to_flat(Config()))
