"""The examples of docs/vllm.md, run as written."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_scenarios import make_model

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
COLOCATED, SEPARATE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SMALL = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def run(code: str, folder: Path, **names: str) -> str:
    script = folder / "example.py"
    script.write_text("".join(f"{name} = {value!r}\n" for name, value in names.items()) + code)
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | SMALL, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def test_the_colocated_example_runs(tmp_path):
    make_model(tmp_path / "model")
    assert "the engine has version 2: 1 launch" in run(COLOCATED, tmp_path, MODEL=str(tmp_path / "model"))
    assert len(COLOCATED.strip().splitlines()) <= 25


@pytest.fixture
def server(tmp_path):
    """A vLLM server on a free port of this host."""
    make_model(tmp_path / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "model")]
    command += ["--weight-transfer-config", '{"backend": "reshard"}', "--skip-tokenizer-init", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "64", "--enforce-eager"]
    environment = os.environ | SMALL | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_until_up(process, port, tmp_path / "server.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):  # the engine's processes go with the server's
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_up(process: subprocess.Popen, port: int, log: Path) -> None:
    """Until the server answers; it says nothing sooner, so its port is all there is to ask."""
    retry = "import sys, urllib.request as u\nu.urlopen(sys.argv[1], timeout=5).read()"
    for _ in range(200):
        assert process.poll() is None, log.read_text()[-4000:]
        asked = subprocess.run([sys.executable, "-c", retry, f"http://127.0.0.1:{port}/health"], capture_output=True)
        if asked.returncode == 0:
            return
    raise AssertionError("the server did not come up: " + log.read_text()[-4000:])


def test_the_separate_example_runs_against_a_server(tmp_path, server):
    run(SEPARATE, tmp_path, MODEL=str(tmp_path / "model"), SERVER=server)
    log = (tmp_path / "server.log").read_text()
    assert log.count("POST /update_weights") == 2 and log.count("POST /pause") == 2
