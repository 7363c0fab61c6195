"""The peer transport on four processes of this host: the conformance suite, faults, many transitions, clean closing."""

import contextlib
import os
import re
import signal
import tempfile
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
import transport_suite
from transport_suite import WORLD, Pair, bound, check_case, row_layout, sample_cases

from reshard import PeerTransport, Resharder, make_plan
from reshard.arena import Arena
from reshard.errors import PeerTimeout, PlanError, StateError, TransportError
from reshard.resharder import State

NUM_CASES = 40
SHIFTED = (row_layout(64, 50, WORLD), row_layout(64, 50, WORLD, first_row=8))


class ArenaMemory:
    """Destination storages, each in a region of its own or several in one."""

    def __init__(self) -> None:
        self.arena, self.count = Arena.host(), 0

    def __call__(self, name: str, num_bytes: int) -> torch.Tensor:
        self.count += 1
        return self.arena.allocate(f"{self.count}.{name}", num_bytes).tensor(shape=(num_bytes,))


def worker(rank: int, folder: str, scenario: str) -> None:
    torch.set_num_threads(1)
    globals()[scenario](rank, folder)
    Path(folder, f"finished-{rank}").touch()


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="reshard") as path:
        yield path


def conformance(rank: int, folder: str) -> None:
    memory = ArenaMemory()
    transport = PeerTransport(memory.arena, folder, num_threads=1)
    for index, case in enumerate(sample_cases(NUM_CASES)):
        try:
            check_case(case, rank, transport, memory)
        except Exception as error:
            raise AssertionError(f"case {index}: {case}") from error


def many_transitions(rank: int, folder: str) -> None:
    """A thousand transitions with other values each time: bit-exact, and nothing grows."""
    memory, case = ArenaMemory(), Pair(*SHIFTED)
    transport = PeerTransport(memory.arena, folder, num_threads=1)
    with bound(case, rank, transport, memory) as (resharder, source, destination):
        sizes = []
        for update in range(1000):
            values = transport_suite.full_tensors(case.source, update)
            transport_suite.fill(source, case.source, rank, values)
            resharder.run(deadline_s=60)
            if update % 50 == 0:
                transport_suite.check_destination(resharder.plan, rank, destination, values)
                sizes.append((len(os.listdir("/proc/self/fd")), resident_pages()))
        assert sizes[1][0] == sizes[-1][0], f"descriptors grew: {sizes}"
        assert sizes[-1][1] - sizes[1][1] < 512, f"resident memory grew by over 2 MiB: {sizes}"
        assert resharder.version == 1000 and resharder.stats.staging_bytes == 0


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def a_killed_rank(rank: int, folder: str) -> None:
    memory, case = ArenaMemory(), Pair(*SHIFTED)
    with bound(case, rank, PeerTransport(memory.arena, folder), memory) as (resharder, source, _):
        transport_suite.fill(source, case.source, rank, transport_suite.full_tensors(case.source, 1))
        resharder.run(deadline_s=30)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        before = source["w"].clone()
        if rank in (0, 2):
            with pytest.raises(TransportError, match=rf"rank {rank}, transition 2: rank 1 is gone; it had to "):
                resharder.run(deadline_s=60)
            assert resharder.state is State.STALE
            with pytest.raises(StateError, match="not whole"):
                resharder.require_complete()
        assert torch.equal(before, source["w"])
        Path(folder, f"checked-{rank}").touch()
        os._exit(0)


def a_late_rank(rank: int, folder: str) -> None:
    """Rank 1 comes to transition 2 after its neighbours gave up on it, by name; transition 3 makes all whole."""
    memory, case = ArenaMemory(), Pair(*SHIFTED)
    store = torch.distributed.FileStore(f"{folder}/store", WORLD)
    with bound(case, rank, PeerTransport(memory.arena, folder), memory) as (resharder, source, destination):
        transport_suite.fill(source, case.source, rank, transport_suite.full_tensors(case.source, 1))
        resharder.run(deadline_s=60)
        if rank == 1:
            store.wait(["gave up 0", "gave up 2"])
        match = rf"rank {rank}, transition 2: waited 0.5 s for rank [0-3] to (open its destination|send its last bytes)"
        try:
            resharder.run(deadline_s=0.5)
            outcome = "complete"
        except PeerTimeout as error:
            outcome = str(error)
            assert re.match(match, outcome), outcome
            assert resharder.state is State.STALE
        assert rank not in (0, 2) or "for rank 1 " in outcome
        store.set(f"gave up {rank}", "")
        store.wait([f"gave up {other}" for other in range(WORLD)])
        values = transport_suite.full_tensors(case.source, 3)
        transport_suite.fill(source, case.source, rank, values)
        resharder.run(deadline_s=60)
        transport_suite.check_destination(resharder.plan, rank, destination, values)


def plans_that_differ(rank: int, folder: str) -> None:
    """Rows move 1 -> 0, 2 -> 1 and 3 -> 2; rank 2 has a destination of its own."""
    destination = row_layout(64, 50, WORLD, first_row=9 if rank == 2 else 8)
    memory = ArenaMemory()
    transport = PeerTransport(memory.arena, folder, timeout_s=30)
    match = {
        1: r"missing \[2\]: rank 2 has Plan \w{12}, rank 1 has \w{12}: make the Plan from the same merged Layouts",
        2: r"rank [23] has Plan \w{12}, rank [12] has \w{12}",
        3: r"rank 3 has Plan \w{12}, rank 2 has \w{12}",
    }
    try:
        with bound(Pair(SHIFTED[0], destination), rank, transport, memory):
            outcome = "bound"
    except (PlanError, TransportError) as error:
        outcome = str(error)
    assert rank == 0 or re.search(match[rank], outcome), outcome


def a_rank_that_never_comes(rank: int, folder: str) -> None:
    memory, case = ArenaMemory(), Pair(*SHIFTED)
    everyone_is_up(rank, folder)
    if rank == 1:
        return
    transport = PeerTransport(memory.arena, folder, timeout_s=3.0)
    match = r"meeting its receiver rank 1: waited|meeting the senders \[1\], missing \[1\]: waited"
    if rank in (0, 2):
        with pytest.raises(PeerTimeout, match=match), bound(case, rank, transport, memory):
            pass
    elif rank == 3:
        with contextlib.suppress(TransportError), bound(case, rank, transport, memory):
            pass


def everyone_is_up(rank: int, folder: str) -> None:
    """Start together: processes come up seconds apart on a busy machine."""
    store = torch.distributed.FileStore(f"{folder}/up", WORLD)
    store.set(f"up {rank}", "")
    store.wait([f"up {other}" for other in range(WORLD)])


def memory_outside_the_arena(rank: int, folder: str) -> None:
    plan = make_plan(*SHIFTED)
    tensors = {"w": torch.zeros(64 * 50)}
    if rank in (0, 1, 2):
        with pytest.raises(
            PlanError, match=r"destination tensor 'w' is written by other processes .* allocate it from"
        ):
            Resharder(
                plan, tensors, {"w": torch.zeros(64 * 50)}, rank=rank, transport=PeerTransport(Arena.host(), folder)
            )


@pytest.mark.parametrize(
    "scenario",
    [
        "conformance",
        "many_transitions",
        "a_late_rank",
        "plans_that_differ",
        "a_rank_that_never_comes",
        "memory_outside_the_arena",
    ],
)
def test_peer(folder, scenario):
    mp.spawn(worker, args=(folder, scenario), nprocs=WORLD)
    assert {f"finished-{rank}" for rank in range(WORLD)} <= {path.name for path in Path(folder).iterdir()}


def test_a_killed_rank_ends_its_neighbours_at_once_with_its_name(folder):
    context = mp.spawn(worker, args=(folder, "a_killed_rank"), nprocs=WORLD, join=False)
    for process in context.processes:
        process.join(60)
    assert [process.exitcode for process in context.processes] == [0, -signal.SIGKILL, 0, 0]
    assert {"checked-0", "checked-2", "checked-3"} <= {path.name for path in Path(folder).iterdir()}
