"""How regular gathers should travel over gloo: as collectives, straight from destination to destination, or packed.

Each transition consists of regular gathers only (micro data-parallel groups). The ways are those of
`CollectiveTransport(gathers=...)`: all-gathers, in place or staged; messages, straight between destinations for large
parts and staged for the others; the same with all of them staged; and packed messages between pairs ("off"). Each is
checked, element by element and twice, before it is timed in turns.

    python -m bench.gather_ways                     # 4 processes, 0.5B shapes
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.record import save, summary
from bench.transition import Ways, Weights, check, timed
from reshard import CollectiveTransport, DType, Layout, Mesh, ModelSpec, Plan, Resharder, Rules, make_groups, make_plan
from reshard.arena import Arena
from reshard.plan_gather import gather_communicators
from reshard.process_groups import ProcessGroups
from reshard.transports import collective_drafts

TRANSITIONS = {
    "fsdp=4 to dp=4": ("fsdp=4", 1),
    "tp=4 to dp=2,tp=2": ("tp=4", 2),
    "tp=4 to dp=4": ("tp=4", 1),
}
ALL_STAGED = "messages, all staged"


def make(model: str, train: str, tp: int) -> Plan:
    """fp32 training shards to bf16 shards in vLLM's layout, zero redundancy."""
    mesh = Mesh.parse(train)
    source = Layout.from_parallel(ModelSpec.load(model, dtype=DType.FLOAT32), mesh, rules=Rules(fsdp=fsdp_axis(mesh)))
    groups = make_groups(Mesh({"pp": 1, "dp": 1, "tp": mesh.size}), tp=tp)
    engine = ModelSpec.load(model, dtype=DType.BFLOAT16)
    return make_plan(source, Layout.from_parallel(engine, groups.generate, rules=Rules(style="vllm")))


def fsdp_axis(mesh: Mesh) -> str | None:
    """The mesh's axis of that name, if it has one."""
    return "fsdp" if "fsdp" in mesh.axes else None


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank: every transition in every way."""
    torch.set_num_threads(1)
    minutes = datetime.timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4, timeout=minutes)
    results = {}
    for name, (train, tp) in TRANSITIONS.items():
        plan = make(args.model, train, tp)
        with ProcessGroups(gather_communicators(plan), backend="gloo", timeout_s=300) as groups:
            results[name] = measure(plan, rank, groups, args.rounds)
        if rank == 0:
            print(name, {way: f"{found['median'] * 1e3:.0f} ms" for way, found in results[name]["seconds"].items()})
            print("   ", results[name]["gathers"], flush=True)
    if rank == 0:
        print("written:", save("gather-ways-cpu", {"model": args.model, "transitions": results}, folder=args.out))
    dist.destroy_process_group()


def measure(plan: Plan, rank: int, groups: ProcessGroups, rounds: int) -> dict[str, dict[str, object]]:
    """Seconds of the slowest rank, and how many gathers of rank 0 travelled in which way."""
    weights = Weights(plan, rank, torch.device("cpu"), Arena.host())
    bound: dict[str, Resharder] = {}
    for name in ("all_gather", "messages", ALL_STAGED, "off"):
        threshold = 1 << 60 if name == ALL_STAGED else collective_drafts.MIN_DIRECT_BYTES
        with mock.patch.object(collective_drafts, "MIN_DIRECT_BYTES", threshold):
            transport = CollectiveTransport(groups, num_threads=1, gathers=name.split(",")[0])
            bound[name] = Resharder(plan, weights.source, weights.destination, rank=rank, transport=transport)
    ways: Ways = {name: resharder.run for name, resharder in bound.items()}
    check(ways, weights)
    seconds = timed(ways, rounds)
    gathers = {name: resharder._bound.num_gathers for name, resharder in bound.items()}
    for resharder in bound.values():
        resharder.close()
    return {
        "seconds": {name: {**summary(samples), "samples": samples} for name, samples in seconds.items()},
        "gathers": gathers,
        "received_bytes": {str(r): plan.received_bytes(r) for r in plan.scope},
    }


def main() -> None:
    """Parse the command line and start four processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        mp.spawn(worker, args=(args, folder), nprocs=4)


if __name__ == "__main__":
    main()
