"""The collective transport on four gloo processes: the conformance suite, staging budgets, other Plans, a lost rank."""

import datetime
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transport_suite
from transport_suite import WORLD, Pair, bound, check_case, row_layout, sample_cases

from reshard import CollectiveTransport, Resharder, make_plan
from reshard.errors import PlanError, StateError, TransportError
from reshard.resharder import State

NUM_CASES = 40


def host_memory(name: str, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def worker(rank: int, store: str, scenario: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timeout)
    globals()[scenario](rank)
    Path(store).with_name(f"finished-{rank}").touch()
    if scenario != "a_killed_rank":
        dist.destroy_process_group()


def launch(tmp_path, scenario) -> None:
    mp.spawn(worker, args=(str(tmp_path / "store"), scenario), nprocs=WORLD)


def conformance(rank: int) -> None:
    for index, case in enumerate(sample_cases(NUM_CASES)):
        for staging_bytes in (1 << 20, 4096):
            transport = CollectiveTransport(dist.group.WORLD, staging_bytes=staging_bytes, num_threads=1)
            try:
                check_case(case, rank, transport, host_memory)
            except Exception as error:
                raise AssertionError(f"case {index}, staging {staging_bytes}: {case}") from error


def staging_and_rounds(rank: int) -> None:
    case = Pair(row_layout(64, 50, WORLD), row_layout(64, 50, WORLD, first_row=8))
    for staging_bytes, most in ((1 << 20, 1 << 20), (2048, 2048)):
        transport = CollectiveTransport(dist.group.WORLD, staging_bytes=staging_bytes)
        check_case(case, rank, transport, host_memory)
        with bound(case, rank, transport, host_memory) as (resharder, _, _):
            assert 0 < resharder.stats.staging_bytes <= most or not resharder.stats.received_bytes


def plans_that_differ(rank: int) -> None:
    source = row_layout(8, 4, WORLD)
    destination = row_layout(8, 4, WORLD, first_row=1 if rank == 2 else 0)
    plan = make_plan(source, destination)
    tensors = {"w": torch.zeros(64)}
    with pytest.raises(PlanError, match=r"ranks \[2\] hold another Plan than rank 0 \(digest starts"):
        Resharder(plan, tensors, {"w": torch.zeros(64)}, rank=rank, transport=CollectiveTransport(dist.group.WORLD))


def wrong_rank_and_small_group(rank: int) -> None:
    plan = make_plan(row_layout(8, 4, WORLD), row_layout(8, 4, WORLD, first_row=1))
    tensors = {"w": torch.zeros(64)}
    other = (rank + 1) % WORLD
    with pytest.raises(PlanError, match=rf"rank {other} of the Plan is bound in the process that is rank {rank}"):
        Resharder(plan, tensors, {"w": torch.zeros(64)}, rank=other, transport=CollectiveTransport(dist.group.WORLD))
    pair = dist.new_group([0, 1])
    if rank < 2:
        with pytest.raises(PlanError, match=r"ranks \[2, 3\] of the Plan are outside its group of 2"):
            Resharder(plan, tensors, {"w": torch.zeros(64)}, rank=rank, transport=CollectiveTransport(pair))


def a_killed_rank(rank: int) -> None:
    case = Pair(row_layout(64, 50, WORLD), row_layout(64, 50, WORLD, first_row=8))
    with bound(case, rank, CollectiveTransport(dist.group.WORLD), host_memory) as (resharder, source, _):
        transport_suite.fill(source, case.source, rank, transport_suite.full_tensors(case.source, 1))
        resharder.run(deadline_s=20)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        before = source["w"].clone()
        if rank in (0, 2):
            with pytest.raises(TransportError, match=rf"rank {rank} of group .*: hop 0, round 0 .*1"):
                resharder.run(deadline_s=10)
            assert resharder.state is State.STALE
            with pytest.raises(StateError, match="not whole"):
                resharder.require_complete()
        assert torch.equal(before, source["w"])
    os._exit(0)


@pytest.mark.parametrize(
    "scenario", ["conformance", "staging_and_rounds", "plans_that_differ", "wrong_rank_and_small_group"]
)
def test_collective(tmp_path, scenario):
    launch(tmp_path, scenario)
    assert {f"finished-{rank}" for rank in range(WORLD)} <= {path.name for path in tmp_path.iterdir()}


def test_a_killed_rank_ends_its_neighbours_with_its_name(tmp_path):
    with pytest.raises(mp.ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        launch(tmp_path, "a_killed_rank")
