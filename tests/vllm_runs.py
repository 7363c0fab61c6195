"""Running scenarios of vLLM, each in a process of its own, forked from one that has imported it."""

import subprocess
from pathlib import Path

from fork_server import ForkServer

SCENARIOS = Path(__file__).with_name("vllm_scenarios.py")
LOOP_SCENARIOS = SCENARIOS.with_name("vllm_loop_scenarios.py")


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def run(scenarios: ForkServer, name: str, folder: Path, *, script: Path = SCENARIOS, **environment: str) -> None:
    check(scenarios.run(script, name, str(folder), timeout=280, **environment))
