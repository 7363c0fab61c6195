"""Transitions whose copies run through Triton's interpreter on host memory: every transport, four processes, checksums.

Run with RESHARD_KERNELS=triton and TRITON_INTERPRET=1, which Triton reads once at import.
"""

import datetime

import torch
import torch.distributed as dist
from forked_ranks import ArenaMemory, outcomes_of
from transport_suite import WORLD, Pair, check_case, row_layout, sample_cases

import reshard
from reshard import Address, CollectiveTransport, DType, Holding, Layout, PeerTransport, Region, TensorSpec
from reshard.errors import VerifyError
from reshard.transports import runner
from reshard.triton_copy import TritonTable

NUM_CASES = 1
bound_tables: list[tuple[int, object]] = []
"""Of every table that was bound, the most followers of a fan, and what runs it."""


def replicas(rows: int, columns: int) -> Layout:
    """One bf16 matrix, whole on every rank."""
    spec, region = TensorSpec("w", (rows, columns), DType.BFLOAT16), Region.whole("w", (rows, columns))
    address = Address("w", 0, (columns, 1), DType.BFLOAT16)
    return Layout.from_holdings([spec], [Holding(rank, region, address) for rank in range(WORLD)])


def some_cases() -> list[Pair]:
    """Random pairs, and one in which every box goes to all ranks."""
    return [*sample_cases(NUM_CASES), Pair(row_layout(24, 50, WORLD), replicas(24, 50))]


def peer(rank: int, folder: str) -> None:
    memory = ArenaMemory()
    transport = PeerTransport(memory.arena, folder)
    for case in some_cases():
        check_case(case, rank, transport, memory)
    assert max(followers for followers, _ in bound_tables) == WORLD - 1, "no box was read once for all ranks"
    check_tables()


def collective(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", WORLD)
    timeout = datetime.timedelta(seconds=100)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    for case in some_cases():
        transport = CollectiveTransport(dist.group.WORLD, staging_bytes=4096, store=store)
        check_case(case, rank, transport, lambda _, size: torch.empty(size, dtype=torch.uint8))
    check_tables()
    dist.barrier()


def check_tables() -> None:
    assert bound_tables and all(isinstance(table, TritonTable) for _, table in bound_tables)
    bound_tables.clear()


def remember(table, device, *, num_threads):
    found = bind(table, device, num_threads=num_threads)
    bound_tables.append((int(table["num_followers"].max()), found))
    return found


def local() -> None:
    """Two updates by parts, stats, and a flipped bit that the checksums find."""
    source = {"a": torch.arange(40 * 300.0).view(40, 300) * 0.37, "b": torch.arange(77.0)}
    destination = {"a": torch.zeros(40, 300, dtype=torch.bfloat16), "b": torch.zeros(77, dtype=torch.float16)}
    plan = reshard.make_plan(Layout.from_tensors(source), Layout.from_tensors(destination))
    with reshard.Resharder(plan, source, destination) as resharder:
        for _ in range(2):
            source["a"].mul_(1.01)
            stats = resharder.run()
            assert all(torch.equal(t, source[n].to(t.dtype)) for n, t in destination.items())
            assert resharder.verify() == 2 * (40 * 300 + 77)
        assert (stats.kernels, stats.num_launches) == ("triton", 2), stats
        assert stats.staging_bytes > 2 * 128, "records and tiles are the table's own memory"
        destination["b"].view(torch.int16)[5] ^= 1
        try:
            resharder.verify()
        except VerifyError as error:
            assert "b[5]" in str(error)
        else:
            raise AssertionError("a flipped bit was not found")
    check_tables()


bind = runner.bind_table
if __name__ == "__main__":
    torch.set_num_threads(1)
    runner.bind_table = remember
    local()
    print("local: equal", flush=True)
    for name, error in outcomes_of({"peer": peer, "collective": collective}).items():
        print(f"{name}: {error or 'equal'}")
