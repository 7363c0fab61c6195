"""Where vLLM runs: choices that don't fit are refused before anything is started."""

import importlib.util

import pytest

import algos.config_check
from algos.config_check import resolve
from algos.config_load import load_config
from algos.errors import InputError
from hybrid.engines.rollout_vllm import VllmOptions, VllmRolloutEngine
from hybrid.errors import BackendUnavailable

NEEDED = ["model.path=m", "data.train_files=f", "reward.function=gsm8k", "rollout.name=vllm", "rollout.placement=ray"]


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name))


def test_an_engine_in_ray_needs_ray(without_ray: None) -> None:
    with pytest.raises(BackendUnavailable, match=r"'ray' is not usable: package ray is not installed; install resh"):
        VllmRolloutEngine("folder", device="cpu", options=VllmOptions(placement="ray"))


def test_the_key_of_it_is_refused_with_a_way_out(without_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algos.config_check, "uses_vllm", lambda config: True)
    with pytest.raises(InputError, match=r"placement=ray: Ray is not installed; install reshard\[ray\], or set"):
        resolve(load_config(None, NEEDED).config)
    with pytest.raises(InputError, match=r"rollout.placement.*colocated, separate, ray"):
        load_config(None, [*NEEDED, "rollout.placement=elsewhere"])


def test_options_that_say_two_things_are_refused() -> None:
    with pytest.raises(ValueError, match=r"actor options need placement 'ray', got 'separate'"):
        VllmOptions(placement="separate", actor={"num_gpus": 1})
    with pytest.raises(ValueError, match=r"expected one of \['colocated', 'separate', 'ray'\], got 'elsewhere'"):
        VllmOptions(placement="elsewhere")  # type: ignore[arg-type]
