"""The collective transport on four gloo processes: the conformance suite, gathers, staging, faults."""

import datetime
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transport_suite
from transport_suite import WORLD, Pair, bound, check_case, gather_pairs, row_layout, sample_cases

from reshard import CollectiveTransport, Resharder, make_plan
from reshard.arena import Arena
from reshard.errors import PeerTimeout, PlanError, StateError, TransportError
from reshard.plan_gather import gather_communicators
from reshard.process_groups import ProcessGroups
from reshard.resharder import State

NUM_CASES = 40
SHIFTED = Pair(row_layout(64, 50, WORLD), row_layout(64, 50, WORLD, first_row=8))
MODES = ("messages", "all_gather", "off")


def host_memory(name: str, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def everyone(store: dist.Store, what: str) -> None:
    """Wait until all ranks have come here."""
    store.add(what, 1)
    while store.add(what, 0) < WORLD:
        time.sleep(0.001)


def worker(rank: int, folder: str, scenarios: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    timeout = datetime.timedelta(seconds=100)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    for scenario in scenarios:
        globals()[scenario](rank, dist.PrefixStore(scenario, store))
        Path(folder, f"{scenario}-{rank}").touch()
        everyone(store, scenario)
    os._exit(0)


def conformance(rank: int, store: dist.Store) -> None:
    for index, case in enumerate(sample_cases(NUM_CASES)):
        for mode, staging_bytes in zip(MODES, (1 << 20, 4096, 8192), strict=True):
            transport = CollectiveTransport(
                dist.group.WORLD, staging_bytes=staging_bytes, num_threads=1, gathers=mode, store=store
            )
            try:
                check_case(case, rank, transport, host_memory)
            except Exception as error:
                raise AssertionError(f"case {index}, {mode}, staging {staging_bytes}: {case}") from error


def gathers_are_used(rank: int, store: dist.Store) -> None:
    """Exact counts by way, bytes on the wire and calls, for training shards that become larger generation shards."""
    for name, case, expected in gather_pairs():
        plan = make_plan(case.source, case.destination)
        with ProcessGroups(gather_communicators(plan), backend="gloo", store=store) as groups:
            for mode in MODES:
                transport = CollectiveTransport(groups, num_threads=1, gathers=mode, staging_bytes=3 << 20)
                check_case(case, rank, transport, host_memory)
                with bound(case, rank, transport, host_memory) as (resharder, _, _):
                    transfer = resharder._bound
                    assert transfer.num_gathers == expected[mode], f"{name}, {mode}: {transfer.num_gathers}"
                    assert transfer.wire_bytes == plan.received_bytes(rank), f"{name}, {mode}"
                    assert resharder.stats.staging_bytes <= 3 << 20
            plain = CollectiveTransport(dist.group.WORLD, gathers="all_gather", num_threads=1, store=store)
            check_case(case, rank, plain, host_memory)


def staging_and_rounds(rank: int, store: dist.Store) -> None:
    for staging_bytes in (1 << 20, 4096):
        transport = CollectiveTransport(dist.group.WORLD, staging_bytes=staging_bytes, store=store)
        check_case(SHIFTED, rank, transport, host_memory)
        with bound(SHIFTED, rank, transport, host_memory) as (resharder, _, _):
            assert 0 < resharder.stats.staging_bytes <= staging_bytes
            assert resharder._bound.num_wire_calls == (1 if staging_bytes > 4096 else 2)
    uneven = CollectiveTransport(dist.group.WORLD, staging_bytes=1 << (20 - 2 * rank), store=store)
    check_case(SHIFTED, rank, uneven, host_memory)


def staging_from_an_arena(rank: int, store: dist.Store) -> None:
    arena = Arena.host()
    cache = arena.allocate("kv cache", 1 << 20)
    transport = CollectiveTransport(dist.group.WORLD, staging=cache, store=store)
    check_case(SHIFTED, rank, transport, host_memory)
    with bound(SHIFTED, rank, transport, host_memory) as (resharder, source, destination):
        assert resharder.stats.staging_bytes == 0, "borrowed memory is not the transfer's own"
        cache.tensor().fill_(7)
        transport_suite.fill(source, SHIFTED.source, rank, transport_suite.full_tensors(SHIFTED.source, 1))
        resharder.run(deadline_s=60)
        assert (cache.tensor() != 7).any(), "the region was not used"
        if rank == 2:
            arena.release(cache)
        kind, match = (TransportError, r"rank 2 staging is lent by arena region 'kv cache', which is RELEASED: back it")
        if rank == 2:
            kind, match = StateError, "staging is lent by arena region 'kv cache', which is RELEASED: back it before"
        with pytest.raises(kind, match=match):
            resharder.run(deadline_s=60)
        if rank == 2:
            arena.back(cache)
        values = transport_suite.full_tensors(SHIFTED.source, 3)
        transport_suite.fill(source, SHIFTED.source, rank, values)
        resharder.run(deadline_s=60)
        transport_suite.check_destination(resharder.plan, rank, destination, values)
    everyone(store, "all have run")


def plans_and_options_that_differ(rank: int, store: dist.Store) -> None:
    source, tensors = row_layout(8, 4, WORLD), {"w": torch.zeros(64)}
    plan = make_plan(source, row_layout(8, 4, WORLD, first_row=1 if rank == 2 else 0))
    transport = CollectiveTransport(dist.group.WORLD, store=store)
    with pytest.raises(PlanError, match=r"ranks \[2\] hold another Plan than rank 0 \(digest starts"):
        Resharder(plan, tensors, {"w": torch.zeros(64)}, rank=rank, transport=transport)
    plan = make_plan(source, row_layout(8, 4, WORLD, first_row=1))
    odd = CollectiveTransport(dist.group.WORLD, store=store, gathers="off" if rank == 3 else "auto")
    with pytest.raises(PlanError, match=r"ranks \[3\] were given gathers='off', rank 0 'messages': give every rank"):
        Resharder(plan, tensors, {"w": torch.zeros(64)}, rank=rank, transport=odd)
    other = (rank + 1) % WORLD
    with pytest.raises(PlanError, match=rf"rank {other} of the Plan is bound in the process that is rank {rank}"):
        Resharder(plan, tensors, {"w": torch.zeros(64)}, rank=other, transport=transport)
    with pytest.raises(PlanError, match="a staging budget of 100 bytes is too small: give 4096"):
        CollectiveTransport(dist.group.WORLD, staging_bytes=100)
    pair = dist.new_group([0, 1])
    if rank < 2:
        with pytest.raises(PlanError, match=r"ranks \[2, 3\] of the Plan are outside its group of 2"):
            Resharder(
                plan, tensors, {"w": torch.zeros(64)}, rank=rank, transport=CollectiveTransport(pair, store=store)
            )


def many_transitions(rank: int, store: dist.Store) -> None:
    """Hundreds of transitions with other values each time: bit-exact, and nothing grows."""
    transport = CollectiveTransport(dist.group.WORLD, num_threads=1, staging_bytes=8192, store=store)
    with bound(SHIFTED, rank, transport, host_memory) as (resharder, source, destination):
        sizes = []
        for update in range(300):
            values = transport_suite.full_tensors(SHIFTED.source, update)
            transport_suite.fill(source, SHIFTED.source, rank, values)
            resharder.run(deadline_s=60)
            if update % 50 == 0:
                transport_suite.check_destination(resharder.plan, rank, destination, values)
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                sizes.append((len(os.listdir("/proc/self/fd")), pages))
        assert sizes[1][0] == sizes[-1][0], f"descriptors grew: {sizes}"
        assert sizes[-1][1] - sizes[1][1] < 512, f"resident memory grew by over 2 MiB: {sizes}"
        assert resharder.version == 300


def start_sends_the_first_round(rank: int, store: dist.Store) -> None:
    """The last rank to start has its first round on the wire when `start` returns; the others send in `wait`."""
    transport = CollectiveTransport(dist.group.WORLD, store=store)
    with bound(SHIFTED, rank, transport, host_memory) as (resharder, source, destination):
        values = transport_suite.full_tensors(SHIFTED.source, 1)
        transport_suite.fill(source, SHIFTED.source, rank, values)
        if rank == 3:
            while store.add("started", 0) < WORLD - 1:
                time.sleep(0.001)
        resharder.start()
        store.add("started", 1)
        assert rank != 3 or resharder._bound._next == 1, "nothing was sent in start()"
        with pytest.raises(StateError, match="in flight"):
            resharder.start()
        resharder.wait(deadline_s=60)
        transport_suite.check_destination(resharder.plan, rank, destination, values)


def a_late_rank(rank: int, store: dist.Store) -> None:
    """Rank 1 comes to transition 2 after all others gave up on it, by name; transition 3 makes all whole."""
    transport = CollectiveTransport(dist.group.WORLD, store=store)
    with bound(SHIFTED, rank, transport, host_memory) as (resharder, source, destination):
        transport_suite.fill(source, SHIFTED.source, rank, transport_suite.full_tensors(SHIFTED.source, 1))
        resharder.run(deadline_s=60)
        everyone(store, "transition 1")
        if rank == 1:
            while store.add("gave up", 0) < WORLD - 1:
                time.sleep(0.001)
        late = r"(rank 1|ranks \[.*1.*\]) did not come; rank \d gave up after .*Nothing was sent; last steps: "
        late += r".*rank 1: finished transition 1, \d"
        match = late if rank != 1 else "all have come since; rank \\d gave up after"
        with pytest.raises(PeerTimeout, match=rf"rank {rank}, transition 2 of ranks \[0, 1, 2, 3\]: {match}"):
            resharder.run(deadline_s=1.0)
        assert resharder.state is State.STALE
        store.add("gave up", 1)
        values = transport_suite.full_tensors(SHIFTED.source, 3)
        transport_suite.fill(source, SHIFTED.source, rank, values)
        resharder.run(deadline_s=60)
        transport_suite.check_destination(resharder.plan, rank, destination, values)


def instead_of_posting(resharder: Resharder, act: Callable[[], None]) -> None:
    """Have `act` run once, where the first round would be packed and sent."""
    transfer = resharder._bound
    post = transfer._post

    def intercepted() -> None:
        transfer._post = post
        act()
        post()

    transfer._post = intercepted


def a_stopped_rank_and_repair(rank: int, store: dist.Store) -> None:
    """Rank 1 stops between the meeting and its first message; later all make new groups and go on."""
    groups = ProcessGroups(backend="gloo", store=store)
    with bound(SHIFTED, rank, CollectiveTransport(groups), host_memory) as (resharder, source, destination):
        transport_suite.fill(source, SHIFTED.source, rank, transport_suite.full_tensors(SHIFTED.source, 1))
        before = source["w"].clone()
        if rank == 1:
            store.set("pid", str(os.getpid()))
            instead_of_posting(resharder, partial(os.kill, os.getpid(), signal.SIGSTOP))
        error = None
        try:
            resharder.run(deadline_s=5 if rank == 0 else 8)
        except TransportError as caught:
            error = str(caught)
            assert resharder.state is State.STALE
            with pytest.raises(StateError, match=r"the group of this transfer is broken .* bind a new Resharder"):
                resharder.run(deadline_s=5)
        if rank == 0:
            os.kill(int(store.get("pid")), signal.SIGCONT)
            assert error is not None, "the stopped rank was not missed"
            place = (
                r"^rank 0 of group 'world': transition 1, hop 0, round 0 failed while sending to .* from ranks \[1\]"
            )
            assert re.search(place + r".*last steps: .*rank 1: arrived at transition 1", error), error
        assert torch.equal(before, source["w"])
    groups.abort()
    with ProcessGroups(backend="gloo", store=store) as repaired:
        values = transport_suite.full_tensors(SHIFTED.source, 2)
        transport_suite.fill(source, SHIFTED.source, rank, values)
        with Resharder(
            make_plan(SHIFTED.source, SHIFTED.destination),
            source,
            destination,
            rank=rank,
            transport=CollectiveTransport(repaired),
        ) as again:
            again.run(deadline_s=60)
            transport_suite.check_destination(again.plan, rank, destination, values)


def a_killed_rank(rank: int, store: dist.Store) -> None:
    transport = CollectiveTransport(dist.group.WORLD, store=store)
    with bound(SHIFTED, rank, transport, host_memory) as (resharder, source, _):
        transport_suite.fill(source, SHIFTED.source, rank, transport_suite.full_tensors(SHIFTED.source, 1))
        resharder.run(deadline_s=60)
        before = source["w"].clone()
        if rank == 1:
            instead_of_posting(resharder, partial(os.kill, os.getpid(), signal.SIGKILL))
        begin = time.monotonic()
        if rank == 0:
            with pytest.raises(
                TransportError, match=r"rank 0 of group .*: transition 2, hop 0, round 0 failed"
            ) as caught:
                resharder.run(deadline_s=120)
            assert re.search(r"rank 1: arrived at transition 2, .* \(process \d+ on \S+ is gone\)", str(caught.value))
            assert resharder.state is State.STALE
            with pytest.raises(StateError, match="not whole"):
                resharder.require_complete()
        else:
            try:
                resharder.run(deadline_s=120)
            except TransportError as error:
                assert "last steps: " in str(error)
        with pytest.raises(TransportError, match=r"bind \d+ of ranks .* did not come; .*the process of rank 1 is gone"):
            CollectiveTransport(dist.group.WORLD, timeout_s=120, store=store).bind(
                resharder.plan, rank=rank, source=resharder._source, destination=resharder._destination
            )
        assert time.monotonic() - begin < 100, "the dead rank was found by the deadline only"
        assert torch.equal(before, source["w"])
    os._exit(0)


def run(tmp_path: Path, *scenarios: str) -> list[int]:
    """Exit codes of the ranks; an error in one is raised here."""
    context = mp.spawn(worker, args=(str(tmp_path), scenarios), nprocs=WORLD, join=False)
    for process in context.processes:
        process.join(280)
    codes = [process.exitcode for process in context.processes]
    if any(code not in (0, -signal.SIGKILL) for code in codes):
        context.join()
    return codes


def test_conformance(tmp_path):
    assert run(tmp_path, "conformance") == [0] * WORLD
    assert len(list(tmp_path.glob("conformance-*"))) == WORLD


def test_gathers_and_staging(tmp_path):
    scenarios = ("gathers_are_used", "staging_and_rounds", "staging_from_an_arena", "many_transitions")
    assert run(tmp_path, *scenarios) == [0] * WORLD
    assert all(len(list(tmp_path.glob(f"{scenario}-*"))) == WORLD for scenario in scenarios)


def test_ranks_that_differ_are_late_stop_or_die(tmp_path):
    scenarios = ("plans_and_options_that_differ", "start_sends_the_first_round", "a_late_rank")
    scenarios += ("a_stopped_rank_and_repair", "a_killed_rank")
    assert run(tmp_path, *scenarios) == [0, -signal.SIGKILL, 0, 0]
    assert all(len(list(tmp_path.glob(f"{scenario}-*"))) == WORLD for scenario in scenarios[:-1])
