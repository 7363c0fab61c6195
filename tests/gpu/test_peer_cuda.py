"""The peer transport between processes that share one GPU: the conformance suite, many transitions, a killed rank."""

import contextlib
import os
import signal
import tempfile
from pathlib import Path

import peer_shared
import pytest
import torch
import torch.multiprocessing as mp
import transport_suite
from device_memory import DeviceMemory
from forked_ranks import together
from transport_suite import NO_KERNELS, WORLD, Pair, bound, check_case, row_layout, sample_cases

from reshard import PeerTransport, Resharder, make_plan
from reshard.arena import Arena
from reshard.errors import TransportError, VerifyError
from reshard.resharder import State

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(NO_KERNELS, reason="needs a build with CUDA kernels (RESHARD_CUDA=on), or Triton"),
]
NUM_CASES = 60
SHIFTED = Pair(row_layout(640, 50, WORLD), row_layout(640, 50, WORLD, first_row=80))


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


def parts_and_a_flipped_bit(rank: int, folder: str) -> None:
    """Parts in an order of each rank's own, by graphs; then one bit of a received box flips on rank 1."""
    memory = DeviceMemory()
    plan = make_plan(SHIFTED.source, SHIFTED.destination)
    allocate = transport_suite.allocate_storages
    source = allocate(SHIFTED.source, rank, lambda _, size: torch.empty(size, dtype=torch.uint8, device="cuda"))
    destination = allocate(SHIFTED.destination, rank, memory)
    transport = PeerTransport(memory.arena, folder)
    with Resharder(plan, source, destination, rank=rank, transport=transport, parts=[["w"]], graph=True) as resharder:
        for update in (1, 2):
            values = transport_suite.full_tensors(SHIFTED.source, update)
            transport_suite.fill(source, SHIFTED.source, rank, values)
            resharder.begin()
            resharder.push(0)
            resharder.wait_part(0, deadline_s=60)
            transport_suite.check_destination(plan, rank, destination, values)
            resharder.wait(deadline_s=60)
            resharder.verify()
        if rank == 1:
            destination["w"][-17 - 4 * 50] ^= 4
        if rank in (1, 2):
            with pytest.raises(VerifyError, match=r"w\[320:400, 0:50\] from rank 2 to rank 1: the values that"):
                resharder.verify()
        else:
            resharder.verify()


def a_late_rank(rank: int, folder: str) -> None:
    """Rank 1 comes after rank 0 gave up on it; the next transition works on all ranks."""
    memory = DeviceMemory()
    with bound(SHIFTED, rank, PeerTransport(memory.arena, folder), memory, "cuda") as (resharder, source, destination):
        together(rank, folder, "bound")
        if rank == 1:
            torch.distributed.FileStore(f"{folder}/late", WORLD).wait(["gave up"])
        with contextlib.suppress(TransportError):
            resharder.run(deadline_s=0.5 if rank == 0 else 60)
            assert rank != 0
        if rank == 0:
            torch.distributed.FileStore(f"{folder}/late", WORLD).set("gave up", "")
        together(rank, folder, "heal")
        values = transport_suite.full_tensors(SHIFTED.source, 5)
        transport_suite.fill(source, SHIFTED.source, rank, values)
        resharder.run(deadline_s=60)
        transport_suite.check_destination(resharder.plan, rank, destination, values)


def device_arena() -> Arena:
    torch.cuda.init()
    return Arena.cuda(0)


def shared(rank: int, folder: str) -> None:
    for name in ("zero_bytes", "some_in_place"):
        Path(folder, name).mkdir(exist_ok=True)
        peer_shared.__dict__[name](rank, f"{folder}/{name}", new_arena=device_arena)


@pytest.mark.parametrize(
    ("scenario", "world"),
    [("conformance", 4), ("many_transitions", 4), ("parts_and_a_flipped_bit", 4), ("a_late_rank", 4), ("shared", 2)],
)
def test_peer_on_one_gpu(scenario, world):
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        mp.spawn(worker, args=(folder, scenario), nprocs=world)
        assert {f"finished-{rank}" for rank in range(world)} <= {path.name for path in Path(folder).iterdir()}


def test_a_killed_rank_is_named_by_its_neighbours():
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        context = mp.spawn(worker, args=(folder, "a_killed_rank"), nprocs=WORLD, join=False)
        for process in context.processes:
            process.join(120)
        assert [process.exitcode for process in context.processes] == [0, -signal.SIGKILL, 0, 0]
        assert {"checked-0", "checked-2", "checked-3"} <= {path.name for path in Path(folder).iterdir()}
