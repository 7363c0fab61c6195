import io
import json
import math
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from algos.data import Prompt, Row
from algos.metrics import MetricsLog, RunPaths, ends, memory_row, read_rows
from algos.progress import BarReporter, LineReporter, SilentReporter, make_reporter, time_split
from algos.rewards import Scores
from algos.rows import completion_rows, sample_metrics
from hybrid.batch import make_batch

ROW = {
    "step": 1,
    "reward/mean": 0.25,
    "response_length/mean": 5.5,
    "kl/mean": 0.001,
    "time/step": 2.0,
    "time/rollout": 1.25,
}


def numbered(step: int) -> dict[str, float]:
    return {**ROW, "step": step, "reward/mean": step / 10}


def test_a_row_a_step_in_json_lines_completions_and_tensorboard(tmp_path: Path) -> None:
    log = MetricsLog(RunPaths(tmp_path), last_step=0, tensorboard=True)
    log.write(numbered(1), [{"step": 1, "response": "7"}])
    log.write({**numbered(2), "reward/mean": math.nan}, [{"step": 2, "response": "é\n"}])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["reward/mean"] == 0.1
    assert json.loads(lines[1])["reward/mean"] is None
    assert math.isnan(read_rows(tmp_path / "metrics.jsonl")[1]["reward/mean"])
    assert [row["response"] for row in read_rows(tmp_path / "completions.jsonl")] == ["7", "é\n"]
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, round(point.value, 6)) for point in events.Scalars("reward/mean")] == [(1, 0.1)]
    assert len(events.Scalars("time/step")) == 2
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_after_a_resume_later_rows_are_gone_and_the_rest_continues(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    log = MetricsLog(paths, last_step=0, tensorboard=False)
    for step in (1, 2, 3):
        log.write(numbered(step), [{"step": step, "response": str(step)}])
    with paths.metrics.open("a") as file:
        file.write('{"step": 4, "reward/me')
    log = MetricsLog(paths, last_step=2, tensorboard=False)
    log.write(numbered(3), [{"step": 3, "response": "again"}])
    assert [row["step"] for row in read_rows(paths.metrics)] == [1, 2, 3]
    assert [row["response"] for row in read_rows(paths.completions)] == ["1", "2", "again"]
    assert log.rows == read_rows(paths.metrics)
    assert sorted(os.listdir(tmp_path)) == ["completions.jsonl", "metrics.jsonl"]


def test_ends_are_means_of_five_rows_and_skip_what_is_not_finite() -> None:
    rows = [numbered(step) for step in range(1, 12)]
    assert ends(rows) == pytest.approx((0.3, 0.9))
    rows[0]["reward/mean"] = math.nan
    assert ends(rows)[0] == pytest.approx(0.4)
    assert ends(rows[1:3]) == pytest.approx((0.25, 0.25))
    assert math.isnan(ends([])[0])


def test_memory_is_in_bytes() -> None:
    row = memory_row(torch.device("cpu"))
    assert set(row) == {"memory/host_peak_bytes"}
    assert 2**26 < row["memory/host_peak_bytes"] < 2**40


def test_lines_say_step_reward_length_kl_and_where_the_time_went(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = make_reporter(enabled=True)
    assert isinstance(reporter, LineReporter)
    reporter.begin(num_steps=25, step=0)
    reporter.say("hello")
    reporter.show(ROW)
    reporter.end()
    expected = "hello\nstep 1/25  reward 0.250  length 5.5  kl 0.0010  2.0 s: rollout 1.25\n"
    assert capsys.readouterr().out == expected
    assert isinstance(make_reporter(enabled=False), SilentReporter)


def test_time_split_names_the_phases_in_the_order_of_a_step() -> None:
    phases = {f"time/{name}": 1.0 for name in ("update", "log_probs", "reward", "transition", "rollout")}
    split = time_split({"time/step": 5.0, **phases})
    assert split == "5.0 s: rollout 1.00, transition 1.00, reward 1.00, log-probs 1.00, update 1.00"


def test_the_bar_shows_the_last_step_and_leaves_the_cursor_visible() -> None:
    written = io.StringIO()
    reporter = BarReporter(Console(force_terminal=True, width=100, file=written))
    reporter.begin(num_steps=4, step=1)
    reporter.say("a [note]")
    reporter.show({**ROW, "step": 3})
    reporter.end()
    text = written.getvalue()
    assert "a [note]" in text
    assert "reward 0.250" in text
    assert "3/4" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def scored_batch(rewards: list[float | None]):
    batch = make_batch(
        prompts=[[1, 2], [1, 2], [3], [3]],
        responses=[[5], [6, 7], [8, 9, 10], [4, 4]],
        log_probs=[[-1.0], [-1.0] * 2, [-1.0] * 3, [-1.0] * 2],
        group_ids=[0, 0, 1, 1],
        truncated=[False, False, True, False],
        version=1,
    )
    values = torch.tensor([0.0 if reward is None else reward for reward in rewards])
    scored = torch.tensor([reward is not None for reward in rewards])
    return batch, Scores(scores=values, scored=scored, metrics={"right": 0.5}, outcomes=())


def test_sample_metrics_leave_out_what_is_unscored() -> None:
    row = sample_metrics(*scored_batch([1.0, 0.0, None, 0.5]))
    assert row["reward/mean"] == pytest.approx(0.5)
    assert row["reward/std"] == pytest.approx((0.5 / 3) ** 0.5)
    assert row["reward/right"] == 0.5
    assert (row["response_length/mean"], row["response_length/max"]) == (2.0, 3.0)
    assert row["response_length/truncated"] == 0.25
    assert row["prompt_length/mean"] == 1.5
    assert row["groups/without_spread"] == 0.5


def test_sample_metrics_of_a_batch_in_which_nothing_is_scored_are_not_numbers() -> None:
    row = sample_metrics(*scored_batch([None] * 4))
    assert math.isnan(row["reward/mean"])
    assert row["groups/without_spread"] == 1.0


def test_completions_take_one_sample_of_each_prompt_first() -> None:
    row = Row(prompt="p", data_source="s", ground_truth="7", extra_info=None, index=0)
    prompts = [Prompt([1], row), Prompt([2], row)]
    _, scores = scored_batch([1.0, 0.0, None, 0.5])
    shown = completion_rows(3, prompts, ["a", "b", "c", "d"], scores, limit=3)
    assert [entry["response"] for entry in shown] == ["a", "c", "b"]
    assert [entry["reward"] for entry in shown] == [1.0, None, 0.0]
    assert shown[0] == {"step": 3, "prompt": "p", "response": "a", "reward": 1.0, "ground_truth": "7"}
    assert completion_rows(3, prompts, ["a", "b", "c", "d"], scores, limit=0) == []
