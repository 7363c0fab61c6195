"""The collective transport on GPUs: over NCCL with one rank, and with several where there are several GPUs."""

import datetime
import faulthandler
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transport_suite
from transport_suite import NO_KERNELS, Pair, bound, check_case, gather_pairs, row_layout, sample_cases

from reshard import Address, CollectiveTransport, DType, Holding, Layout, Region, TensorSpec, make_plan
from reshard.arena import Arena
from reshard.errors import StateError
from reshard.groups import Communicator
from reshard.plan_gather import gather_communicators
from reshard.process_groups import NcclOptions, ProcessGroups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(NO_KERNELS, reason="needs a build with CUDA kernels (RESHARD_CUDA=on), or Triton"),
]
NUM_GPUS = torch.cuda.device_count()
NUM_CASES = 40
SMALL = (("all_gather", 1 << 20), ("off", 4096), ("messages", 8192))
LARGE = (("all_gather", 3 << 20), ("off", 3 << 20), ("messages", 3 << 20))


def worker(rank: int, folder: str, size: int, scenario: str) -> None:
    faulthandler.enable()
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=100))
    globals()[scenario](rank, size)
    Path(folder, f"finished-{rank}").touch()
    dist.destroy_process_group()


def one_rank(rank: int, size: int) -> None:
    """Groups with options, made twice; transitions of copies within the rank, on a stream of their own."""
    options = NcclOptions(high_priority_stream=True, min_ctas=1, max_ctas=8)
    with ProcessGroups([Communicator("alone", (0,))], backend="nccl", nccl=options) as groups:
        assert groups.device == torch.device("cuda", 0)
        assert [g.name for g in groups.groups] == ["world"], "one group a set of ranks"
        assert groups.group((0,)).handle.group_desc == "world"
        word = torch.ones(4, device="cuda")
        dist.all_reduce(word, group=groups.world.handle)
        assert word.tolist() == [1.0] * 4
    case = cast_case()
    device = f"cuda:{rank}"
    arena = Arena.cuda(rank)
    cache = arena.allocate("kv cache", 64 << 20)
    with ProcessGroups(backend="nccl") as groups:
        for transport in (
            CollectiveTransport(groups),
            CollectiveTransport(groups.world.handle),
            CollectiveTransport(groups, staging=cache),
        ):
            check_case(case, rank, transport, device_memory, device)
        stream = torch.cuda.Stream()
        with bound(case, rank, CollectiveTransport(groups, staging=cache), device_memory, device) as found:
            resharder, source, destination = found
            for update in range(1, 200):
                values = transport_suite.full_tensors(case.source, update)
                transport_suite.fill(source, case.source, rank, values)
                torch.cuda.synchronize()
                resharder.run(stream=stream.cuda_stream, deadline_s=30)
                transport_suite.check_destination(resharder.plan, rank, destination, values)
            assert resharder.stats.num_launches == 1 and resharder.stats.received_bytes == 0
            arena.release(cache)
            with pytest.raises(StateError, match="'kv cache', which is RELEASED: back it before"):
                resharder.run()


def conformance(rank: int, size: int) -> None:
    device = f"cuda:{rank}"
    cases = [(case, SMALL) for case in sample_cases(NUM_CASES, num_ranks=size)]
    cases.append((Pair(row_layout(64 * size, 50, size), row_layout(64 * size, 50, size, first_row=8)), SMALL))
    if size == transport_suite.WORLD:
        cases += [(pair, LARGE) for _, pair, _ in gather_pairs()]
    with ProcessGroups(backend="nccl") as groups:
        for index, (case, options) in enumerate(cases):
            groups.create(gather_communicators(make_plan(case.source, case.destination, topology=case.topology)))
            for mode, staging_bytes in options:
                transport = CollectiveTransport(groups, staging_bytes=staging_bytes, gathers=mode)
                try:
                    check_case(case, rank, transport, device_memory, device)
                except Exception as error:
                    raise AssertionError(f"case {index}, {mode}, staging {staging_bytes}: {case}") from error


def cast_case() -> Pair:
    """One fp32 matrix on rank 0, wanted there in bf16."""
    sides = []
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        spec, region = TensorSpec("w", (600, 513), dtype), Region.whole("w", (600, 513))
        sides.append(Layout.from_holdings([spec], [Holding(0, region, Address("w", 0, (513, 1), dtype))]))
    return Pair(*sides)


def device_memory(name: str, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def check_finished(tmp_path: Path, size: int, scenario: str) -> None:
    mp.spawn(worker, args=(str(tmp_path), size, scenario), nprocs=size)
    assert {f"finished-{rank}" for rank in range(size)} <= {path.name for path in tmp_path.iterdir()}


def test_one_rank(tmp_path):
    check_finished(tmp_path, 1, "one_rank")


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two GPUs or more, found {NUM_GPUS}")
def test_conformance_between_gpus(tmp_path):
    check_finished(tmp_path, min(NUM_GPUS, transport_suite.WORLD), "conformance")
