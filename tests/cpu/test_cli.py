import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import algos.grpo
from algos import demo
from algos.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"What is {idx} + 1?", "reward_model": {"ground_truth": str(idx + 1)}} for idx in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def args(tiny_model: Path, prompts: Path, tmp_path: Path) -> list[str]:
    return [
        f"model.path={tiny_model}",
        f"data.train_files={prompts}",
        "data.train_batch_size=2",
        "data.max_prompt_length=64",
        "data.max_response_length=4",
        "reward.function=gsm8k",
        "rollout.n=2",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
        f"trainer.output_dir={tmp_path / 'run'}",
    ]


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Exit code 2 with one line on standard error and no model loaded; returns the line."""

    def load_model(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was about to be loaded")

    monkeypatch.setattr(algos.grpo, "make_engines", load_model)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("bad", "wording"),
    [
        (["rolout.n=2"], r"unknown key 'rolout\.n'; the nearest is 'rollout\.n'"),
        (["rollout.n=two"], r"rollout\.n: expected a whole number, got 'two'"),
        (["model.path=/nowhere/model"], r"model\.path=/nowhere/model: no such folder, and no such model in the local"),
        (["data.train_files=/nowhere.parquet"], r"/nowhere\.parquet"),
        (["data.prompt_key=question"], r"missing column 'question'; needed are 'question' and"),
        (["data.answer_key=answer"], r"missing column 'answer'"),
        (["data.max_prompt_length=5"], r"more than data\.max_prompt_length=5; raise the limit"),
        (
            ["data.max_prompt_length=5", "data.filter_overlong_prompts=true"],
            r"all 8 prompts are longer than data\.max_prompt_length=5 tokens",
        ),
        (["rollout.n=1"], r"rollout\.n=1: grpo compares the samples of one prompt"),
        (["data.train_batch_size=9"], r"data\.train_batch_size=9 prompts, but the data has only 8"),
        (
            ["data.train_batch_size=4", "actor.ppo_mini_batch_size=3"],
            r"data\.train_batch_size=4 prompts must be a multiple of actor\.ppo_mini_batch_size=3 prompts",
        ),
        (["actor.ppo_micro_batch_size_per_gpu=3"], r"2 prompts x rollout\.n=2 = 4 samples must be a multiple of .*=3"),
        (["trainer.output_dir=/proc/run"], r"trainer\.output_dir=/proc/run: can't write there \(.+\); choose another"),
        (["reward.function=no_such_package:score"], r"reward 'no_such_package:score': can't import no_such_package"),
        (["reward.function=json:score"], r"json has no function 'score'"),
        (["reward.function=/nowhere.py:score"], r"no file '/nowhere\.py'"),
        (["reward.function=gsm9k"], r"reward 'gsm9k': expected gsm8k, math"),
        (["config=/nowhere.yaml"], r"config=/nowhere\.yaml: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_before_a_model_is_loaded(
    args: list[str],
    bad: list[str],
    wording: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert re.search(wording, refusal([*args, *bad], capsys, monkeypatch))


def test_a_model_folder_without_weights_or_tokenizer_is_refused(
    args: list[str],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    half = [*args, f"model.path={folder}"]
    assert "no config.json in this folder" in refusal(half, capsys, monkeypatch)
    (folder / "config.json").write_text((tiny_model / "config.json").read_text())
    assert "no *.safetensors in this folder" in refusal(half, capsys, monkeypatch)
    (folder / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    assert "its tokenizer can't be loaded" in refusal(half, capsys, monkeypatch)


def test_prompts_that_the_model_has_no_positions_for_are_refused(
    args: list[str],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "short"
    shutil.copytree(tiny_model, folder)
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "max_position_embeddings": 16}))
    line = refusal([*args, f"model.path={folder}"], capsys, monkeypatch)
    assert re.search(r"the longest prompt has \d+ tokens, which leaves no room .* model's 16 positions", line)


def test_a_folder_that_may_not_be_written_is_refused(
    args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    line = refusal([*args, f"trainer.output_dir={tmp_path / 'file' / 'run'}"], capsys, monkeypatch)
    assert "can't write there (Not a directory)" in line


def test_a_damaged_checkpoint_is_refused_with_its_missing_part(
    args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step_000001"
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    line = refusal([*args, f"trainer.resume={folder}"], capsys, monkeypatch)
    assert "not a whole checkpoint, trainer.pt is missing" in line


def test_help_prints_every_key_and_returns_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "python -m algos.grpo model.path=FOLDER" in out
    assert "rollout.n=8" in out


def test_a_run_prints_a_line_a_step_and_ends_with_rewards_and_places(
    args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == ["step 1/2", "step 2/2"]
    assert re.fullmatch(r"Mean reward: \d\.\d{3} over the first five steps, \d\.\d{3} over the last five\.", lines[-5])
    assert lines[-4].startswith(f"Run folder:  {tmp_path / 'run'} (metrics.jsonl")
    assert lines[-1] == f"Model:       {tmp_path / 'run' / 'checkpoints' / 'step_000002' / 'model'}"
    assert main(args) == 0
    assert "step 3" not in capsys.readouterr().out


def test_sigterm_ends_the_run_after_its_step_with_a_checkpoint_that_resumes(args: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "algos.grpo", *args, "trainer.total_training_steps=100000"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        for line in process.stdout:
            if line.startswith("step 1/"):
                process.send_signal(signal.SIGTERM)
                break
        out, err = process.communicate(timeout=240)
    assert process.returncode == 143
    assert "SIGTERM: this step will be finished and a checkpoint written" in err
    assert "Traceback" not in err
    step = int(re.search(r"Ended by SIGTERM after step (\d+)", out)[1])
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == step
    assert (tmp_path / "run" / "checkpoints" / f"step_{step:06d}" / "state.json").is_file()
    assert main([*args, f"trainer.total_training_steps={step + 1}"]) == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == step + 1


def test_a_second_signal_aborts_at_once_and_the_last_checkpoint_stays(args: list[str], tmp_path: Path) -> None:
    reward = tmp_path / "waits.py"
    reward.write_text(
        "import os, signal\n"
        "calls = []\n"
        "reading, writing = os.pipe()\n"
        "os.set_blocking(writing, False)\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 5:\n"
        "        signal.set_wakeup_fd(writing)\n"
        "        for text in ('in step 2', 'after the first signal'):\n"
        "            print(text, flush=True)\n"
        "            os.read(reading, 1)\n"
        "    return 0.0\n"
    )
    command = [sys.executable, "-m", "algos.grpo", *args, f"reward.function={reward}:score", "trainer.save_freq=1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True) as process:
        for line in process.stdout:
            if line.startswith(("in step 2", "after the first")):
                process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "aborted by a second SIGINT; what was saved before is whole" in err
    assert "Traceback" not in err
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "state.json").is_file()


def test_the_demo_takes_a_seed_and_keys_and_a_folder_of_its_own(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = [f"model.path={tiny_model}", "trainer.total_training_steps=1", "rollout.n=2", "data.max_prompt_length=128"]
    assert demo.main(["seed=5", *keys, "trainer.device=cpu"]) == 0
    assert demo.main(["seed=5", *keys, "trainer.device=cpu"]) == 0
    assert sorted(path.name for path in (tmp_path / "runs" / "demo").iterdir()) == ["seed5-1", "seed5-2"]
    rows = [path.read_text() for path in sorted((tmp_path / "runs" / "demo").glob("*/completions.jsonl"))]
    assert rows[0] == rows[1]
    assert re.fullmatch(
        r"What is \d+ \+ \d+\? Answer with the number only\.", json.loads(rows[0].splitlines()[0])["prompt"]
    )
    capsys.readouterr()
    assert demo.main(["seed=x"]) == 2
    assert capsys.readouterr().err == "error: trainer.seed: expected a whole number, got 'x'\n"
