"""One transition of a whole model between processes, by every transport, beside what users do today.

Training holds fp32 shards (FSDP rows over all ranks, or rows times tensor parallel), generation holds bf16 in
vLLM's fused layout.
Weights are labelled by tensor and index; every way is checked, element by element, before it is timed, and again with
other labels. Baselines (on the host, over gloo): ``full_tensor``, each DTensor gathered whole and the rank's part
copied, and ``redistribute``, each DTensor moved to the generating placement and copied.

    python -m bench.transition                                  # CPU, 4 processes, 0.5B shapes
    python -m bench.transition --device cuda --model qwen2.5-7b --train fsdp=2,tp=2 --gen dp=2,tp=2
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bench.record import save, summary
from reshard import CollectiveTransport, DType, Layout, Mesh, PeerTransport, Plan, Resharder, make_plan
from reshard.arena import Arena
from reshard.layout import Holding
from reshard.parallel_layout import Rules
from reshard.region import Region
from reshard.spec import ModelSpec
from reshard.verify import box_view

Ways = dict[str, Callable[[], object]]
COLUMN_CUT = ("o_proj.weight", "down_proj.weight")


class Weights:
    """One rank's live memory on both sides, as the two Layouts say."""

    def __init__(self, plan: Plan, rank: int, device: torch.device, arena: Arena) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        self.source = self._storages(
            plan.source, lambda name, size: torch.empty(size, dtype=torch.uint8, device=device)
        )
        self.destination = self._storages(
            plan.destination, lambda name, size: arena.allocate(name, size).tensor(shape=(size,))
        )

    def _storages(self, layout: Layout, allocate: Callable[[str, int], torch.Tensor]) -> dict[str, torch.Tensor]:
        ends: dict[str, int] = {}
        for h in layout.holdings(self.rank):
            span = 1 + sum((n - 1) * s for n, s in zip(h.region.shape, h.address.strides, strict=True))
            end = h.address.offset_bytes + span * h.address.dtype.itemsize
            ends[h.address.storage] = max(ends.get(h.address.storage, 0), end)
        return {name: allocate(name, size) for name, size in ends.items()}

    def label(self, step: int) -> None:
        """Write labels of `step` into the source and zero the destination."""
        for h in self._filled(self.plan.source):
            box_view(self.source[h.address.storage], h.address, h.region.shape).copy_(self._labels(h.region, step))
        for tensor in self.destination.values():
            tensor.zero_()

    def check(self, step: int) -> None:
        """Every element of the destination is its label, rounded to the destination's type."""
        for h in self._filled(self.plan.destination):
            found = box_view(self.destination[h.address.storage], h.address, h.region.shape)
            expected = self._labels(h.region, step).to(found.dtype)
            assert torch.equal(found, expected), f"rank {self.rank}: {h.region} differs"

    def _filled(self, layout: Layout) -> Iterator[Holding]:
        return (h for h in layout.holdings(self.rank) if not h.region.is_empty)

    def _labels(self, region: Region, step: int) -> torch.Tensor:
        index = torch.zeros((), dtype=torch.int32, device=self.device)
        shape = self.plan.source.specs[region.name].shape
        for dim, (start, stop) in enumerate(zip(region.start, region.stop, strict=True)):
            steps = torch.arange(start, stop, dtype=torch.int32, device=self.device)
            index = index * (shape[dim] % 4093) + steps.reshape([-1 if d == dim else 1 for d in range(len(shape))])
        return (index + zlib.crc32(region.name.encode()) % 1009 + 31 * step).remainder(4093).float() * 0.013 - 20


class Baselines:
    """What trainers do today: DTensors over gloo, gathered or redistributed one by one, then copied."""

    def __init__(self, weights: Weights, train: Mesh, gen: Mesh) -> None:
        self._weights = weights
        self._tp = gen.axis_size("tp")
        world = DeviceMesh("cpu", list(range(train.size)))
        self._grid: DeviceMesh = init_device_mesh("cpu", (train.size // self._tp, self._tp))
        local = {h.region.name: h for h in weights.plan.source.holdings(weights.rank)}
        self._flat: dict[str, DTensor] = {}
        self._square: dict[str, DTensor] = {}
        for name, spec in weights.plan.source.specs.items():
            h = local.get(name)
            part = torch.empty((0, *spec.shape[1:]))
            if h is not None:
                part = box_view(weights.source[h.address.storage], h.address, h.region.shape)
            strides = torch.empty(spec.shape, device="meta").stride()
            for mesh, found in ((world, self._flat), (self._grid, self._square)):
                placements = [Shard(0)] * mesh.ndim
                found[name] = DTensor.from_local(
                    part, mesh, placements, run_check=False, shape=torch.Size(spec.shape), stride=strides
                )
        self._targets: dict[str, list[Holding]] = {}
        for h in weights.plan.destination.holdings(weights.rank):
            self._targets.setdefault(h.region.name, []).append(h)

    def full_tensor(self) -> None:
        """Gather each tensor whole on every rank; copy this rank's boxes of it."""
        for name, dtensor in self._flat.items():
            whole = dtensor.full_tensor()
            for h in self._targets.get(name, ()):
                box = tuple(slice(a, b) for a, b in zip(h.region.start, h.region.stop, strict=True))
                self._view(h).copy_(whole[box])

    def redistribute(self) -> None:
        """Move each tensor to the placement that generation needs; copy the local shard."""
        for name, dtensor in self._square.items():
            holdings = self._targets.get(name, ())
            cut = next(
                (d for h in holdings for d in range(len(h.region.shape)) if h.region.shape[d] < dtensor.shape[d]), None
            )
            place = Replicate() if cut is None else Shard(1 if name.endswith(COLUMN_CUT) else 0)
            shard = dtensor.redistribute(self._grid, [Replicate(), place]).to_local()
            for h in holdings:
                self._view(h).copy_(shard)

    def _view(self, h: Holding) -> torch.Tensor:
        return box_view(self._weights.destination[h.address.storage], h.address, h.region.shape)


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank: bind every way, check it twice, time the ways in turn."""
    torch.set_num_threads(1)
    train, gen = Mesh.parse(args.train), Mesh.parse(args.gen)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=train.size,
        timeout=datetime.timedelta(minutes=5),
    )
    device = torch.device(args.device)
    source = Layout.from_parallel(
        ModelSpec.load(args.model, dtype=DType.FLOAT32), train, rules=Rules(style="plain", fsdp="fsdp")
    )
    destination = Layout.from_parallel(ModelSpec.load(args.model, dtype=DType.BFLOAT16), gen, rules=Rules(style="vllm"))
    plan = make_plan(source, destination)
    arena = Arena.cuda(0) if device.type == "cuda" else Arena.host()
    weights = Weights(plan, rank, device, arena)
    with resharders(plan, rank, weights, arena, folder) as bound:
        ways: Ways = {name: resharder.run for name, resharder in bound.items()}
        if device.type == "cpu" and "tp" not in train.axes:
            baselines = Baselines(weights, train, gen)
            ways |= {"full_tensor + copy": baselines.full_tensor, "redistribute + copy": baselines.redistribute}
        check(ways, weights)
        if device.type == "cuda":
            ways["plain copies, a source read for each receiver"] = plain_copies(plan, rank, read_once=False)
            ways["plain copies, a source read once"] = plain_copies(plan, rank, read_once=True)
        seconds = timed(ways, args.rounds)
        if rank == 0:
            stats = {name: r.stats for name, r in bound.items()}
            report(args, plan, seconds, {name: s.staging_bytes for name, s in stats.items()})
            print("  launches a rank:", {name: s.num_launches for name, s in stats.items()})
    dist.destroy_process_group()


def plain_copies(plan: Plan, rank: int, *, read_once: bool) -> Callable[[], None]:
    """The memory's floor: device copies, by all ranks at once, that read and write as many bytes as the rank's
    pushes do, where every receiver's copy reads its source or where equal sources are read once.
    """
    sent = [c for c in plan.copies_of(rank) if c.src_rank == rank]
    sources = {(c.region, c.src, c.hop): c.read_bytes for c in sent}
    num_read = sum(sources.values()) if read_once else sum(c.read_bytes for c in sent)
    num_bytes = num_read + sum(c.written_bytes for c in sent)
    half = 1 << 30
    source, destination = (torch.randint(0, 255, (half,), dtype=torch.uint8, device="cuda") for _ in range(2))

    def run() -> None:
        left = num_bytes // 2
        while left > 0:
            destination[:left].copy_(source[:left])
            left -= half
        torch.cuda.synchronize()

    return run


@contextmanager
def resharders(plan: Plan, rank: int, weights: Weights, arena: Arena, folder: str) -> Iterator[dict[str, Resharder]]:
    """One Resharder a transport, closed at the end."""
    transports: dict[str, Any] = {"peer": PeerTransport(arena, f"{folder}/peer", num_threads=1)}
    if weights.device.type == "cpu":
        transports["collective (gloo)"] = CollectiveTransport(dist.group.WORLD, num_threads=1)
    found = {
        name: Resharder(plan, weights.source, weights.destination, rank=rank, transport=transport)
        for name, transport in transports.items()
    }
    yield found
    for resharder in found.values():
        resharder.close()


def check(ways: Ways, weights: Weights) -> None:
    """Two updates by each way, each with labels of its own."""
    step = 0
    for name, way in ways.items():
        for _ in range(2):
            step += 1
            weights.label(step)
            dist.barrier()
            way()
            try:
                weights.check(step)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            dist.barrier()


def timed(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank, the ways in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            way()
            took = torch.tensor([time.perf_counter() - begin])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[name].append(took.item())
    return seconds


def report(args: argparse.Namespace, plan: Plan, seconds: dict[str, list[float]], staging: dict[str, int]) -> None:
    """Print the table and write the result file."""
    received = [plan.received_bytes(rank) for rank in plan.scope]
    print(f"{args.model}, {args.train} fp32 -> {args.gen} bf16 on {args.device}: {len(plan.copies)} copies, "
          f"received {max(received) / 2**20:.1f} MiB by the busiest rank")  # fmt: skip
    slowest = {name: summary(samples)["median"] for name, samples in seconds.items()}
    for name, median in slowest.items():
        extra = f", staging {staging[name] / 2**20:.1f} MiB" if name in staging else ""
        print(f"  {name:24s} {median * 1e3:9.1f} ms   peer is {median / slowest['peer']:6.2f}x faster{extra}")
    result = {
        "model": args.model,
        "train": args.train,
        "gen": args.gen,
        "device": args.device,
        "received_bytes": received,
        "floor_bytes": [plan.certificate.floor_bytes(rank) for rank in plan.scope],
        "staging_bytes": staging,
        "seconds": {name: {**summary(samples), "samples": samples} for name, samples in seconds.items()},
    }
    kind = f"transition-{args.device}-{args.model}-{args.train}-{args.gen}".replace("=", "").replace(",", "-")
    print("written:", save(kind, result, folder=args.out))


def main() -> None:
    """Parse the command line and start one process a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--train", default="fsdp=4")
    parser.add_argument("--gen", default="dp=2,tp=2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    train, gen = Mesh.parse(args.train), Mesh.parse(args.gen)
    if train.size != gen.size:
        parser.error(f"--train {args.train} has {train.size} ranks, --gen {args.gen} has {gen.size}: make them equal")
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        mp.spawn(worker, args=(args, folder), nprocs=train.size)


if __name__ == "__main__":
    main()
