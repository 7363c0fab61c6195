"""Run every benchmark that this machine can: ``python -m bench [NAME ...]``; results go to build/bench.

Each benchmark is a module of this package with a command line of its own (``python -m bench.transition --help``).
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time

import torch

ON_A_CPU = {
    "copy_kernel": ["--device", "cpu"],
    "plan_speed": [],
    "transition": [],
    "gather_ways": [],
    "multi_gpu": ["--processes", "2"],
    "arena_handover": ["--host"],
    "grpo_step_cpu": [],
}
ON_A_GPU = {
    "copy_kernel": [],
    "quant_kernel": [],
    "arena_handover": [],
    "transition": ["--device", "cuda"],
}
ON_SEVERAL_GPUS = {"multi_gpu": []}
NEEDS = {"grpo_step_cpu": "trl"}


def main() -> int:
    """Run the chosen benchmarks one after another; 1 if any failed."""
    chosen = ON_A_GPU if torch.cuda.is_available() else ON_A_CPU
    chosen = chosen | (ON_SEVERAL_GPUS if torch.cuda.device_count() > 1 else {})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(chosen)}")
    names = parser.parse_args().names or list(chosen)
    unknown = sorted(set(names) - set(chosen))
    if unknown:
        parser.error(f"no benchmark {unknown} for this machine: choose from {sorted(chosen)}")
    failed = []
    for name in names:
        if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
            print(f"== {name}: left out, it needs {NEEDS[name]} (pip install -e '.[bench]')", flush=True)
            continue
        print(f"== {name}", flush=True)
        begin = time.perf_counter()
        if subprocess.run([sys.executable, "-m", f"bench.{name}", *chosen[name]], check=False).returncode:
            failed.append(name)
        print(f"   {time.perf_counter() - begin:.0f} s", flush=True)
    if failed:
        print(f"failed: {failed}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
