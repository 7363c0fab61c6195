"""How fast plans are made: the stated sizes, and growth with the number of ranks. One core, no device.

    python bench/plan_speed.py [--out docs/benchmarks/plan_speed.json] [--plot docs/benchmarks/plan_speed.png]

Each case runs in a process of its own, so that its peak resident memory is its own. Layouts are made before the clock
starts and their time is reported apart. CPU seconds count, not wall-clock: the machine may be shared.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from reshard import Layout, Mesh, ModelSpec, Plan, Rules, Topology, make_plan

LIMITS = {
    "8b on 8 ranks": (0.2, None),
    "70b on 128 ranks": (10.0, None),
    "deepseek-v3 on 1024 ranks, one rank": (1.0, 500),
}
Sides = tuple[Layout, Layout]


def dense(name: str, num_ranks: int, *, tp: int, gen_tp: int) -> Sides:
    """FSDP2 on tensor parallelism, into an engine with fused weights."""
    model = ModelSpec.load(name)
    train = Layout.from_parallel(model, Mesh({"dp": num_ranks // tp, "tp": tp}), rules=Rules(fsdp="dp"))
    return train, Layout.from_parallel(
        model, Mesh({"dp": num_ranks // gen_tp, "tp": gen_tp}), rules=Rules(style="vllm")
    )


def growing(num_ranks: int) -> Sides:
    """More and more replicas of tp=4 training and tp=2 generation: copies grow in proportion to ranks."""
    model = ModelSpec.load("llama3-8b")
    train = Layout.from_parallel(model, Mesh({"dp": num_ranks // 4, "tp": 4}), rules=Rules(style="megatron"))
    return train, Layout.from_parallel(model, Mesh({"dp": num_ranks // 2, "tp": 2}), rules=Rules(style="vllm"))


def deepseek(num_ranks: int) -> Sides:
    """Megatron pp16 tp8 ep64 into replicas of tp8, ep32; experts counted one by one."""
    model = ModelSpec.load("deepseek-v3")
    ep = min(num_ranks // 16, 64)
    train = Layout.from_parallel(
        model,
        Mesh({"pp": 16, "dp": num_ranks // 128, "tp": 8}),
        rules=Rules(style="megatron"),
        expert_mesh=Mesh({"pp": 16, "edp": num_ranks // 16 // ep, "ep": ep}),
    )
    generate = Layout.from_parallel(
        model,
        Mesh({"dp": num_ranks // 8, "tp": 8}),
        rules=Rules(style="vllm"),
        expert_mesh=Mesh({"dp": num_ranks // 32, "ep": 32}),
    )
    return train, generate


def whole(sides: Callable[[], Sides], num_ranks: int) -> tuple[Callable[[], Sides], Callable[[Sides], Plan]]:
    """The whole plan of two layouts."""
    return sides, lambda pair: make_plan(*pair, topology=Topology.regular(range(num_ranks)))


def one_rank(num_ranks: int) -> tuple[Callable[[], Sides], Callable[[Sides], Plan]]:
    """One rank's part of DeepSeek-V3's plan."""
    topology = Topology.regular(range(num_ranks))
    return lambda: deepseek(num_ranks), lambda pair: make_plan(*pair, topology=topology, ranks=[num_ranks // 2 + 3])


def cases() -> dict[str, tuple[Callable[[], Sides], Callable[[Sides], Plan]]]:
    """Every case by name: how to make its layouts, and its plan."""
    found = {
        "8b on 8 ranks": whole(lambda: dense("llama3-8b", 8, tp=2, gen_tp=4), 8),
        "70b on 128 ranks": whole(lambda: dense("llama3-70b", 128, tp=8, gen_tp=8), 128),
        "deepseek-v3 on 1024 ranks, one rank": one_rank(1024),
    }
    for num_ranks in (64, 128, 256, 512, 1024, 2048, 4096):
        found[f"growth: 8b on {num_ranks} ranks"] = whole(lambda n=num_ranks: growing(n), num_ranks)
    return found


def run_case(name: str) -> dict[str, object]:
    """Time one case in this process."""
    make_sides, make = cases()[name]
    began = time.process_time()
    sides = make_sides()
    layouts_s = time.process_time() - began
    make_plan(*dense("qwen3-0.6b", 4, tp=2, gen_tp=2))
    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times = []
    for _ in range(1 if name.startswith(("growth", "70b")) else 5):
        began = time.process_time()
        plan = make(sides)
        times.append(time.process_time() - began)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "case": name,
        "copies": plan.table.num,
        "layouts_s": round(layouts_s, 3),
        "plan_s": round(min(times), 4),
        "plan_s_all": [round(value, 4) for value in times],
        "peak_mib": round(peak_mib),
        "peak_mib_before": round(before_mib),
        "digest": plan.digest[:16],
    }


def environment() -> dict[str, object]:
    """What the numbers were taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"python": platform.python_version(), "numpy": np.__version__, "cpu": cpu, "cores": os.cpu_count()}


def plot(results: list[dict[str, object]], path: Path) -> None:
    """Seconds over copies, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grown = [row for row in results if str(row["case"]).startswith("growth")]
    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.loglog([row["copies"] for row in grown], [row["plan_s"] for row in grown], marker="o")
    for row in grown:
        axes.annotate(
            str(row["case"]).split()[-2], (row["copies"], row["plan_s"]), textcoords="offset points", xytext=(5, -10)
        )
    axes.set(
        xlabel="copies in the whole plan", ylabel="CPU seconds", title="Llama-3 8B, whole plan, by number of ranks"
    )
    axes.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Run all cases, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="run one case in this process and print its row")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run_case(arguments.case)))
        return
    results = []
    for name in (name for name in cases() if arguments.only in name):
        command = [sys.executable, __file__, "--case", name]
        output = subprocess.run(
            command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        row = json.loads(output.stdout)
        limit_s, limit_mib = LIMITS.get(name, (None, None))
        row |= {"limit_s": limit_s, "limit_mib": limit_mib}
        results.append(row)
        print(f"{name:40} {row['copies']:>9} copies {row['plan_s']:>9.3f} s {row['peak_mib']:>6} MiB", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
