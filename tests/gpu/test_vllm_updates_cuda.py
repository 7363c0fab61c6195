"""Real vLLM engines with CUDA graphs on a GPU follow a trainer's optimizer steps, bit for bit as fresh engines do."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_VLLM = importlib.util.find_spec("vllm")
if not torch.cuda.is_available() or _VLLM is None or _VLLM.origin is None:
    pytest.skip("needs a GPU and vLLM", allow_module_level=True)

from vllm_gpu_scenarios import KINDS  # noqa: E402

pytestmark = pytest.mark.gpu

SCENARIOS = Path(__file__).parents[1] / "vllm_gpu_scenarios.py"
DEADLINE_S = 400


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[str, Path]:
    """Folders of all kinds, after the engines that were updated and then the fresh ones have run, each lot at once.

    What a process says goes to ``WHAT.log`` there.
    """
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for jobs in (
        [(kind, ("updates",)) for kind in KINDS],
        [(kind, job) for kind in KINDS for job in (("fresh", "1"), ("fresh", "2"), ("stock", "2"))],
    ):
        running = [start(kind, folders[kind], *job) for kind, job in jobs]
        for process in running:
            process.wait(timeout=DEADLINE_S)
    return folders


def start(kind: str, folder: Path, what: str, *rest: str) -> subprocess.Popen:
    environment = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    with (folder / f"{what}{''.join(rest)}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, str(SCENARIOS), what, kind, str(folder), *rest],
            env=os.environ | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def read(folder: Path, name: str, log: str) -> dict:
    if not (folder / name).exists():
        pytest.fail((folder / log).read_text()[-6000:])
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_engines_equal_fresh_ones_after_each_update(logs, kind):
    found = read(logs[kind], "updates.json", "updates.log")
    before, *after = found["updates"]
    assert all("NONE" not in update["mode"].upper() for update in found["updates"]), "CUDA graphs are on"
    assert before["tokens"] != after[0]["tokens"] != after[1]["tokens"], "the updates changed no token"
    for number, update in enumerate(after, 1):
        fresh = read(logs[kind], f"fresh-{number}.json", f"fresh{number}.log")
        assert_same_parameters(update, fresh)
        assert update["tokens"] == fresh["tokens"]
        assert update["log_probs"] == fresh["log_probs"]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_equal_those_of_plain_vllm(logs, kind):
    found = read(logs[kind], "updates.json", "updates.log")
    assert_same_parameters(found["updates"][2], read(logs[kind], "stock-2.json", "stock2.log"))


def assert_same_parameters(found: dict, expected: dict) -> None:
    assert found["digests"].keys() == expected["digests"].keys()
    differing = [name for name, digest in expected["digests"].items() if found["digests"][name] != digest]
    assert not differing, f"{len(differing)} of {len(expected['digests'])} differ: {differing[:6]}"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_staged_and_few_kernels_run(logs, kind):
    found = read(logs[kind], "updates.json", "updates.log")
    assert found["staging_bytes"] == 0, (logs[kind] / "updates.log").read_text()[-3000:]
    assert found["launches"] <= 10 and found["verified_bytes"] > 0
    assert found["modes"] == (["blocks"] if "fp8" in kind else [])
