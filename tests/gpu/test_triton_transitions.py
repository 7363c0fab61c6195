"""Transitions by Triton on a GPU: bit for bit what the CUDA kernels write, and in an install that has none of those."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
import transport_suite
from device_memory import DeviceMemory
from transport_suite import WORLD, Pair, bound, check_case, row_layout, sample_cases
from triton_transitions import replicas

import reshard
from reshard import _C, PeerTransport
from reshard.errors import VerifyError
from reshard.table import CopyEntry, make_table
from reshard.transports.runner import Launches

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]
needs_both = pytest.mark.skipif(not _C.CUDA_KERNELS, reason="needs a build with CUDA kernels (RESHARD_CUDA=on)")
NUM_CASES = 20
DTYPES = {"a": torch.bfloat16, "b": torch.float16, "c": torch.float32, "d": torch.bfloat16}


def sources() -> dict[str, torch.Tensor]:
    """Large and small tensors, one of them strided; NaNs, infinities and subnormals among the values."""
    generator = torch.Generator(device="cuda").manual_seed(3)
    bits = torch.randint(-(2**31), 2**31 - 1, (3000, 1001), generator=generator, device="cuda", dtype=torch.int32)
    return {
        "a": bits.view(torch.float32),
        "b": torch.linspace(-7e4, 7e4, 64 * 128, device="cuda").view(64, 128),
        "c": torch.arange(77.0, device="cuda"),
        "d": torch.arange(64.0 * 64, device="cuda").view(64, 64)[:, ::2],
    }


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    as_bytes = (
        (t.contiguous().view(torch.uint8), second[name].contiguous().view(torch.uint8)) for name, t in first.items()
    )
    return all(torch.equal(a, b) for a, b in as_bytes)


@needs_both
@pytest.mark.parametrize("graph", [False, None, True])
def test_local_transitions_equal_those_of_the_cuda_kernels(graph, monkeypatch):
    source, found = sources(), {}
    for kernels in ("cuda", "triton"):
        monkeypatch.setenv("RESHARD_KERNELS", kernels)
        found[kernels] = {n: torch.zeros(t.shape, dtype=DTYPES[n], device="cuda") for n, t in source.items()}
        plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(found[kernels]))
        with reshard.Resharder(plan, source, found[kernels], graph=graph) as resharder:
            for stream in (None, torch.cuda.Stream().cuda_stream):
                for tensor in found[kernels].values():
                    tensor.zero_()
                torch.cuda.synchronize()
                stats = resharder.run(stream=stream)
                assert resharder.verify() == sum(t.nbytes for t in found[kernels].values())
            assert stats.kernels == kernels and stats.staging_bytes > 0
            assert stats.num_launches == 1 if graph is not False else 1 <= stats.num_launches <= 8
    assert same_bits(found["cuda"], found["triton"])


@needs_both
def test_checksums_are_those_of_the_cuda_kernels(monkeypatch):
    from reshard.transports.kernels import checksums

    source = sources()
    targets = {n: torch.zeros(t.shape, dtype=DTYPES[n], device="cuda") for n, t in source.items()}
    table = make_table([CopyEntry.from_tensors(targets[n], t) for n, t in source.items()])
    for of_destination in (False, True):
        found = {}
        for kernels in ("cuda", "triton"):
            monkeypatch.setenv("RESHARD_KERNELS", kernels)
            found[kernels] = checksums(table, source["a"].device, of_destination=of_destination).tolist()
        assert found["cuda"] == found["triton"]


def test_a_flipped_bit_is_found_and_a_replayed_graph_follows_the_weights(monkeypatch):
    monkeypatch.setenv("RESHARD_KERNELS", "triton")
    source = {"a": torch.arange(500.0 * 300, device="cuda").view(500, 300), "b": torch.arange(7.0, device="cuda")}
    destination = {n: torch.zeros_like(t, dtype=torch.bfloat16) for n, t in source.items()}
    plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(destination))
    with reshard.Resharder(plan, source, destination) as resharder:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            source["a"].mul_(1.01)
            resharder.run()
        assert not destination["a"].any(), "binding and capturing move nothing"
        for _ in range(2):
            graph.replay()
            resharder.publish()
            assert all(torch.equal(destination[n], t.bfloat16()) for n, t in source.items())
            resharder.verify()
        destination["b"].view(torch.int16)[5] ^= 1
        with pytest.raises(VerifyError, match=r"b\[5\]"):
            resharder.verify()


@pytest.mark.parametrize("kernels", [pytest.param("cuda", marks=needs_both), "triton"])
def test_the_handle_zero_is_the_default_stream(kernels, monkeypatch):
    monkeypatch.setenv("RESHARD_KERNELS", kernels)
    source = {"a": torch.arange(4096.0 * 1024, device="cuda").view(4096, 1024)}
    destination = {"a": torch.zeros(4096, 1024, dtype=torch.bfloat16, device="cuda")}
    plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(destination))
    with reshard.Resharder(plan, source, destination) as resharder:
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        source["a"].mul_(2)
        with torch.cuda.stream(torch.cuda.Stream()):
            resharder.run(stream=0)
        assert torch.equal(destination["a"], source["a"].bfloat16())


@pytest.mark.parametrize(("graph", "num_launches"), [(False, 2), (None, 1), (True, 1)])
def test_fans_and_tables_that_build_on_each_other(graph, num_launches, monkeypatch):
    """One read for eight targets in another dtype, then a table that reads one of them."""
    monkeypatch.setenv("RESHARD_KERNELS", "triton")
    source, last = torch.zeros(1000, 256, device="cuda"), torch.zeros(1000, 256, device="cuda")
    targets = [torch.zeros(1000, 256, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
    tables = [make_table([CopyEntry.from_tensors(t, source) for t in targets])]
    tables.append(make_table([CopyEntry.from_tensors(last, targets[-1])]))
    assert tables[0]["num_followers"].max() == 7
    launches = Launches(tables, source.device, graph=graph)
    assert launches.kernels == "triton" and launches.num_launches == num_launches
    assert launches.device_bytes >= sum(table.nbytes for table in tables)
    for step in (1, 2):
        source.copy_(torch.arange(256_000.0, device="cuda").view(1000, 256) * step)
        torch.cuda.synchronize()
        launches.launch(torch.cuda.Stream().cuda_stream if step == 2 else None)
        launches.synchronize(10.0, what="copies")
        assert all(torch.equal(t, source.bfloat16()) for t in targets) and torch.equal(last, source.bfloat16().float())
    launches.close()


def plain(name: str, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def peer_conformance(rank: int, folder: str) -> None:
    """Random pairs of layouts, and every box to all ranks; in an arena's memory and in torch's own."""
    os.environ["RESHARD_KERNELS"] = "triton"
    memory = DeviceMemory()
    transport = PeerTransport(memory.arena, folder)
    cases = [*sample_cases(NUM_CASES), Pair(row_layout(640, 50, WORLD), replicas(640, 50))]
    for index, case in enumerate(cases):
        check_case(case, rank, transport, memory if index % 3 else plain, "cuda")


def peer_beside_cuda(rank: int, folder: str) -> None:
    """The same weights by both, to the same places: the same bytes."""
    memory, case, found = DeviceMemory(), Pair(row_layout(640, 50, WORLD), replicas(640, 50)), []
    transport = PeerTransport(memory.arena, folder)
    for kernels in ("cuda", "triton"):
        os.environ["RESHARD_KERNELS"] = kernels
        with bound(case, rank, transport, memory, "cuda") as (resharder, source, destination):
            for update in (1, 2):
                values = {"w": transport_suite.full_tensors(case.source, update)["w"] / 3}
                transport_suite.fill(source, case.source, rank, values)
                assert resharder.run(deadline_s=60).kernels == kernels
                resharder.verify()
            found.append({name: t.clone() for name, t in destination.items()})
    assert same_bits(*found)


def worker(rank: int, folder: str, scenario: str) -> None:
    globals()[scenario](rank, folder)
    Path(folder, f"finished-{rank}").touch()


@pytest.mark.parametrize("scenario", ["peer_conformance", pytest.param("peer_beside_cuda", marks=needs_both)])
def test_peer_on_one_gpu(scenario):
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        mp.spawn(worker, args=(folder, scenario), nprocs=WORLD)
        assert {f"finished-{rank}" for rank in range(WORLD)} <= {path.name for path in Path(folder).iterdir()}


def test_an_install_without_nvcc_runs_local_and_peer_transitions(tmp_path):
    """Built with RESHARD_CUDA=off: the arena and CUDA IPC come by the driver's API, the copies by Triton."""
    shutil.copytree(ROOT / "reshard", tmp_path / "reshard", ignore=shutil.ignore_patterns("_C*.so", "__pycache__"))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=os.environ | {"RESHARD_CUDA": "off"}, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests")])}
    environment.pop("RESHARD_KERNELS", None)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "transitions_without_nvcc.py")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "local, peer in an arena and by CUDA IPC: equal", done.stdout
