"""The benchmark for several GPUs runs whole on two host processes: every way checked, every figure written."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAYS = {
    "peer",
    "collective",
    "broadcast of each parameter",
    "bucketed all-gather",
    "full_tensor of each parameter",
    "flattened buckets over IPC",
}


def test_every_step_runs_and_is_recorded(tmp_path):
    options = (
        "--processes 2 --device cpu --models tiny --dtypes float32 --rounds 1 --cases 4 --transitions 10 --copy-mib 1"
    )
    command = [sys.executable, "-m", "bench.multi_gpu", *options.split(), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (path,) = tmp_path.glob("*-multi-gpu-cpu-2.json")
    found = json.loads(path.read_text())
    assert found["environment"]["torch"] and found["groups"]["take down"]["num"] == 3
    assert set(found["limits"]) == {"device copy, read + write", "message, both ways", "all-gather bus, 1024 KiB"}
    assert found["checks of peer"]["cases"] == found["checks of collective"]["cases"] == 4
    scenarios = {name: result for name, result in found.items() if name.startswith("tiny")}
    assert len(scenarios) == 9, "three pairs of meshes in three groupings"
    for name, result in scenarios.items():
        if "same_as" in result:
            assert result["same_as"] in scenarios
            continue
        assert set(result["ways"]) == WAYS, name
        assert result["received_bytes"] == result["floor_bytes"], name
        assert all(way["median"] > 0 for way in result["ways"].values())
    assert "done" in done.stdout
