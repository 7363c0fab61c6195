"""What a transition in one process costs beside its bytes: launches, CUDA graphs, parts, and the wait for the device.

7B shapes on a GPU, fp32 to bf16 and bf16 to bf16: a `Resharder` that launches its tables, one that replays a graph, and
both cut into a part a layer, beside plain device copies of as many bytes. Then two small transitions, where latency
counts: `run` beside a launch awaited by `event.synchronize()`, which knows no deadline, and by a poll each 0.2 ms.
Results are checked before they are timed. ``python -m bench.transition_launches --help``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.copy_shapes import make_weights
from bench.record import interleaved, save, summary
from reshard import Layout, Plan, Resharder, make_plan

KINDS = {
    "launches": {"graph": False},
    "graph": {"graph": True},
    "parts, launches": {"graph": False, "parts": "layers"},
    "parts, graphs": {"graph": True, "parts": "layers"},
}
PER_LAYER = 9


class Sides:
    """Live tensors of both sides by name, and their Plan."""

    def __init__(self, model: str, source: torch.dtype) -> None:
        self.weights = make_weights(model, source=source, destination=torch.bfloat16, device="cuda")
        names = [f"layers.{i // PER_LAYER}.{i % PER_LAYER}" for i in range(len(self.weights.sources))]
        self.source = dict(zip(names, self.weights.sources, strict=True))
        self.destination = dict(zip(names, self.weights.views, strict=True))
        self.plan: Plan = make_plan(Layout.from_tensors(self.source), Layout.from_tensors(self.destination))
        self.num_bytes = sum(t.nbytes for side in (self.source, self.destination) for t in side.values())

    def bind(self, **options: Any) -> Resharder:
        return Resharder(self.plan, self.source, self.destination, **options)


def run_model(model: str, source: torch.dtype, rounds: int) -> dict[str, Any]:
    """Whole transitions of a model, and the host's share of them."""
    sides = Sides(model, source)
    bound = {name: sides.bind(**options) for name, options in KINDS.items()}
    for step, (name, resharder) in enumerate(bound.items()):
        for update in (2 * step, 2 * step + 1):
            sides.weights.relabel(update)
            resharder.run()
            sides.weights.check()
            resharder.verify()
        print(f"  {name}: checked, {resharder.stats.num_launches} launches, {resharder.stats.num_parts} parts")
    half = torch.empty(sides.num_bytes // 2, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(half)

    def floor() -> None:
        other.copy_(half)
        torch.cuda.synchronize()

    ways: dict[str, Callable[[], object]] = {name: resharder.run for name, resharder in bound.items()}
    seconds = {name: summary(samples) for name, samples in interleaved({**ways, "floor": floor}, rounds=rounds).items()}
    host: dict[str, list[float]] = {name: [] for name in bound}
    for _ in range(rounds):
        for name, resharder in bound.items():
            begin = time.perf_counter()
            resharder.start()
            host[name].append(time.perf_counter() - begin)
            resharder.wait()
    for name, median in ((name, each["median"]) for name, each in seconds.items()):
        started = f", started in {summary(host[name])['median'] * 1e6:6.0f} us" if name in host else ""
        print(f"  {name:18s} {median * 1e3:8.3f} ms, {median / seconds['floor']['median']:5.3f}x the floor{started}")
    return {
        "model": model,
        "source": str(source),
        "num_bytes": sides.num_bytes,
        "num_launches": {name: resharder.stats.num_launches for name, resharder in bound.items()},
        "seconds": seconds,
        "host_seconds_to_start": {name: summary(samples) for name, samples in host.items()},
    }


def run_latency(model: str, rounds: int) -> dict[str, Any]:
    """A transition of few bytes, by three ways to wait for the device."""
    sides = Sides(model, torch.float32)
    resharder = sides.bind(graph=False)
    sides.weights.relabel(1)
    resharder.run()
    sides.weights.check()
    event = torch.cuda.Event()

    def launch() -> None:
        resharder.start()
        event.record()

    def synchronized() -> None:
        launch()
        event.synchronize()
        resharder.wait()

    def polled() -> None:
        launch()
        while not event.query():
            time.sleep(0.0002)
        resharder.wait()

    ways: dict[str, Callable[[], object]] = {
        "run": resharder.run,
        "event.synchronize()": synchronized,
        "a poll each 0.2 ms": polled,
    }
    seconds = {name: summary(samples) for name, samples in interleaved(ways, rounds=rounds, warmup=20).items()}
    for name, each in seconds.items():
        print(f"  {model}, {name:20s} {each['median'] * 1e6:7.1f} us, fastest {each['min'] * 1e6:7.1f}")
    return {"model": model, "num_bytes": sides.num_bytes, "seconds": seconds}


def main() -> None:
    """Parse the command line, run, print and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7B")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder of the result file, default build/bench")
    args = parser.parse_args()
    models = []
    for source in (torch.float32, torch.bfloat16):
        print(f"{args.model}, {source} to torch.bfloat16")
        models.append(run_model(args.model, source, args.rounds))
        torch.cuda.empty_cache()
    result = {"models": models, "latency": [run_latency(model, 40 * args.rounds) for model in ("tiny", "135M")]}
    print("written:", save("transition-launches", result, folder=args.out))


if __name__ == "__main__":
    main()
