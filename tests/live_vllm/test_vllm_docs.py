"""The examples of docs/vllm.md, run as written."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
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
    log: list[str] = []
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    reader = threading.Thread(target=log.extend, args=(process.stdout,))
    try:
        for line in process.stdout:
            log.append(line)
            if "Application startup complete" in line:
                break
        assert process.poll() is None, "".join(log[-40:])
        reader.start()
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):  # the engine's processes go with the server's
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_separate_example_runs_against_a_server(tmp_path, server):
    url, log = server
    run(SEPARATE, tmp_path, MODEL=str(tmp_path / "model"), SERVER=url)
    requests = [line for line in log if "POST /" in line]
    for path in ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"):
        assert sum(path in line and "200 OK" in line for line in requests) == 2, requests
