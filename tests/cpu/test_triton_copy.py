"""Triton's kernels under its interpreter on host memory, in processes of their own: the switch is per process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def interpreted(script: str, **environment: str) -> str:
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])} | environment
    done = subprocess.run([sys.executable, str(TESTS / script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
@pytest.mark.slow
def test_the_interpreted_kernels_equal_the_oracle():
    output = interpreted("triton_interpreted.py")
    for what in ("every rounding edge", "random copies", "random fans", "random checksums"):
        assert f"{what}: equal" in output, output
    assert "a run past the end: nothing moved" in output


@needs_triton
@pytest.mark.slow
def test_every_transport_runs_on_interpreted_kernels():
    output = interpreted("triton_transitions.py", RESHARD_KERNELS="triton", OMP_NUM_THREADS="1")
    assert output.splitlines() == ["local: equal", "peer: equal", "collective: equal"]
