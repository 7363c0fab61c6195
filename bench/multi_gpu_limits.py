"""What the machine can do at most: copies in one device, between two, and all-gathers among all, in this run.

On a host the same figures come from host memory and gloo, so that the code runs anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from bench.record import summary
from reshard import _C
from reshard.process_groups import Group
from reshard.table import CopyEntry, make_table

Figures = dict[str, dict[str, float]]
MIB = 1 << 20
GATHER_SIZES = tuple(MIB << power for power in range(0, 11, 2))


def measure(group: Group, *, copy_bytes: int, rounds: int, gather_sizes: Sequence[int] = GATHER_SIZES) -> Figures:
    """GB/s by name on every rank: copies of `copy_bytes`, all-gathers of `gather_sizes` bytes in all."""
    figures: Figures = {"device copy, read + write": _rate(2 * copy_bytes, _copy_on(group.device, copy_bytes), rounds)}
    on_gpus = group.device.type == "cuda"
    if len(group.ranks) > 1 and on_gpus and dist.get_rank() == 0:
        figures |= _peer_copies(copy_bytes, rounds)
    _everyone()
    if len(group.ranks) > 1 and not on_gpus:
        figures["message, both ways"] = _rate(copy_bytes, _messages(group, copy_bytes), rounds)
    for size in gather_sizes:
        part = size // len(group.ranks)
        moved = part * (len(group.ranks) - 1)
        figures[f"all-gather bus, {size // 1024} KiB"] = _rate(moved, _all_gather(group, part), rounds)
    return figures


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing on the host."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rate(num_bytes: int, run: Callable[[], None], rounds: int) -> dict[str, float]:
    """GB/s (1e9 bytes) by median time, after two warm-ups; `run` ends when its bytes are there."""
    seconds = []
    for i in range(rounds + 2):
        begin = time.perf_counter()
        run()
        if i >= 2:
            seconds.append(time.perf_counter() - begin)
    times = summary(seconds)
    return {"gb_per_s": num_bytes / times["median"] / 1e9, "seconds": times["median"], "bytes": num_bytes}


def _copy_on(device: torch.device, num_bytes: int) -> Callable[[], None]:
    source, destination = (_random(num_bytes, device) for _ in range(2))

    def run() -> None:
        destination.copy_(source)
        synchronize(device)

    return run


def _peer_copies(num_bytes: int, rounds: int) -> Figures:
    """Between the first two GPUs, driven by this process alone, by copy engine and by the copy table's kernel."""
    devices = [torch.device("cuda", i) for i in range(2)]
    sources = [_random(num_bytes, device) for device in devices]
    targets = [_random(num_bytes, device) for device in reversed(devices)]
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)  # opens peer access, which the kernel needs too
    figures: Figures = {}
    for name, threshold in (("copy engine", 1), ("kernel", 0)):
        tables = []
        for source, target in zip(sources, targets, strict=True):
            with torch.cuda.device(source.device):
                table = make_table([CopyEntry.from_tensors(target, source)])
                tables.append(_C.DeviceTable(table, copy_engine_min_bytes=threshold))
        figures[f"peer copy by {name}, one way"] = _rate(num_bytes, _launches(devices[:1], tables[:1]), rounds)
        figures[f"peer copy by {name}, each of both ways"] = _rate(num_bytes, _launches(devices, tables), rounds)
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(source.cpu(), target.cpu()), f"a peer copy by {name} was wrong"
            target.zero_()
    return figures


def _launches(devices: Sequence[torch.device], tables: Sequence[_C.DeviceTable]) -> Callable[[], None]:
    def run() -> None:
        for device, table in zip(devices, tables, strict=True):
            with torch.cuda.device(device):
                table.launch(torch.cuda.current_stream().cuda_stream)
        for device in devices:
            synchronize(device)

    return run


def _messages(group: Group, num_bytes: int) -> Callable[[], None]:
    """Every rank sends to the next and receives from the one before."""
    own = group.ranks.index(dist.get_rank())
    send, receive = (_random(num_bytes, group.device) for _ in range(2))
    peers = ((dist.isend, send, (own + 1) % len(group.ranks)), (dist.irecv, receive, (own - 1) % len(group.ranks)))
    operations = [dist.P2POp(op, tensor, group=group.handle, group_peer=peer) for op, tensor, peer in peers]

    def run() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run


def _all_gather(group: Group, part_bytes: int) -> Callable[[], None]:
    """In place, as the transport does it."""
    whole = _random(part_bytes * len(group.ranks), group.device)
    own = group.ranks.index(dist.get_rank()) * part_bytes

    def run() -> None:
        group.handle.allgather_into_tensor_coalesced([whole], [whole[own : own + part_bytes]]).wait()
        synchronize(group.device)

    return run


def _random(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)


def _everyone() -> None:
    dist.all_reduce(torch.zeros(1))
