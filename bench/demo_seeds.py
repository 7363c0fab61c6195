"""The demo's reward curves for several seeds, with the split of a step's time.

    python -m bench.demo_seeds [--seeds 0 1 2] [--out FOLDER] [--runs RUN_FOLDER ...] [key=value ...]

Runs the demo once a seed (or reads run folders given with --runs), prints a table, and writes a dated JSON record and a
picture of the curves.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from algos.config_load import load_config
from algos.demo import settings
from algos.grpo import train
from algos.metrics import ends, read_rows
from bench import record
from hybrid.models import prepare_model

PHASES = ("rollout", "transition", "reward", "log_probs", "update", "step")
SHOWN = ("reward/mean", "reward/format", "reward/accuracy", "kl/mean", "kl/old", "entropy/mean", "response_length/mean")


def main(args: list[str]) -> int:
    """Run or read the demo's runs and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=record.ROOT / "build" / "bench")
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    options, keys = parser.parse_known_args(args)
    folders = options.runs or [_run(seed, keys, options.out) for seed in options.seeds]
    curves = {folder.name: read_rows(folder / "metrics.jsonl") for folder in folders}
    results = {name: _summary(rows) for name, rows in curves.items()}
    path = record.save("demo-seeds", {"keys": keys, "runs": results}, folder=options.out)
    _draw(curves, path.with_suffix(".png"))
    for name, result in results.items():
        seconds = ", ".join(f"{phase} {result['seconds'][phase]['median']:.2f}" for phase in PHASES)
        print(f"{name}: reward {result['first_five']:.3f} -> {result['last_five']:.3f}; median seconds: {seconds}")
    print(path)
    return 0


def _run(seed: int, keys: list[str], out: Path) -> Path:
    """Train in a folder of its own under ``out`` and return it; a run that was cut short goes on."""
    folder = out / "demo-runs" / f"seed{seed}"
    config = load_config(settings(seed) | {"trainer.output_dir": str(folder)}, keys).config
    prepare_model("smollm2", config.model.path)
    return train(config).paths.root


def _summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    first, last = ends(rows)
    times = {phase: record.summary([row[f"time/{phase}"] for row in rows]) for phase in PHASES}
    curve = {name: [round(row[name], 4) for row in rows] for name in SHOWN}
    return {"first_five": first, "last_five": last, "seconds": times, "curves": curve}


def _draw(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, rows in curves.items():
        axes.plot([row["step"] for row in rows], [row["reward/mean"] for row in rows], marker="o", label=name)
    axes.set(xlabel="step", ylabel="mean reward of a step", ylim=(0, 1), title="The demo, one curve a seed")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
