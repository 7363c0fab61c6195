import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from algos.config_load import load_config
from algos.errors import InputError
from algos.grpo import Result, train
from algos.metrics import read_rows

calls: list[int] = []
PER_RUN = ("time/", "before/time/", "memory/", "tokens/s")


def ascii_share(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None) -> float:
    """Dense and easy: the share of the response's characters that are ASCII letters.

    The call number STOP_AT_CALL, if that is set, also sends this process a Ctrl-C.
    """
    calls.append(1)
    if len(calls) == int(os.environ.get("STOP_AT_CALL", "0")):
        signal.raise_signal(signal.SIGINT)
    return sum(char.isascii() and char.isalpha() for char in solution_str) / max(len(solution_str), 1)


def unscored_sometimes(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None) -> float | None:
    """No score for odd prompts."""
    return None if int(ground_truth) % 2 else float(len(solution_str))


def never_scored(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None) -> float:
    raise KeyError("no such table")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": f"say {idx}", "reward_model": {"ground_truth": str(idx)}} for idx in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def config(tiny_model: Path, prompts: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model.path": str(tiny_model),
        "model.enable_gradient_checkpointing": False,
        "data.train_files": str(prompts),
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 6,
        "reward.function": f"{__file__}:ascii_share",
        "rollout.n": 4,
        "actor.optim.lr": 1e-2,
        "trainer.total_training_steps": 4,
        "trainer.output_dir": str(tmp_path / "run"),
        "trainer.logger": [],
        "trainer.device": "cpu",
        "trainer.seed": 3,
    }


def same(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Rows without what differs from run to run: times and memory."""
    return [{name: value for name, value in row.items() if not name.startswith(PER_RUN)} for row in rows]


def weights_of(result: Result) -> dict[str, torch.Tensor]:
    assert result.model_folder is not None
    return load_file(result.model_folder / "model.safetensors")


def test_a_run_leaves_metrics_completions_config_and_a_model_that_transformers_loads(config: dict[str, Any]) -> None:
    result = train({**config, "trainer.logger": ["tensorboard"], "ref.kl_metric_samples": 4})
    rows = read_rows(result.paths.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows == result.metrics
    expected = {
        *("reward/mean", "reward/std", "response_length/mean", "kl/mean", "entropy/mean", "actor/loss"),
        *("actor/grad_norm", "actor/lr", "time/rollout", "time/transition", "time/reward", "time/log_probs"),
        *("time/update", "time/step", "tokens/s", "memory/host_peak_bytes", "groups/without_spread"),
    }
    assert expected <= set(rows[0])
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["entropy/mean"] == pytest.approx(math.log(261), rel=0.05)
    assert abs(rows[0]["kl/mean"]) < 1e-6 < rows[-1]["kl/mean"]
    assert rows[0]["kl/old"] < 1e-3
    assert len(read_rows(result.paths.completions)) == 4 * 4
    assert result.paths.plot.is_file()
    assert any(result.paths.events.iterdir())
    tokenizer = AutoTokenizer.from_pretrained(result.model_folder)
    model = AutoModelForCausalLM.from_pretrained(result.model_folder)
    assert model.dtype == torch.float32
    assert tokenizer.chat_template
    again = train(load_config(None, [f"config={result.paths.config}"]).config)
    assert (again.num_steps, again.metrics) == (4, rows)


def test_grpo_raises_the_reward_and_every_rollout_has_the_last_weights(config: dict[str, Any]) -> None:
    options = {"trainer.total_training_steps": 25, "rollout.n": 8, "ref.kl_metric_samples": 8}
    result = train({**config, **options})
    assert result.metrics[-1]["kl/mean"] > 0.5
    assert max(row["kl/old"] for row in result.metrics) < 1e-3
    rewards = [row["reward/mean"] for row in result.metrics]
    assert sum(rewards[:3]) / 3 < 0.35
    assert sum(rewards[-3:]) / 3 > 0.8


def test_the_same_seed_gives_the_same_run_and_another_seed_another(config: dict[str, Any], tmp_path: Path) -> None:
    runs = [train({**config, "trainer.output_dir": str(tmp_path / name)}) for name in ("a", "b")]
    assert same(runs[0].metrics) == same(runs[1].metrics)
    assert all(torch.equal(value, weights_of(runs[1])[name]) for name, value in weights_of(runs[0]).items())
    other = train({**config, "trainer.output_dir": str(tmp_path / "c"), "trainer.seed": 4})
    assert same(other.metrics) != same(runs[0].metrics)


def test_the_samples_of_a_prompt_differ_and_each_step_draws_anew(config: dict[str, Any]) -> None:
    one_prompt = {"data.train_batch_size": 1, "rollout.n": 8, "trainer.completions_per_step": 16}
    result = train({**config, **one_prompt, "actor.optim.lr": 0.0})
    rows = read_rows(result.paths.completions)
    by_step = [[row["response"] for row in rows if row["step"] == step] for step in (1, 2)]
    assert len(by_step[0]) == 8
    assert len(set(by_step[0])) == 8
    assert not set(by_step[0]) & set(by_step[1])


OPTIONS = {
    "mini-batches, epochs, shuffle": {
        "actor.ppo_mini_batch_size": 2,
        "actor.ppo_epochs": 2,
        "actor.shuffle": True,
        "actor.ppo_micro_batch_size_per_gpu": 2,
    },
    "kl in loss, entropy, cosine": {
        "actor.use_kl_loss": True,
        "actor.entropy_coeff": 0.01,
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "actor.optim.lr_scheduler_type": "cosine",
        "actor.optim.lr_warmup_steps": 1,
        "algorithm.rollout_correction.rollout_is": "token",
    },
    "adaptive kl in reward": {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.horizon": 100,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_that_ctrl_c_ended_resumes_bit_for_bit(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    steps = {**config, **options, "trainer.total_training_steps": 6}
    unbroken = train({**steps, "trainer.output_dir": str(tmp_path / "unbroken")})
    parts = {**steps, "trainer.output_dir": str(tmp_path / "parts"), "trainer.save_freq": 1}
    parts["trainer.max_ckpt_to_keep"] = 2
    monkeypatch.setenv("STOP_AT_CALL", str(2 * 16 + 5))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stopped = train(parts)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert (stopped.stopped_by, stopped.num_steps) == (signal.SIGINT, 3)
    assert sorted(path.name for path in stopped.paths.checkpoints.glob("step_*")) == ["step_000002", "step_000003"]
    monkeypatch.delenv("STOP_AT_CALL")
    resumed = train(parts)
    assert resumed.stopped_by is None
    assert same(resumed.metrics) == same(unbroken.metrics)
    assert all(torch.equal(value, weights_of(resumed)[name]) for name, value in weights_of(unbroken).items())
    prompts = [[row["prompt"] for row in read_rows(run.paths.completions)] for run in (resumed, unbroken)]
    assert prompts[0] == prompts[1]


def test_resuming_from_an_older_checkpoint_redoes_the_later_steps(config: dict[str, Any]) -> None:
    first = train({**config, "trainer.save_freq": 2})
    older = first.paths.checkpoint(2)
    second = train({**config, "trainer.resume": str(older)})
    assert same(second.metrics) == same(first.metrics)
    assert second.model_folder == first.paths.checkpoint(4) / "model"


def test_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next(config: dict[str, Any]) -> None:
    two_epochs = {**config, "data.train_batch_size": 5, "trainer.total_training_steps": 2}
    assert train(two_epochs).num_steps == 2
    result = train({**two_epochs, "trainer.total_training_steps": None, "trainer.total_epochs": 2})
    assert [row["step"] for row in result.metrics] == [1, 2, 3, 4]
    prompts = {step: set() for step in range(1, 5)}
    for row in read_rows(result.paths.completions):
        prompts[row["step"]].add(row["prompt"])
    assert prompts[3] != prompts[1]


def test_other_data_than_the_checkpoint_was_made_with_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    train({**config, "trainer.total_training_steps": 1})
    with pytest.raises(InputError, match="belongs to other data or options: batch_size was 4 and is 2"):
        train({**config, "data.train_batch_size": 2})


def test_never_resuming_refuses_a_folder_that_holds_a_run(config: dict[str, Any]) -> None:
    train({**config, "trainer.total_training_steps": 1})
    with pytest.raises(InputError, match=r"holds a run of 1 steps already; continue it with trainer\.resume=auto"):
        train({**config, "trainer.resume": "never"})


def test_unscored_samples_are_counted_and_the_others_still_teach(config: dict[str, Any]) -> None:
    options = {"reward.function": f"{__file__}:unscored_sometimes", "data.shuffle": False}
    first, second = train({**config, **options, "trainer.total_training_steps": 2}).metrics
    assert [row["reward/num_unscored"] for row in (first, second)] == [2 * 4, 2 * 4]
    assert first["actor/grad_norm"] > 0


def test_a_step_in_which_nothing_is_scored_changes_no_weight(config: dict[str, Any], tiny_model: Path) -> None:
    result = train({**config, "reward.function": f"{__file__}:never_scored", "trainer.total_training_steps": 2})
    assert [row["reward/num_unscored"] for row in result.metrics] == [16.0, 16.0]
    assert math.isnan(result.metrics[0]["reward/mean"])
    assert math.isnan(result.metrics[0]["kl/mean"])
    before = load_file(tiny_model / "model.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in weights_of(result).items())


def test_validation_runs_every_so_many_steps_and_changes_nothing(config: dict[str, Any], tmp_path: Path) -> None:
    plain = train(config)
    validated = {
        **config,
        "data.val_files": config["data.train_files"],
        "data.val_batch_size": 4,
        "trainer.test_freq": 2,
        "trainer.output_dir": str(tmp_path / "validated"),
    }
    result = train(validated)
    assert [row["step"] for row in result.metrics if "val/reward/mean" in row] == [2, 4]
    assert "before/val/reward/mean" in result.metrics[0]
    without = [{name: value for name, value in row.items() if "val/" not in name} for row in result.metrics]
    assert same(without) == same(plain.metrics)
