"""Engines that sleep by handing memory over; the scenarios run in processes of their own."""

import importlib.metadata
import logging
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_memory_scenarios import SCENARIOS, make_large_model

from reshard.vllm import plugin

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parents[1] / "vllm_memory_scenarios.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_large_model(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, folder, scenarios):
    done = scenarios.run(SCRIPT, name, str(folder), timeout=280)
    assert done.returncode == 0 and (folder / f"{name}.done").exists(), done.stderr[-6000:]


def test_registering_twice_is_once_and_names_resolve():
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    plugin.register()
    plugin.register()
    assert SleepModeBackendFactory.get_backend_class("reshard").__name__ == "ReshardSleepBackend"
    assert WeightTransferEngineFactory._registry["reshard"]().__name__ == "ReshardWeightTransferEngine"
    assert WeightTransferTrainerFactory._registry["reshard"]().__name__ == "ReshardTrainerEngine"
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    point = importlib.metadata.EntryPoint("reshard", entries["reshard"], "vllm.general_plugins")
    assert point.load() is plugin.register


def test_registering_brings_no_device_and_no_worker_up():
    code = (
        "import sys, torch\nfrom vllm.engine import arg_utils\nfrom reshard.vllm.plugin import register\n"
        "before = set(sys.modules)\nregister()\nassert not torch.cuda.is_initialized()\n"
        "new = {m for m in set(sys.modules) - before if m.startswith(('vllm.v1', 'vllm.model_executor.models'))}\n"
        "assert not {m for m in new if 'worker' in m or 'models' in m}, new\n"
        "assert not {m for m in sys.modules if m.startswith('reshard.arena')}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def config(worker: str, *, backend: str = "cumem", extra: object = None, enabled: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(sleep_mode_backend=backend, enable_sleep_mode=enabled),
        parallel_config=SimpleNamespace(worker_cls=worker),
        additional_config={} if extra is None else extra,
    )


GPU, CPU = "vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker"


@pytest.mark.parametrize(
    ("given", "worker"),
    [
        (config(GPU), GPU),
        (config(GPU, backend="reshard"), "reshard.vllm.worker.ArenaWorker"),
        (config(GPU, extra={"sleep_mode_backend": "reshard"}), "reshard.vllm.worker.ArenaWorker"),
        (config(GPU, backend="reshard", enabled=False), GPU),
        (config(CPU, extra={"sleep_mode_backend": "reshard"}, enabled=False), "reshard.vllm.worker_cpu.ArenaCPUWorker"),
        (config(CPU, extra={"sleep_mode_backend": "other"}), CPU),
        (config("my.Worker", backend="reshard"), "my.Worker"),
        (config("reshard.vllm.worker.ArenaWorker", backend="reshard"), "reshard.vllm.worker.ArenaWorker"),
    ],
)
def test_only_an_engine_that_asks_for_it_gets_our_worker(given, worker):
    for _ in range(2):
        plugin.choose_worker(given)
        assert given.parallel_config.worker_cls == worker
    assert (given.model_config.sleep_mode_backend == "reshard") == plugin._sleeps_by_reshard(given)


@pytest.mark.parametrize(
    ("version", "warns"), [("0.26.0", False), ("0.32.1+cpu", False), ("0.25.3", True), ("0.40.0", True), ("dev", True)]
)
def test_a_version_that_was_not_tested_is_named(version, warns, caplog):
    with caplog.at_level(logging.WARNING, logger="reshard.vllm.plugin"):
        plugin._warn_if_untested(version)
    assert [f"this is {version}" in record.getMessage() for record in caplog.records] == [True] * warns
