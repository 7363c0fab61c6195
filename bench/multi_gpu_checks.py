"""The transports' conformance suite on as many processes as there are, with memory of their own device each."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from reshard import CollectiveTransport, PeerTransport, make_plan
from reshard.arena import Arena
from reshard.plan_gather import gather_communicators
from reshard.process_groups import ProcessGroups
from reshard.transports.base import Transport

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import transport_suite

Memory = transport_suite.Allocate


def conformance(name: str, rank: int, size: int, device: torch.device, folder: Path, *, num_cases: int) -> int:
    """Check `num_cases` random pairs of layouts, and transitions that are gathers; returns how many there were."""
    cases = [*transport_suite.sample_cases(num_cases, num_ranks=size)]
    if size == transport_suite.WORLD:
        cases += [pair for _, pair, _ in transport_suite.gather_pairs()]
    memory = DeviceMemory(device)
    with Ways(name, device, folder, memory) as ways:
        for index, case in enumerate(cases):
            try:
                plan = make_plan(case.source, case.destination, topology=case.topology)
                transport_suite.check_case(case, rank, ways.transport(plan), memory, str(device))
            except Exception as error:
                raise AssertionError(f"{name}, case {index}: {case}") from error
    return len(cases)


def many_transitions(name: str, rank: int, size: int, device: torch.device, folder: Path, *, num: int) -> int:
    """`num` transitions with other values each time; returns by how many bytes this process's memory has grown."""
    rows = transport_suite.row_layout
    case = transport_suite.Pair(rows(64 * size, 50, size), rows(64 * size, 50, size, first_row=8))
    memory = DeviceMemory(device)
    plan = make_plan(case.source, case.destination)
    with (
        Ways(name, device, folder, memory) as ways,
        transport_suite.bound(case, rank, ways.transport(plan), memory, str(device)) as (
            resharder,
            source,
            destination,
        ),
    ):
        used = []
        for update in range(num):
            values = transport_suite.full_tensors(case.source, update)
            transport_suite.fill(source, case.source, rank, values)
            resharder.run(deadline_s=60)
            if update % max(num // 10, 1) == 0:
                transport_suite.check_destination(resharder.plan, rank, destination, values)
                used.append(_used_bytes(device))
    return used[-1] - used[min(2, len(used) - 1)]


class DeviceMemory:
    """Destination storages in one arena of this rank's device."""

    def __init__(self, device: torch.device) -> None:
        self.arena = Arena.cuda(device.index) if device.type == "cuda" else Arena.host()
        self._count = 0

    def __call__(self, name: str, num_bytes: int) -> torch.Tensor:
        """Allocate one storage."""
        self._count += 1
        return self.arena.allocate(f"{self._count}.{name}", num_bytes).tensor(shape=(num_bytes,))


class Ways:
    """Makes transports of one name; process groups are made once and grow with what Plans need."""

    def __init__(self, name: str, device: torch.device, folder: Path, memory: DeviceMemory) -> None:
        self._peer = PeerTransport(memory.arena, folder) if name == "peer" else None
        backend: Any = "nccl" if device.type == "cuda" else "gloo"
        self._groups = ProcessGroups(backend=backend, device=device) if name == "collective" else None

    def transport(self, plan: Any) -> Transport:
        """For one Plan; every rank calls it."""
        if self._peer is not None:
            return self._peer
        assert self._groups is not None
        self._groups.create(gather_communicators(plan))
        return CollectiveTransport(self._groups, staging_bytes=1 << 20)

    def __enter__(self) -> Ways:
        return self

    def __exit__(self, *error: object) -> None:
        if self._groups is not None and error[0] is None:
            self._groups.close()


def _used_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
