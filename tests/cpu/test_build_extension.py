"""The extension's build says what it lacks, and importing what it built touches no device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build_message(tmp_path: Path, **environment: str) -> str:
    """Run a build that must fail before it compiles anything; return its last line."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert not list(tmp_path.rglob("*.so"))
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RESHARD_CUDA": "on", "CUDA_HOME": "/nonexistent"}, "RESHARD_CUDA=on, but nvcc was not found in CUDA_HOME"),
        ({"RESHARD_CUDA": "yes"}, "RESHARD_CUDA must be auto, on or off, but is 'yes'"),
        ({"RESHARD_CUDA": "off", "CXX": "no-such-compiler"}, "CXX=no-such-compiler is not on PATH; install one"),
        ({"RESHARD_CUDA": "off", "CXX": "", "PATH": "/nonexistent"}, "no C++ compiler (g++, clang++ or c++) on PATH"),
    ],
)
def test_a_build_that_lacks_something_says_what(tmp_path: Path, environment: dict[str, str], words: str):
    message = build_message(tmp_path, **environment)
    assert message.startswith("reshard: ")
    assert words in message


def test_importing_loads_neither_a_driver_nor_torch():
    script = (
        "import reshard._C as c, sys, pathlib\n"
        "maps = pathlib.Path('/proc/self/maps').read_text()\n"
        "assert 'libcuda' not in maps, maps\n"
        "assert 'torch' not in sys.modules\n"
        "assert isinstance(c.CUDA_KERNELS, bool) and isinstance(c.driver_available(), bool)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
