"""Faults of the peer transport: each ends in time with the culprit's name, weights stay, the next transition works."""

import multiprocessing
import os
import re
import resource
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import transport_suite
from forked_ranks import ArenaMemory, launch, outcomes_of, together
from transport_suite import WORLD, Pair, bound, row_layout

from reshard import PeerTransport
from reshard.arena import Channel
from reshard.errors import DeviceError, OutOfMemory, PeerTimeout, PlanError, StateError, TransportError
from reshard.resharder import State

SHIFTED = Pair(row_layout(64, 50, WORLD), row_layout(64, 50, WORLD, first_row=8))
"""Rows move 1 -> 0, 2 -> 1 and 3 -> 2."""
LONG_S = 100.0


def check_healed(rank: int, folder: str, resharder, source, destination) -> None:
    """The next transition works on all ranks at once."""
    together(rank, folder, "heal")
    values = transport_suite.full_tensors(SHIFTED.source, 7)
    transport_suite.fill(source, SHIFTED.source, rank, values)
    resharder.run(deadline_s=LONG_S)
    transport_suite.check_destination(resharder.plan, rank, destination, values)
    resharder.verify()


def a_late_rank(rank: int, folder: str) -> None:
    """Rank 1 comes to transition 2 when its neighbours have given up on it; nobody waits for its own deadline."""
    memory = ArenaMemory()
    store = torch.distributed.FileStore(f"{folder}/store", WORLD)
    with bound(SHIFTED, rank, PeerTransport(memory.arena, folder), memory) as (resharder, source, destination):
        transport_suite.fill(source, SHIFTED.source, rank, transport_suite.full_tensors(SHIFTED.source, 1))
        resharder.run(deadline_s=LONG_S)
        if rank == 1:
            store.wait(["gave up 0", "gave up 2"])
        begin = time.monotonic()
        try:
            resharder.run(deadline_s=0.5 if rank == 0 else LONG_S if rank == 1 else 5.0)
            outcome = "complete"
        except TransportError as error:
            outcome = str(error)
            assert resharder.state is State.STALE
        match = {
            0: r"rank 0, transition 2: waited 0.5 s for rank 1 to send its last bytes",
            1: r"rank 1, transition 2: rank [02] gave up on it because of rank 1; it had to |complete",
            2: r"rank 2, transition 2: waited 5 s for rank 1 to open its destination",
            3: r"rank 3, transition 2: (waited 5 s for rank 2 to open|rank 2 gave up on it because of rank 1)|complete",
        }
        assert re.match(match[rank], outcome), outcome
        assert rank != 1 or time.monotonic() - begin < LONG_S / 4, "it waited although its peers had given up"
        store.set(f"gave up {rank}", "")
        check_healed(rank, folder, resharder, source, destination)


def reallocated_tensors_on_one_rank(rank: int, folder: str) -> None:
    """Rank 1 refuses before anything is written; the others end at once, blaming it."""
    memory = ArenaMemory()
    with bound(SHIFTED, rank, PeerTransport(memory.arena, folder), memory) as (resharder, source, destination):
        transport_suite.fill(source, SHIFTED.source, rank, transport_suite.full_tensors(SHIFTED.source, 1))
        resharder.run(deadline_s=LONG_S)
        kept, before = source["w"].data, source["w"].clone()
        begin = time.monotonic()
        if rank == 1:
            source["w"].data = kept.clone()
            with pytest.raises(StateError, match="1 source tensors were re-allocated since binding"):
                resharder.run()
            source["w"].data = kept
        else:
            try:
                resharder.run(deadline_s=LONG_S)
            except TransportError as error:
                assert re.match(rf"rank {rank}, transition 2: rank [12] gave up on it", str(error)), error
                assert rank in (2, 3) or "rank 1 gave up on it; it had to" in str(error)
            else:
                assert rank == 3
        assert time.monotonic() - begin < LONG_S / 4, "a rank waited for one that had refused"
        assert torch.equal(before, source["w"])
        check_healed(rank, folder, resharder, source, destination)


def a_full_arena_at_the_hand_over(rank: int, folder: str) -> None:
    """Rank 2 can't get memory for its KV cache, nor take that of weights which others may write: nothing changes."""
    memory = ArenaMemory()
    with bound(SHIFTED, rank, PeerTransport(memory.arena, folder), memory) as (resharder, source, destination):
        transport_suite.fill(source, SHIFTED.source, rank, transport_suite.full_tensors(SHIFTED.source, 1))
        resharder.run(deadline_s=LONG_S)
        before = source["w"].clone(), destination["w"].clone()
        if rank == 2:
            memory.arena.set_budget("kv", 1 << 16)
            kv = memory.arena.reserve("kv", 1 << 20)
            with pytest.raises(OutOfMemory, match="'kv'"):
                memory.arena.handover((), kv)
            with pytest.raises(StateError, match="shares of it are out"):
                memory.arena.handover([r for r in memory.arena.regions() if r != kv], kv)
        assert torch.equal(before[0], source["w"]) and torch.equal(before[1], destination["w"])
        resharder.require_complete()
        check_healed(rank, folder, resharder, source, destination)


def few_descriptors(rank: int, folder: str) -> None:
    """Rank 1 may open no more files: its bind fails with the advice, its neighbours' by their deadline."""
    memory = ArenaMemory()
    for index in range(40):
        memory(f"filler{index}", 16)
    transport = PeerTransport(memory.arena, folder, timeout_s=5)
    together(rank, folder, "up")
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    case = Pair(row_layout(64, 50, WORLD), row_layout(64, 50, WORLD, first_row=8))
    if rank == 1:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, old[1]))
    begin = time.monotonic()
    try:
        with bound(case, rank, transport, memory) as (resharder, _, _):
            resharder.run(deadline_s=20)
        outcome = "complete"
    except (TransportError, DeviceError) as error:
        outcome = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
    assert rank != 1 or "ulimit -n" in outcome, outcome
    assert rank == 3 or outcome != "complete"
    assert time.monotonic() - begin < 60


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        a_late_rank,
        reallocated_tensors_on_one_rank,
        a_full_arena_at_the_hand_over,
        few_descriptors,
    )
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_peer_fault(outcomes, scenario):
    assert outcomes[scenario] == ""


def a_killed_rank(rank: int, folder: str) -> None:
    memory = ArenaMemory()
    with bound(SHIFTED, rank, PeerTransport(memory.arena, folder), memory) as (resharder, source, _):
        transport_suite.fill(source, SHIFTED.source, rank, transport_suite.full_tensors(SHIFTED.source, 1))
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


def a_stopped_rank(rank: int, folder: str) -> None:
    """Rank 1 is stopped in the middle of transition 2, its destination open; rank 0 wakes it when all gave up."""
    memory = ArenaMemory()
    store = torch.distributed.FileStore(f"{folder}/store", WORLD)
    with bound(SHIFTED, rank, PeerTransport(memory.arena, folder), memory) as (resharder, source, destination):
        transport_suite.fill(source, SHIFTED.source, rank, transport_suite.full_tensors(SHIFTED.source, 1))
        resharder.run(deadline_s=LONG_S)
        before = source["w"].clone()
        if rank == 1:
            store.set("pid", str(os.getpid()))
            resharder.begin()
            os.kill(os.getpid(), signal.SIGSTOP)
            begin = time.monotonic()
            resharder.wait(deadline_s=LONG_S)
            assert time.monotonic() - begin < LONG_S / 4, "all of its bytes had come while it was stopped"
        else:
            try:
                resharder.run(deadline_s=2.0 if rank == 0 else LONG_S)
                outcome = "complete"
            except PeerTimeout as error:
                outcome = str(error)
            assert outcome.startswith("rank 0, transition 2: waited 2 s for rank 1 to send") == (rank == 0), outcome
        if rank == 0:
            os.kill(int(store.get("pid")), signal.SIGCONT)
        assert torch.equal(before, source["w"])
        check_healed(rank, folder, resharder, source, destination)
        Path(folder, f"checked-{rank}").touch()


@pytest.mark.parametrize(
    ("scenario", "codes"), [(a_killed_rank, [0, -signal.SIGKILL, 0, 0]), (a_stopped_rank, [0] * 4)]
)
def test_a_rank_that_is_killed_or_stopped_is_named(scenario, codes):
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        assert launch(scenario, folder) == codes
        checked = {path.name for path in Path(folder).iterdir()}
        assert {f"checked-{rank}" for rank, code in enumerate(codes) if code == 0} <= checked


def connect_as_nobody(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.005)
    for folder in (Path(path), Path(path).parent, Path(path).parent.parent):
        folder.chmod(0o777)
    os.setgid(65534)
    os.setuid(65534)
    with Channel.connect(path, timeout_s=20, allowed_uids={0, 65534}) as channel, pytest.raises(TransportError):
        channel.receive("control", timeout_s=20)


def say_hello_with_a_corrupted_digest(path: str) -> None:
    with Channel.connect(path, timeout_s=20) as channel:
        channel.send("hello", {"rank": 1, "digest": "f" * 64}, timeout_s=20)
        with pytest.raises(TransportError, match="rank 1 has Plan ffffffffffff, rank 0 has"):
            channel.receive("region", timeout_s=20)


@pytest.mark.parametrize(
    ("stranger", "kind", "match"),
    [
        pytest.param(
            connect_as_nobody,
            TransportError,
            r"rank 0, meeting the senders \[1\], missing \[1\]: refused process \d+ \(user 65534\): only the users",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user"),
        ),
        (say_hello_with_a_corrupted_digest, PlanError, r"missing \[1\]: rank 1 has Plan ffffffffffff, rank 0 has"),
    ],
)
def test_a_stranger_at_the_socket_ends_the_bind_by_name(stranger, kind, match):
    memory = ArenaMemory()
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        process = multiprocessing.get_context("fork").Process(target=stranger, args=(f"{folder}/1/0.sock",))
        process.start()
        with pytest.raises(kind, match=match), bound(SHIFTED, 0, PeerTransport(memory.arena, folder), memory):
            pass
        process.join(60)
        assert process.exitcode == 0
