"""Two GPUs: a tensor parallel vLLM in the trainer's processes follows FSDP2 shards, bit for bit as a fresh one does."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_VLLM = importlib.util.find_spec("vllm")
if torch.cuda.device_count() < 2 or _VLLM is None or _VLLM.origin is None:
    pytest.skip("needs two GPUs and vLLM", allow_module_level=True)

pytestmark = pytest.mark.gpu

SCENARIOS = Path(__file__).parents[1] / "vllm_gpu_ranks.py"


def run(what: str, way: str, folder: Path) -> None:
    settings = {"VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCENARIOS), what, way, str(folder)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.mark.parametrize("way", ["collective", "peer"])
def test_both_ranks_equal_those_of_a_fresh_engine(tmp_path, way):
    run("updates", way, tmp_path)
    run("fresh", way, tmp_path)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"updates-{rank}.json").read_text())
        fresh = json.loads((tmp_path / f"fresh-{rank}.json").read_text())
        assert found["transport"] == way and found["verified_bytes"] > 0
        assert found["received_bytes"] == found["floor_bytes"] > 0
        assert found["staging_bytes"] <= 64 << 20
        before, first, second = found["updates"]
        assert before["tokens"] != first["tokens"] != second["tokens"], "the updates changed no token"
        assert second["digests"] == fresh["digests"]
        assert (second["tokens"], second["log_probs"]) == (fresh["tokens"], fresh["log_probs"])
