"""Transitions between several GPUs, one process each: limits of the machine, checks, then times beside what users do.

In one run: process groups made, warmed up and taken down; copies and all-gathers as fast as this machine does them; the
transports' conformance suite and many transitions; then whole models, from tensor-parallel and FSDP shards in bf16 and
fp32 to vLLM's bf16 layout, in zero-redundancy and plain grouping and gathered whole. Every way is checked, element by
element and twice, before it is timed. Results are written after every step, so that a run that is cut short leaves what
it had. Without GPUs the same code runs over gloo on small shapes.

    torchrun --nproc-per-node 2 -m bench.multi_gpu
    python -m bench.multi_gpu --processes 2 --device cpu --models tiny
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.multi_gpu_baselines import Baselines
from bench.multi_gpu_checks import conformance, many_transitions
from bench.multi_gpu_limits import GATHER_SIZES, measure, synchronize
from bench.multi_gpu_plans import scenarios
from bench.record import save, summary
from bench.transition import Weights, check
from reshard import CollectiveTransport, DType, Mesh, PeerTransport, Plan, Resharder, make_groups
from reshard.arena import Arena
from reshard.plan_gather import gather_communicators
from reshard.process_groups import ProcessGroups

MAX_EXTRA_BYTES = 64 << 20


class Run:
    """One rank of one run: its device, its groups, and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank, self.size = args, dist.get_rank(), dist.get_world_size()
        on_gpus = args.device == "cuda"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
        self.backend = "nccl" if on_gpus else "gloo"
        self.results: dict[str, Any] = {"ranks": self.size, "device": args.device}
        folder = [tempfile.mkdtemp(prefix="reshard") if self.rank == 0 else ""]
        dist.broadcast_object_list(folder, src=0, device=torch.device("cpu"))
        self.folder = Path(folder[0])
        self._num_folders = 0

    def new_folder(self) -> Path:
        """A folder that no earlier step has used, the same on every rank."""
        self._num_folders += 1
        path = self.folder / str(self._num_folders)
        path.mkdir(exist_ok=True)
        return path

    def say(self, *words: object) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(*words, flush=True)

    def keep(self, name: str, result: object) -> None:
        """Add to the results and write them all."""
        self.results[name] = result
        if self.rank == 0:
            save(f"multi-gpu-{self.args.device}-{self.size}", self.results, folder=self.args.out)

    def arena(self) -> Arena:
        """A new arena of this rank's memory."""
        return Arena.cuda(self.device.index) if self.device.type == "cuda" else Arena.host()


def time_groups(run: Run) -> None:
    """Training's, generation's and micro-DP groups: made and warmed up, and taken down, three times."""
    communicators = make_groups(Mesh({"pp": 1, "dp": 1, "tp": run.size}), tp=max(run.size // 2, 1)).communicators()
    seconds: dict[str, list[float]] = {"make and warm up": [], "take down": []}
    for _ in range(3):
        begin = time.perf_counter()
        groups = ProcessGroups(communicators, backend=run.backend, device=run.device)
        made = time.perf_counter()
        groups.close()
        seconds["make and warm up"].append(made - begin)
        seconds["take down"].append(time.perf_counter() - made)
    run.say("groups:", {name: f"{summary(s)['median']:.3f} s" for name, s in seconds.items()})
    run.keep("groups", {name: summary(samples) for name, samples in seconds.items()})


def run_limits(run: Run) -> None:
    """See `bench.multi_gpu_limits`."""
    with ProcessGroups(backend=run.backend, device=run.device) as groups:
        sizes = [size for size in GATHER_SIZES if size <= run.args.copy_mib << 20]
        found = measure(groups.world, copy_bytes=run.args.copy_mib << 20, rounds=run.args.rounds, gather_sizes=sizes)
    for name, figures in found.items():
        run.say(f"  {name:42s} {figures['gb_per_s']:9.1f} GB/s")
    run.keep("limits", found)


def run_checks(run: Run) -> None:
    """See `bench.multi_gpu_checks`."""
    for name in ("peer", "collective"):
        begin = time.perf_counter()
        num = conformance(name, run.rank, run.size, run.device, run.new_folder(), num_cases=run.args.cases)
        growth = many_transitions(name, run.rank, run.size, run.device, run.new_folder(), num=run.args.transitions)
        run.say(f"{name}: {num} cases and {run.args.transitions} transitions right, "
                f"{time.perf_counter() - begin:.0f} s, memory grew by {growth} bytes")  # fmt: skip
        run.keep(f"checks of {name}", {"cases": num, "transitions": run.args.transitions, "growth_bytes": growth})


def run_transitions(run: Run) -> None:
    """Every scenario of every model by every way."""
    seen: dict[str, str] = {}
    dtypes = [DType.parse(name) for name in run.args.dtypes.split(",")]
    for model in run.args.models.split(","):
        for name, plan in scenarios(model, run.size, dtypes):
            if plan.digest in seen:
                run.say(f"{name}: the same Plan as {seen[plan.digest]}")
                run.keep(name, {"same_as": seen[plan.digest]})
                continue
            seen[plan.digest] = name
            found = transition(run, plan)
            show(run, name, found)
            run.keep(name, found)


def show(run: Run, name: str, found: dict[str, Any]) -> None:
    """One scenario as a table; adds each way's share of what the machine could do, where that was measured."""
    limits = run.results.get("limits", {})
    run.say(f"{name}: {max(found['received_bytes']) / 1e9:.3f} GB received by the busiest rank")
    for way, figures in found["ways"].items():
        possible = [limit["gb_per_s"] for key, limit in limits.items() if way_limit(way) in key]
        if any(possible):
            figures["share_of_limit"] = figures["received_gb_per_s"] / max(possible)
        share = f"{figures['share_of_limit']:6.1%}" if any(possible) else "     -"
        run.say(
            f"  {way:32s} {figures['median'] * 1e3:9.2f} ms {figures['received_gb_per_s']:8.2f} GB/s {share} of limit,"
            f" extra {figures['extra_bytes'] / 2**20:8.1f} MiB, launches {figures.get('num_launches', '-')}"
        )


def way_limit(way: str) -> str:
    """Which of the limits a way is held against: copies both ways at once for those that push or pull, else gathers."""
    return "each of both ways" if way in ("peer", "flattened buckets over IPC") else "all-gather bus"


def transition(run: Run, plan: Plan) -> dict[str, Any]:
    """One Plan in memory of its own; figures by way."""
    arena = run.arena()
    figures = measure_ways(run, plan, arena)
    gc.collect()
    arena.close()
    return {
        "received_bytes": [plan.received_bytes(rank) for rank in plan.scope],
        "floor_bytes": [plan.certificate.floor_bytes(rank) for rank in plan.scope],
        "ways": figures,
    }


def measure_ways(run: Run, plan: Plan, arena: Arena) -> dict[str, dict[str, Any]]:
    """Bind, check and time every way."""
    weights = Weights(plan, run.rank, run.device, arena)
    with ProcessGroups(gather_communicators(plan), backend=run.backend, device=run.device) as groups:
        transports: dict[str, Any] = {
            "peer": PeerTransport(arena, run.new_folder()),
            "collective": CollectiveTransport(groups, staging_bytes=MAX_EXTRA_BYTES * 15 // 16),
        }
        bound = {
            name: Resharder(plan, weights.source, weights.destination, rank=run.rank, transport=transport)
            for name, transport in transports.items()
        }
        baselines = Baselines(weights, groups.world, run.new_folder())
        ways = {name: resharder.run for name, resharder in bound.items()} | baselines.ways()
        check(ways, weights)
        figures = timed(run, plan, ways)
        for name, resharder in bound.items():
            stats = resharder.stats
            figures[name] |= {"num_launches": stats.num_launches, "num_copies": stats.num_copies}
            figures[name]["extra_bytes"] += stats.staging_bytes
            resharder.close()
        for name, num_bytes in baselines.held_bytes.items():
            figures[name]["extra_bytes"] += num_bytes
        baselines.close()
    return figures


def timed(run: Run, plan: Plan, ways: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Seconds of the slowest rank, the ways in turn, and the most device memory that one allocates while it runs."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    extra: dict[str, int] = dict.fromkeys(ways, 0)
    for _ in range(run.args.rounds):
        for name, way in ways.items():
            synchronize(run.device)
            dist.all_reduce(torch.zeros(1))
            before = peak_bytes(run.device)
            begin = time.perf_counter()
            way()
            synchronize(run.device)
            took = torch.tensor([time.perf_counter() - begin, float(peak_bytes(run.device, reset=False) - before)])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[name].append(took[0].item())
            extra[name] = max(extra[name], int(took[1].item()))
    received = max(plan.received_bytes(rank) for rank in plan.scope)
    return {
        name: {
            **summary(samples),
            "samples": samples,
            "extra_bytes": extra[name],
            "received_gb_per_s": received / summary(samples)["median"] / 1e9,
        }
        for name, samples in seconds.items()
    }


def peak_bytes(device: torch.device, *, reset: bool = True) -> int:
    """Peak of torch's allocations on a GPU, counted from now on where `reset`; 0 on the host."""
    if device.type != "cuda":
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)


STEPS = {"groups": time_groups, "limits": run_limits, "checks": run_checks, "transitions": run_transitions}


def work(rank: int | None, args: argparse.Namespace, store: str) -> None:
    """One process: as torchrun started it, or as number `rank` of those that this script started."""
    if rank is not None:
        os.environ["LOCAL_RANK"] = str(rank)
    where = {} if rank is None else {"init_method": f"file://{store}", "rank": rank, "world_size": args.processes}
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=10), **where)
    run = Run(args)
    for step in args.steps.split(","):
        STEPS[step](run)
    run.say("done")
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line; join torchrun's processes, or start some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, help="start so many here; left out: torchrun has, or one a GPU")
    parser.add_argument("--models", default="qwen3-4b,qwen3-8b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of training's weights")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--transitions", type=int, default=1000)
    parser.add_argument("--copy-mib", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    unknown = sorted(set(args.steps.split(",")) - set(STEPS))
    if unknown:
        parser.error(f"no steps {unknown}: choose among {', '.join(STEPS)}")
    if "LOCAL_RANK" in os.environ and args.processes is None:
        work(None, args, "")
        return
    args.processes = args.processes or max(torch.cuda.device_count(), 1)
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        mp.spawn(work, args=(args, f"{folder}/store"), nprocs=args.processes)


if __name__ == "__main__":
    main()
