"""Live updates of real vLLM engines; the scenarios run in processes of their own (see ``vllm_scenarios``)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_scenarios import make_model

SCENARIOS = Path(__file__).parents[1] / "vllm_scenarios.py"


def run(name: str, folder: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCENARIOS), name, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and (folder / f"{name}.done").exists(), done.stdout[-3000:] + done.stderr[-6000:]


@pytest.mark.parametrize(
    ("name", "tied", "environment"),
    [
        ("colocated_in_place", False, {}),
        ("colocated_in_place", True, {}),
        ("colocated_repacked", True, {}),
        ("separate_one", False, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
        ("separate_two", False, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
    ],
)
def test_an_engine_follows_its_trainer_and_equals_a_fresh_one(tmp_path, name, tied, environment):
    make_model(tmp_path, tied=tied)
    run(name, tmp_path, **environment)
    run("fresh", tmp_path)
    assert json.loads((tmp_path / "tokens.json").read_text()) == json.loads((tmp_path / "fresh.json").read_text())


def test_wrong_trainers_and_wrong_moments_are_refused(tmp_path):
    make_model(tmp_path)
    run("refusals", tmp_path)
