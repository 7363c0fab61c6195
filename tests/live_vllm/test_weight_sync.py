"""Live updates of real vLLM engines; the scenarios run in processes of their own (see ``vllm_scenarios``)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer
from vllm_scenarios import make_model

SCENARIOS = Path(__file__).parents[1] / "vllm_scenarios.py"


OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def run(name: str, folder: Path, *, num_processes: int = 1, **environment: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    done = subprocess.run(
        [sys.executable, *(launcher if num_processes > 1 else []), str(SCENARIOS), name, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.mark.parametrize(
    ("name", "kind", "num_processes", "environment"),
    [
        ("colocated_in_place", "llama", 1, {}),
        ("colocated_in_place", "qwen3_moe", 1, {}),
        ("colocated_repacked", "llama_tied", 1, {}),
        ("separate_one", "llama_tied", 1, OWN_PROCESS),
        ("separate_two", "llama", 1, OWN_PROCESS),
        ("spread_in_small_rounds", "llama", 2, {}),
        ("spread_at_once", "llama", 2, {}),
    ],
)
def test_an_engine_follows_its_trainer_and_equals_a_fresh_one(tmp_path, name, kind, num_processes, environment):
    make_model(tmp_path, kind)
    run(name, tmp_path, num_processes=num_processes, **environment)
    run("fresh", tmp_path)
    assert json.loads((tmp_path / "tokens.json").read_text()) == json.loads((tmp_path / "fresh.json").read_text())


@pytest.mark.parametrize("name", ["refusals", "rollout_engine"])
def test_wrong_input_is_refused_and_what_is_asked_for_comes(tmp_path, name):
    make_model(tmp_path)
    run(name, tmp_path)
    assert (tmp_path / f"{name}.done").exists()


def test_grpo_runs_on_vllm(tmp_path):
    tokenizer = byte_tokenizer()
    make_model(tmp_path / "model", "llama_tied", vocabulary=len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "model")
    run("grpo", tmp_path)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 4
