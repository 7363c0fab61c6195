"""The peer transport between processes that share one GPU: the conformance suite, many transitions, a killed rank."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
import transport_suite
from transport_suite import WORLD, Pair, bound, check_case, row_layout, sample_cases

from reshard import _C, PeerTransport
from reshard.arena import Arena
from reshard.errors import TransportError
from reshard.resharder import State

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not _C.CUDA_KERNELS, reason="needs a build with CUDA kernels (RESHARD_CUDA=on)"),
]
NUM_CASES = 60
SHIFTED = Pair(row_layout(640, 50, WORLD), row_layout(640, 50, WORLD, first_row=80))


class DeviceMemory:
    """Destination storages in one arena on the GPU."""

    def __init__(self) -> None:
        torch.cuda.init()
        self.arena, self.count = Arena.cuda(0), 0

    def __call__(self, name: str, num_bytes: int) -> torch.Tensor:
        self.count += 1
        return self.arena.allocate(f"{self.count}.{name}", num_bytes).tensor(shape=(num_bytes,))


def worker(rank: int, folder: str, scenario: str) -> None:
    globals()[scenario](rank, folder)
    Path(folder, f"finished-{rank}").touch()


def conformance(rank: int, folder: str) -> None:
    memory = DeviceMemory()
    transport = PeerTransport(memory.arena, folder)
    for index, case in enumerate(sample_cases(NUM_CASES)):
        try:
            check_case(case, rank, transport, memory, "cuda")
        except Exception as error:
            raise AssertionError(f"case {index}: {case}") from error


def many_transitions(rank: int, folder: str) -> None:
    memory = DeviceMemory()
    with bound(SHIFTED, rank, PeerTransport(memory.arena, folder), memory, "cuda") as (resharder, source, destination):
        used = []
        for update in range(1000):
            values = transport_suite.full_tensors(SHIFTED.source, update)
            transport_suite.fill(source, SHIFTED.source, rank, values)
            resharder.run(deadline_s=60)
            if update % 100 == 0:
                transport_suite.check_destination(resharder.plan, rank, destination, values)
                torch.cuda.synchronize()
                used.append((len(os.listdir("/proc/self/fd")), torch.cuda.memory_reserved()))
        assert used[1] == used[-1], f"descriptors or device memory grew: {used}"
        assert resharder.stats.num_launches <= 2


def a_killed_rank(rank: int, folder: str) -> None:
    memory = DeviceMemory()
    with bound(SHIFTED, rank, PeerTransport(memory.arena, folder), memory, "cuda") as (resharder, source, _):
        transport_suite.fill(source, SHIFTED.source, rank, transport_suite.full_tensors(SHIFTED.source, 1))
        resharder.run(deadline_s=30)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        before = source["w"].clone()
        if rank in (0, 2):
            with pytest.raises(TransportError, match=rf"rank {rank}, transition 2: rank 1 is gone"):
                resharder.run(deadline_s=60)
            assert resharder.state is State.STALE
        assert torch.equal(before, source["w"])
        Path(folder, f"checked-{rank}").touch()
        os._exit(0)


@pytest.mark.parametrize("scenario", ["conformance", "many_transitions"])
def test_peer_on_one_gpu(scenario):
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        mp.spawn(worker, args=(folder, scenario), nprocs=WORLD)
        assert {f"finished-{rank}" for rank in range(WORLD)} <= {path.name for path in Path(folder).iterdir()}


def test_a_killed_rank_is_named_by_its_neighbours():
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        context = mp.spawn(worker, args=(folder, "a_killed_rank"), nprocs=WORLD, join=False)
        for process in context.processes:
            process.join(120)
        assert [process.exitcode for process in context.processes] == [0, -signal.SIGKILL, 0, 0]
        assert {"checked-0", "checked-2", "checked-3"} <= {path.name for path in Path(folder).iterdir()}
