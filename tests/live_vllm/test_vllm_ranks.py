"""Trainers of several ranks, engines that sleep over several ranks, engines in Ray actors, by scenarios."""

import json
from pathlib import Path

import pytest
from fork_server import ForkServer
from vllm_memory_scenarios import make_large_model
from vllm_scenarios import make_model

TESTS = Path(__file__).parents[1]
RANKS, RAY = TESTS / "vllm_ranks_scenarios.py", TESTS / "vllm_ray_scenarios.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def check_scenario(scenarios: ForkServer, script: Path, name: str, folder: Path, **environment: str) -> None:
    done = scenarios.run(script, name, str(folder), timeout=280, **environment)
    assert done.returncode == 0 and (folder / f"{name}.done").exists(), done.stdout[-3000:] + done.stderr[-6000:]


@pytest.mark.slow
def test_trainer_ranks_push_together_and_an_absent_one_is_named(folder, scenarios):
    make_model(folder / "trainer_ranks")
    check_scenario(scenarios, RANKS, "trainer_ranks", folder / "trainer_ranks", VLLM_ENABLE_V1_MULTIPROCESSING="1")


@pytest.mark.slow
def test_tensor_parallel_ranks_sleep_and_get_new_weights_by_tag(folder, scenarios):
    make_large_model(folder / "sleeping_ranks")
    check_scenario(scenarios, RANKS, "sleeping_ranks", folder / "sleeping_ranks")


@pytest.mark.slow
def test_an_engine_in_a_ray_actor_follows_its_trainer(folder, scenarios):
    pytest.importorskip("ray", reason="ray is not installed; install reshard[ray]")
    make_model(folder / "ray_actor", "llama_tied")
    check_scenario(scenarios, RAY, "ray_actor", folder / "ray_actor")


@pytest.mark.slow
def test_all_of_them_equal_fresh_engines_that_load_the_saved_weights(folder, scenarios):
    check_scenario(scenarios, TESTS / "vllm_scenarios.py", "fresh", folder)
    fresh = json.loads((folder / "fresh.json").read_text())
    assert {"trainer_ranks", "sleeping_ranks"} <= set(fresh)
    for own, tokens in fresh.items():
        assert json.loads((folder / own / "tokens.json").read_text()) == tokens, own
