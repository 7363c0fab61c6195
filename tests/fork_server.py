"""A process that has done the slow imports once and forks a child for every script: ``python SCRIPT ARGUMENTS``.

The server runs nothing but imports, starts no thread and keeps no state, so each child begins as a new interpreter that
has imported the same modules would. A child leads a process group of its own, which ends with it when it is late. What
the server imported has read its environment, so a script may change only those variables that are read later.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

MAX_REQUEST_BYTES = 1 << 16
START_TIMEOUT_S = 240.0


class ForkServer:
    """The server's client, for one test process; use as a context manager.

    Args:
        preload: modules that the server imports.
        changeable: environment variables that scripts may change: whatever `preload` imports reads them later only.
        environment: of the server and, but for those changes, of every script.
    """

    def __init__(self, preload: Sequence[str], *, changeable: Sequence[str], environment: dict[str, str]) -> None:
        self._changeable = frozenset(changeable)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server
        command = [sys.executable, __file__, str(theirs.fileno()), *preload]
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdout=self._log, stderr=self._log
            )
        self._receive(START_TIMEOUT_S)

    def run(self, script: Path, *arguments: str, timeout: float, **changes: str) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` with captured text and `timeout`; `changes` are to the environment.

        Raises:
            subprocess.TimeoutExpired: with the output so far; every process of the script has been killed.
            ValueError: a variable that was read already when the server did its imports.
        """
        if early := sorted(set(changes) - self._changeable):
            raise ValueError(f"{early} may be read by imports already: run the script in an interpreter of its own")
        command = [str(script), *arguments]
        request = json.dumps({"command": command, "changes": changes}).encode()
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            socket.send_fds(self._socket, [request], [output.fileno(), errors.fileno()])
            child = self._receive(START_TIMEOUT_S)["child"]
            try:
                code = self._receive(timeout)["code"]
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                self._receive(START_TIMEOUT_S)
                raise subprocess.TimeoutExpired(command, timeout, _text(output), _text(errors)) from None
            return subprocess.CompletedProcess(command, code, _text(output).decode(), _text(errors).decode())

    def _receive(self, seconds: float) -> dict[str, int]:
        self._socket.settimeout(seconds)
        message = self._socket.recv(MAX_REQUEST_BYTES)
        if not message:
            code = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"the fork server ended with code {code}: {self._log.read()[-3000:]}")
        found: dict[str, int] = json.loads(message)
        return found

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _text(file) -> bytes:
    file.seek(0)
    return file.read()


def serve(connection: socket.socket) -> list[str]:
    """Fork a child for every request; returns in a child only, with its command line."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
        if not message:
            sys.exit(0)
        assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread: forking is not safe"
        child = os.fork()
        if child == 0:
            connection.close()
            return begin(json.loads(message), descriptors)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(child, child)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps({"child": child}).encode())
        try:
            _, status = os.waitpid(child, 0)
        except BaseException:
            os.killpg(child, signal.SIGKILL)
            raise
        connection.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())


def begin(request: dict, descriptors: list[int]) -> list[str]:
    """Make this process look like a new interpreter that was started with the request's command."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    for descriptor, standard in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.update(request["changes"])
    sys.argv[:] = request["command"]
    sys.path[0] = str(Path(request["command"][0]).parent)
    return sys.argv


def run_script(command: list[str]) -> NoReturn:
    """Run it as the main module; the interpreter then ends as any other, exit handlers included."""
    runpy.run_path(command[0], run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    link = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    link.send(json.dumps({"ready": os.getpid()}).encode())
    run_script(serve(link))
