"""The Triton executor under Triton's interpreter on host memory, in a process of its own: the switch is per process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "triton_interpreted.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_interpreted_kernel_equals_the_oracle():
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(SCRIPT.parent)])}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every rounding edge: equal" in done.stdout
    assert "random copies: equal" in done.stdout
    assert "random fans: equal" in done.stdout
