"""What a benchmark records beside its numbers: the environment, medians, and a dated result file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, Any]:
    """Hardware, versions and the commit of this run."""
    import torch

    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "kernel": platform.release(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        facts["cuda"] = torch.version.cuda
    return facts


def interleaved(ways: dict[str, Callable[[], object]], *, rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each way, `rounds` times, the ways in turn within each round so that drift hits all of them alike.

    A way that works on a device synchronises by itself before it returns.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(warmup + rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def summary(samples: list[float]) -> dict[str, float]:
    """Median, fastest and slowest of `samples`."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "num": len(samples)}


def save(name: str, result: dict[str, Any], *, folder: Path | None = None) -> Path:
    """Write ``<date>-<name>.json`` with the environment in it and return its path; `folder` defaults to build/bench."""
    folder = folder or ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.date.today().isoformat()}-{name}.json"
    path.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n")
    return path


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
