"""What vLLM calls in each of its processes (entry point group ``vllm.general_plugins``): registers what reshard offers.

Note "the worker class". The memory of weights and KV cache is chosen when the worker allocates them, long before a
sleep-mode backend is asked for anything, and the worker's own allocator is fixed to vLLM's. vLLM has no hook by which a
backend could name a worker class, so the platform's ``check_and_update_config``, where vLLM itself picks the worker, is
followed by one more step: an engine that asks for the sleep-mode backend ``reshard`` and got a stock worker gets ours.
An out-of-tree platform would be a public way to the same end, but a process can have only one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from collections.abc import Mapping
from typing import Any, Final

logger = logging.getLogger(__name__)

NAME: Final = "reshard"
TESTED_VLLM: Final = ((0, 26), (0, 32))
"""The oldest and the newest version of vLLM that the tests run on."""
WORKERS: Final = {
    "vllm.v1.worker.gpu_worker.Worker": "reshard.vllm.worker.ArenaWorker",
    "vllm.v1.worker.cpu_worker.CPUWorker": "reshard.vllm.worker_cpu.ArenaCPUWorker",
}


@functools.cache
def register() -> None:
    """Register weight transfer, its trainer side, the sleep-mode backend and the worker class; once a process."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.platforms import current_platform

    _warn_if_untested(_vllm_version())
    WeightTransferEngineFactory.register_engine(NAME, "reshard.vllm.engine", "ReshardWeightTransferEngine")
    WeightTransferTrainerFactory.register_engine(NAME, "reshard.vllm.trainer_engine", "ReshardTrainerEngine")
    SleepModeBackendFactory.register_backend(NAME, "reshard.vllm.sleep", "ReshardSleepBackend")
    _follow_config_check(type(current_platform))


def choose_worker(vllm_config: Any) -> None:
    """Give an engine that sleeps by reshard our worker class, where it would get a stock one; others are left alone.

    Engine arguments of vLLM 0.26 to 0.32 have no ``sleep_mode_backend``, though ``ModelConfig`` does; so the choice may
    also come as ``additional_config={"sleep_mode_backend": "reshard"}``, and is written into ``ModelConfig`` then.
    """
    model_config, parallel_config = vllm_config.model_config, vllm_config.parallel_config
    if model_config is None or not _sleeps_by_reshard(vllm_config):
        return
    model_config.sleep_mode_backend = NAME
    worker = parallel_config.worker_cls
    if not model_config.enable_sleep_mode and not worker.endswith("CPUWorker"):  # vLLM refuses that setting on a CPU
        logger.warning("the sleep-mode backend 'reshard' does nothing without enable_sleep_mode=True")
    elif worker in WORKERS:
        parallel_config.worker_cls = WORKERS[worker]
    elif worker not in WORKERS.values():
        logger.info("worker class %s is kept; it has to derive from reshard.vllm.worker.ArenaSleep to sleep", worker)


def _sleeps_by_reshard(vllm_config: Any) -> bool:
    extra = vllm_config.additional_config
    return NAME in (
        vllm_config.model_config.sleep_mode_backend,
        extra.get("sleep_mode_backend") if isinstance(extra, Mapping) else None,
    )


def _follow_config_check(platform: type[Any]) -> None:
    check = platform.check_and_update_config

    def check_and_update_config(cls: type[Any], vllm_config: Any) -> None:
        check(vllm_config)
        choose_worker(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def _warn_if_untested(version: str) -> None:
    parts = re.match(r"(\d+)\.(\d+)", version)
    found = (int(parts[1]), int(parts[2])) if parts else (0, 0)
    if not TESTED_VLLM[0] <= found <= TESTED_VLLM[1]:
        (first, second), (last, latest) = TESTED_VLLM
        logger.warning(
            "reshard %s is tested with vLLM %d.%d to %d.%d, this is %s: what it registers may not work",
            importlib.metadata.version("reshard"),
            first,
            second,
            last,
            latest,
            version,
        )
