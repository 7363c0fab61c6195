"""Plain tensors as destinations of the peer transport: other processes open PyTorch's own memory by CUDA IPC."""

import multiprocessing
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
import transport_suite
from transport_suite import NO_KERNELS, WORLD, Pair, bound, check_case, row_layout, sample_cases

from reshard import _C, PeerTransport
from reshard.arena import Arena, Channel, Listener
from reshard.arena.ipc import DeviceMemory, receive_memory, send_memory
from reshard.errors import StateError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(NO_KERNELS, reason="needs a build with CUDA kernels (RESHARD_CUDA=on), or Triton"),
]
NUM_CASES = 30
SHIFTED = Pair(row_layout(640, 50, WORLD), row_layout(640, 50, WORLD, first_row=80))


def plain(name: str, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def worker(rank: int, folder: str, scenario: str) -> None:
    torch.cuda.init()
    globals()[scenario](rank, folder)
    Path(folder, f"finished-{rank}").touch()


def conformance(rank: int, folder: str) -> None:
    transport = PeerTransport(Arena.cuda(0), folder)
    for index, case in enumerate(sample_cases(NUM_CASES)):
        try:
            check_case(case, rank, transport, plain, "cuda")
        except Exception as error:
            raise AssertionError(f"case {index}: {case}") from error
    assert _C.ipc_num_open() == 0


def many_binds(rank: int, folder: str) -> None:
    """Handles are closed with their transfer: neither descriptors nor open allocations grow."""
    transport = PeerTransport(Arena.cuda(0), folder)
    used = []
    for update in range(20):
        with bound(SHIFTED, rank, transport, plain, "cuda") as (resharder, source, destination):
            values = transport_suite.full_tensors(SHIFTED.source, update)
            transport_suite.fill(source, SHIFTED.source, rank, values)
            resharder.run(deadline_s=60)
            transport_suite.check_destination(resharder.plan, rank, destination, values)
        used.append((len(os.listdir("/proc/self/fd")), _C.ipc_num_open()))
    assert used[2] == used[-1], f"descriptors or open handles grew: {used}"
    assert used[-1][1] == 0


@pytest.mark.parametrize("scenario", ["conformance", "many_binds"])
def test_peer_into_plain_tensors(scenario):
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        mp.spawn(worker, args=(folder, scenario), nprocs=WORLD)
        assert {f"finished-{rank}" for rank in range(WORLD)} <= {path.name for path in Path(folder).iterdir()}


def owner(path: str) -> None:
    """Open two tensors of one segment and one of another; check what the importer wrote into them."""
    small = [torch.zeros(1000, device="cuda") for _ in range(2)]
    large = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    memories = [DeviceMemory.at(tensor.data_ptr()) for tensor in (*small, large)]
    assert memories[0] == memories[1] != memories[2]
    with Listener(path) as listener, listener.accept(timeout_s=60) as channel:
        shares = [send_memory(channel, memory, owner=small, timeout_s=60) for memory in memories]
        offsets = [t.data_ptr() - m.address for t, m in zip((*small, large), memories, strict=True)]
        channel.send("offsets", {"offsets": offsets}, timeout_s=60)
        channel.receive("written", timeout_s=60)
        assert [float(tensor.sum()) for tensor in small] == [499500.0, 499500.0]
        assert bool((large == 7).all())
        for share in shares:
            share.end()


def importer(path: str) -> None:
    torch.cuda.init()
    with Channel.connect(path, timeout_s=60) as channel:
        imports = [receive_memory(channel, device=0, timeout_s=60) for _ in range(3)]
        assert _C.ipc_num_open() == 2, "one segment was opened twice"
        assert imports[0].address == imports[1].address
        offsets, _ = channel.receive("offsets", timeout_s=60)
        first, second, large = offsets["offsets"]
        views = [imports[i].tensor(torch.float32, (1000,), offset_bytes=at) for i, at in enumerate((first, second))]
        for view in views:
            view.copy_(torch.arange(1000))
        imports[2].tensor(offset_bytes=large)[: 64 << 20].fill_(7)
        with pytest.raises(StateError, match="still has 1 views"):
            imports[0].close()
        torch.cuda.synchronize()
        del view, views
        for one in imports:
            one.close()
            assert not one.is_open
        with pytest.raises(StateError, match="the imported memory is closed"):
            imports[0].tensor()
        assert _C.ipc_num_open() == 0
        channel.send("written", {}, timeout_s=60)


def test_an_allocation_is_opened_once_and_written_in_place():
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        processes = [context.Process(target=target, args=(f"{folder}/s",)) for target in (owner, importer)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0, 0]


def expandable() -> None:
    tensor = torch.zeros(1000, device="cuda")
    with pytest.raises(StateError, match=r"has no CUDA IPC handle.*expandable_segments:True.*turn that option off"):
        DeviceMemory.at(tensor.data_ptr())


def test_memory_without_handles_is_refused(monkeypatch):
    with pytest.raises(StateError, match=r"is not device memory.*Arena.host"):
        DeviceMemory.at(torch.zeros(4).data_ptr())
    with pytest.raises(StateError, match=r"is not device memory.*Arena.host"):
        DeviceMemory.at(torch.zeros(4, pin_memory=True).data_ptr())
    region = Arena.cuda(0).allocate("w", 1 << 20)
    with pytest.raises(StateError, match=r"has no CUDA IPC handle.*allocate it from an arena"):
        DeviceMemory.at(region.address)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    process = multiprocessing.get_context("spawn").Process(target=expandable)
    process.start()
    process.join(120)
    assert process.exitcode == 0
