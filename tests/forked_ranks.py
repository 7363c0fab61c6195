"""Scenarios on several forked ranks of this host: one fork for many scenarios, an outcome for each."""

import datetime
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.multiprocessing as mp
from transport_suite import WORLD

from reshard.arena import Arena

Scenario = Callable[[int, str], None]


class ArenaMemory:
    """Destination storages, each in a region of its own."""

    def __init__(self) -> None:
        self.arena, self.count = Arena.host(), 0

    def __call__(self, name: str, num_bytes: int) -> torch.Tensor:
        self.count += 1
        return self.arena.allocate(f"{self.count}.{name}", num_bytes).tensor(shape=(num_bytes,))


def outcomes_of(scenarios: Mapping[str, Scenario], *, world: int = WORLD) -> dict[str, str]:
    """Run the scenarios in turn, ``scenario(rank, folder)`` on each rank: what went wrong in each, or an empty text.

    The first error ends its rank, so the scenarios after it are not run to their end.
    """
    error = "not reached"
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        for name in scenarios:
            Path(folder, name).mkdir()
        try:
            mp.start_processes(_run_all, args=(scenarios, folder), nprocs=world, start_method="fork")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as failure:
            error = str(failure)
        found = {
            name: all(Path(folder, name, f"finished-{rank}").exists() for rank in range(world)) for name in scenarios
        }
    return {name: "" if finished else error for name, finished in found.items()}


def _run_all(rank: int, scenarios: Mapping[str, Scenario], folder: str) -> None:
    torch.set_num_threads(1)
    for name, scenario in scenarios.items():
        scenario(rank, f"{folder}/{name}")
        Path(folder, name, f"finished-{rank}").touch()


def together(rank: int, folder: str, what: str, *, world: int = WORLD) -> None:
    """Return when all ranks are here: processes come up seconds apart on a busy machine."""
    store = torch.distributed.FileStore(f"{folder}/together", world)
    store.set(f"{what} {rank}", "")
    store.wait([f"{what} {other}" for other in range(world)], datetime.timedelta(seconds=60))


def launch(scenario: Scenario, folder: str, *, world: int = WORLD) -> list[int | None]:
    """Run one scenario whose ranks may be killed; returns their exit codes."""
    context = mp.start_processes(_run_one, args=(scenario, folder), nprocs=world, join=False, start_method="fork")
    for process in context.processes:
        process.join(100)
        if process.exitcode is None:
            process.kill()
            process.join()
    return [process.exitcode for process in context.processes]


def _run_one(rank: int, scenario: Scenario, folder: str) -> None:
    torch.set_num_threads(1)
    scenario(rank, folder)
    os._exit(0)
