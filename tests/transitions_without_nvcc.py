"""Transitions on a GPU in an install whose ``reshard._C`` has no CUDA kernels; started by tests/gpu."""

import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp
from transport_suite import WORLD, Pair, check_case, row_layout, sample_cases

import reshard
from reshard import _C, PeerTransport
from reshard.arena import Arena

NUM_CASES = 6


def peer(rank: int, folder: str) -> None:
    torch.cuda.init()
    arena, count = Arena.cuda(0), iter(range(1000))

    def in_arena(name: str, num_bytes: int) -> torch.Tensor:
        return arena.allocate(f"{next(count)}.{name}", num_bytes).tensor(shape=(num_bytes,))

    def plain(name: str, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    shifted = Pair(row_layout(640, 50, WORLD), row_layout(640, 50, WORLD, first_row=80))
    transport = PeerTransport(arena, folder)
    for case in (shifted, *sample_cases(NUM_CASES)):
        for memory in (in_arena, plain):
            check_case(case, rank, transport, memory, "cuda")
    Path(folder, f"finished-{rank}").touch()


def local() -> None:
    source = {"a": torch.arange(3000.0 * 1001, device="cuda").view(3000, 1001), "b": torch.arange(5.0, device="cuda")}
    destination = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in source.items()}
    plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(destination))
    with reshard.Resharder(plan, source, destination) as resharder:
        for _ in range(2):
            source["a"].mul_(1.01)
            stats = resharder.run()
            assert all(torch.equal(destination[n], t.bfloat16()) for n, t in source.items())
            resharder.verify()
    assert (stats.kernels, stats.num_launches) == ("triton", 1), stats


if __name__ == "__main__":
    assert not _C.CUDA_KERNELS and "DeviceTable" not in vars(_C), "this is a build with CUDA kernels"
    local()
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        mp.spawn(peer, args=(folder,), nprocs=WORLD)
        assert len(list(Path(folder).glob("finished-*"))) == WORLD
    print("local, peer in an arena and by CUDA IPC: equal")
