"""Live updates of real vLLM engines; the scenarios run in processes of their own (see ``vllm_scenarios``)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_runs import SCENARIOS, check, run
from vllm_scenarios import make_model

OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def run_ranks(name: str, folder: Path, num_processes: int) -> None:
    """Under torchrun, which starts interpreters of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    command = [sys.executable, *launcher, str(SCENARIOS), name, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    check(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280))


CASES = [
    ("colocated_in_place", "llama", 1, {}),
    ("colocated_in_place", "qwen3_moe", 1, {}),
    ("colocated_repacked", "llama_tied", 1, {}),
    ("separate_one", "llama_tied", 1, OWN_PROCESS),
    ("separate_two", "llama", 1, OWN_PROCESS),
    ("separate_replicas", "llama", 1, OWN_PROCESS),
    ("spread_in_small_rounds", "llama", 2, {}),
    ("spread_at_once", "llama", 2, {}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("updates")


@pytest.mark.parametrize(("name", "kind", "num_processes", "environment"), CASES)
def test_an_engine_follows_its_trainer(folder, scenarios, name, kind, num_processes, environment):
    """The scenario compares the engine's tokens and log-probs with the trainer's after each of two updates."""
    own = folder / f"{name}-{kind}"
    make_model(own, kind)
    if num_processes > 1:
        run_ranks(name, own, num_processes)
    else:
        run(scenarios, name, own, **environment)
    assert len(json.loads((own / "tokens.json").read_text())) == 2


def test_updated_engines_equal_fresh_ones_that_load_the_saved_weights(folder, scenarios):
    run(scenarios, "fresh", folder)
    fresh = json.loads((folder / "fresh.json").read_text())
    assert fresh and fresh.keys() == {path.parent.name for path in folder.glob("*/tokens.json")}
    for own, tokens in fresh.items():
        assert json.loads((folder / own / "tokens.json").read_text()) == tokens, own
