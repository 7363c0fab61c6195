"""The table-driven copy beside torch's own copies, and beside the memory's floor measured in the same run.

On a GPU: 7B shapes, fp32 to bf16 into fused destinations and bf16 to bf16, by the CUDA kernel (and its options with
``--sweep``), a captured graph, Triton, and torch tensor by tensor. On a CPU: fp32 to bf16 of smaller models by the host
executor and by torch. Results are checked before they are timed. ``python -m bench.copy_kernel --help``.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.copy_shapes import MODELS, Weights, make_weights
from bench.record import interleaved, save, summary
from reshard import _C
from reshard.table import CopyEntry, CopyTable, make_table, num_read_bytes, num_written_bytes

Ways = dict[str, Callable[[], object]]

SWEEP: list[dict[str, int | bool]] = [
    {"tile_vectors": 256 * in_flight * steps, "vectors_in_flight": in_flight, "wide_casts": wide}
    for in_flight in (1, 2, 4)
    for steps in (1, 2)
    for wide in (False, True)
]
SWEEP.append({"tile_vectors": 1024, "vectors_in_flight": 4, "blocks_per_sm": 2})
NO_COPY_ENGINE = 0
FAN_LAYERS = 7
COPY_ENGINE_BYTES = (NO_COPY_ENGINE, 1 << 20, 8 << 20, 32 << 20, 128 << 20)


def main() -> None:
    """Parse the command line, run, print a table and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=tuple(MODELS), help="default: 7B on a GPU, 135M and 0.5B on a CPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="host threads, 0 for all")
    parser.add_argument("--sweep", action="store_true", help="also time the kernel's options")
    parser.add_argument("--output", type=Path, help="folder of the result file, default build/bench")
    args = parser.parse_args()
    if args.device == "cuda":
        results = [
            run_device(args.model or "7B", source, args.rounds, sweep=args.sweep)
            for source in (torch.float32, torch.bfloat16)
        ]
        results += [run_fans(args.model or "7B", torch.float32, num, args.rounds) for num in (2, 4, 8)]
        results += [run_fans(args.model or "7B", torch.bfloat16, 2, args.rounds)]
    else:
        results = [
            run_host(name, args.rounds, args.threads) for name in ([args.model] if args.model else ["135M", "0.5B"])
        ]
    print("written:", save(f"copy-kernel-{args.device}", {"results": results}, folder=args.output))


def table_of(weights: Weights) -> CopyTable:
    """The copy table of all sources into their views."""
    return make_table(map(CopyEntry.from_tensors, weights.views, weights.sources))


def check_all(ways: Ways, weights: Weights) -> None:
    """Run every way once on labels of its own and compare all destinations."""
    for step, (name, way) in enumerate(ways.items()):
        weights.relabel(step)
        for view in weights.views:
            view.zero_()
        way()
        if weights.sources[0].is_cuda:
            torch.cuda.synchronize()
        weights.check()
        print(f"  checked: {name}")


def copy_each(weights: Weights) -> None:
    """Torch's copy, tensor by tensor."""
    for view, source in zip(weights.views, weights.sources, strict=True):
        view.copy_(source)


# On a device


def run_device(model: str, source: torch.dtype, rounds: int, *, sweep: bool) -> dict[str, Any]:
    """Time all ways to move ``model``'s weights on the current GPU."""
    weights = make_weights(model, source=source, destination=torch.bfloat16, device="cuda")
    table = table_of(weights)
    num_bytes = num_read_bytes(table) + num_written_bytes(table)
    print(f"{model} {source} -> torch.bfloat16: {len(table)} copies, {num_bytes / 1e9:.2f} GB read and written")
    ways = device_ways(weights, table, sweep=sweep)
    check_all(ways, weights)
    seconds = device_seconds(ways, rounds)
    floors = floor_seconds(source, num_bytes, rounds)
    floor = summary(floors["plain copy of as many bytes"])["median"]
    rows = report(seconds | floors, num_bytes, floor)
    return {"model": model, "source": str(source), "bytes": num_bytes, "num_copies": len(table), "ways": rows}


def device_ways(weights: Weights, table: CopyTable, *, sweep: bool) -> Ways:
    """Every way to run ``table``, each queueing on the current stream."""
    ways: Ways = {"reshard kernel": launcher(_C.DeviceTable(table))}
    ways["reshard kernel in a graph"] = replayer(launcher(_C.DeviceTable(table)))
    options: list[dict[str, int | bool]] = SWEEP if sweep else []
    if weights.sources[0].dtype == torch.bfloat16:
        options = [option for option in options if not option.get("wide_casts")]
        ways |= {
            f"copy engine from {size >> 20} MiB" if size else "no copy engine": launcher(
                _C.DeviceTable(table, copy_engine_min_bytes=size)
            )
            for size in COPY_ENGINE_BYTES
        }
    for option in options:
        name = " ".join(f"{key}={int(value)}" for key, value in option.items())
        ways[name] = launcher(_C.DeviceTable(table, copy_engine_min_bytes=NO_COPY_ENGINE, **option))
    if importlib.util.find_spec("triton"):
        from reshard.triton_copy import TritonTable

        ways["Triton"] = TritonTable(table, device="cuda").launch
    ways["torch copy_ per tensor"] = lambda: copy_each(weights)
    ways["torch _foreach_copy_"] = lambda: torch._foreach_copy_(weights.views, weights.sources)
    return ways


def run_fans(model: str, source: torch.dtype, num_targets: int, rounds: int) -> dict[str, Any]:
    """Time one read for ``num_targets`` destinations beside a read for each of them, some of ``model``'s layers."""
    weights = make_weights(model, source=source, destination=torch.bfloat16, device="cuda", num_layers=FAN_LAYERS)
    more = [[torch.zeros_like(view) for view in weights.views] for _ in range(num_targets - 1)]
    entries = [
        CopyEntry.from_tensors(view, src)
        for views in (weights.views, *more)
        for view, src in zip(views, weights.sources, strict=True)
    ]
    fanned, single = make_table(entries), make_table(entries, max_targets=1)
    num_bytes = num_read_bytes(fanned) + num_written_bytes(fanned)
    print(f"{model}, {FAN_LAYERS} layers, {source} -> {num_targets} x torch.bfloat16: {num_bytes / 1e9:.2f} GB moved")
    ways = {
        "one read for all": launcher(_C.DeviceTable(fanned)),
        "a read for each": launcher(_C.DeviceTable(single, copy_engine_min_bytes=NO_COPY_ENGINE)),
    }
    check_all(ways, weights)
    for views in more:
        Weights(weights.sources, views).check()
    seconds = device_seconds(ways, rounds) | floor_seconds(torch.bfloat16, num_bytes, rounds)
    rows = report(seconds, num_bytes, summary(seconds["plain copy of as many bytes"])["median"])
    return {"model": model, "source": str(source), "num_targets": num_targets, "bytes": num_bytes, "ways": rows}


def launcher(table: _C.DeviceTable) -> Callable[[], None]:
    """A function that queues ``table`` on the stream that is current when it is called."""
    return lambda: table.launch(torch.cuda.current_stream().cuda_stream)


def replayer(captured: Callable[[], None]) -> Callable[[], None]:
    """A function that replays what ``captured`` queues, and keeps its table, whose memory the graph reads, alive."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured()

    def replay(*, alive: Callable[[], None] = captured) -> None:
        graph.replay()

    return replay


def floor_seconds(source: torch.dtype, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Plain device copies that move ``num_bytes`` read and written: what the memory gives in this run.

    One large buffer by torch's copy_ (cudaMemcpyAsync for equal types), and for a cast also torch's own on one flat
    tensor of as many elements.
    """
    half = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(half)
    ways: Ways = {"plain copy of as many bytes": lambda: other.copy_(half)}
    if source != torch.bfloat16:
        numel = num_bytes // 6
        flat = half[: numel * 2].view(torch.bfloat16)
        wide = torch.empty(numel, dtype=source, device="cuda")
        ways["torch copy_ of one flat tensor, cast"] = lambda: flat.copy_(wide)
    return device_seconds(ways, rounds)


def device_seconds(ways: Ways, rounds: int, *, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds of each way by CUDA events around it on an idle device, the ways in turn within each round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(warmup + rounds):
        for name, way in ways.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            way()
            end.record()
            torch.cuda.synchronize()
            if i >= warmup:
                seconds[name].append(begin.elapsed_time(end) / 1e3)
    return seconds


# On the host


def run_host(model: str, rounds: int, num_threads: int) -> dict[str, Any]:
    """Time the host executor and torch's copies, one after the other in each round."""
    weights = make_weights(model, source=torch.float32, destination=torch.bfloat16, device="cpu")
    table = table_of(weights)
    num_bytes = num_read_bytes(table) + num_written_bytes(table)
    print(f"{model} torch.float32 -> torch.bfloat16: {len(table)} copies, {num_bytes / 1e9:.3f} GB read and written")
    buffer = torch.zeros(num_bytes // 2, dtype=torch.uint8)
    other = torch.zeros_like(buffer)
    ways: Ways = {
        "reshard copy_host": lambda: _C.copy_host(table, num_threads),
        "torch copy_ per tensor": lambda: copy_each(weights),
    }
    check_all(ways, weights)
    seconds = interleaved(ways | {"plain copy of as many bytes": lambda: other.copy_(buffer)}, rounds=rounds)
    floor = summary(seconds["plain copy of as many bytes"])["median"]
    rows = report(seconds, num_bytes, floor)
    return {"model": model, "source": "torch.float32", "bytes": num_bytes, "num_copies": len(table), "ways": rows}


def report(seconds: dict[str, list[float]], num_bytes: int, floor: float) -> dict[str, dict[str, float]]:
    """Print a line a way: milliseconds, GB/s read and written, and the ratio to the plain copy; return the figures."""
    rows = {}
    print(f"  {'way':<78} {'median ms':>10} {'min ms':>9} {'GB/s':>8} {'x plain':>8}")
    for name, samples in seconds.items():
        row = summary(samples)
        rows[name] = row | {"ratio_to_plain_copy": row["median"] / floor}
        print(
            f"  {name:<78} {row['median'] * 1e3:>10.3f} {row['min'] * 1e3:>9.3f} "
            f"{num_bytes / row['median'] / 1e9:>8.1f} {row['median'] / floor:>8.3f}"
        )
    return rows


if __name__ == "__main__":
    main()
