"""Reward functions that may hang or eat memory, run in worker processes under a deadline that really ends them."""

import contextlib
import dataclasses
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from algos.rewards.base import Outcome, Sample

_START_DEADLINE_S = 120.0
_EXIT_DEADLINE_S = 5.0
_READ_BYTES = 1 << 16

OnTimeout = Literal["zero", "unscored"]


class WorkerError(RuntimeError):
    """A worker process could not start; what it wrote to standard error says why."""


class _Worker:
    """One process and the sample that it is busy with (``job_idx``), until ``deadline`` on the monotonic clock."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        # A session of its own: Ctrl-C is for the trainer, which then writes a checkpoint and may still need scores.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input, self.output_fd = self.process.stdin, self.process.stdout.fileno()
        os.set_blocking(self.output_fd, False)
        self._unread = b""
        self.is_ready = False
        self.job_idx: int | None = None
        self.deadline = time.monotonic() + _START_DEADLINE_S

    def send(self, job_idx: int, line: bytes, deadline_s: float) -> None:
        self.job_idx, self.deadline = job_idx, time.monotonic() + deadline_s
        with contextlib.suppress(BrokenPipeError):  # it has ended; reading its output says so
            self._input.write(line)
            self._input.flush()

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The replies that have come, and whether the process has closed its end."""
        chunk = os.read(self.output_fd, _READ_BYTES)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        return [json.loads(line) for line in lines], not chunk

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()


class WorkerReward:
    """Scores samples in ``num_workers`` processes that load ``spec`` themselves; they start when this is made.

    A sample has ``deadline_s`` seconds; then its process is killed and replaced, and no other sample notices. With
    ``on_timeout="zero"`` such a sample gets 0 (the response brought it about), unless the plainest response, "0", hangs
    as well, so that the ground truth is to blame; then, and always with ``"unscored"``, it is unscored.
    ``memory_bytes`` bounds each process's address space. This guards against accidents; it is no sandbox for hostile
    code.

    Raises:
        WorkerError: from ``score``, where a process ends before it has loaded its function.
    """

    def __init__(
        self,
        spec: str,
        *,
        deadline_s: float,
        num_workers: int,
        on_timeout: OnTimeout,
        memory_bytes: int = 0,
    ) -> None:
        self._deadline_s = deadline_s
        self._num_workers = num_workers
        self._on_timeout = on_timeout
        self._command = (sys.executable, "-m", "algos.rewards.worker", spec, str(deadline_s), str(memory_bytes))
        self._workers: list[_Worker] = []
        self._hanging_golds: dict[str, bool] = {}
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)
        self._start_missing(num_workers)

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One Outcome a sample, in order; takes at most about ``deadline_s`` a sample and process."""
        with self._lock:
            outcomes = self._run([_to_line(sample) for sample in samples])
            return [outcomes[idx] or self._timed_out(sample) for idx, sample in enumerate(samples)]

    def close(self) -> None:
        """Kills the workers; a later ``score`` starts new ones."""
        with self._lock:
            _kill_all(self._workers)

    def _run(self, lines: Sequence[bytes]) -> dict[int, Outcome | None]:
        """Each line's Outcome, or None where the deadline or the process's end came first."""
        waiting, outcomes = deque(range(len(lines))), dict[int, Outcome | None]()
        try:
            while len(outcomes) < len(lines):
                self._drop_ended()
                self._start_missing(min(self._num_workers, len(lines) - len(outcomes)))
                for worker in self._workers:
                    if worker.is_ready and worker.job_idx is None and waiting:
                        job_idx = waiting.popleft()
                        worker.send(job_idx, lines[job_idx], self._deadline_s)
                self._collect(outcomes)
        finally:  # after an interrupt, so that no late reply is taken for a later sample's
            for worker in [worker for worker in self._workers if worker.job_idx is not None]:
                self._workers.remove(worker)
                worker.kill()
        return outcomes

    def _drop_ended(self) -> None:
        """Lets go of workers that ended while idle, so that no sample is blamed for it."""
        for worker in [w for w in self._workers if w.is_ready and w.job_idx is None and w.process.poll() is not None]:
            self._workers.remove(worker)
            worker.kill()

    def _start_missing(self, num_wanted: int) -> None:
        search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        while len(self._workers) < num_wanted:
            self._workers.append(_Worker(self._command, {**os.environ, "PYTHONPATH": search_path}))

    def _collect(self, outcomes: dict[int, Outcome | None]) -> None:
        """Waits until a worker says something or a deadline passes, and deals with whatever has happened."""
        busy = [worker for worker in self._workers if worker.job_idx is not None or not worker.is_ready]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.output_fd, selectors.EVENT_READ, worker)
            next_deadline = min(worker.deadline for worker in busy)
            events = selector.select(max(0.0, next_deadline - time.monotonic()))
        for key, _ in events:
            self._receive(key.data, outcomes)
        now = time.monotonic()
        for worker in [worker for worker in busy if worker in self._workers and worker.deadline <= now]:
            if worker.job_idx is not None or not worker.is_ready:
                self._give_up(worker, outcomes, f"did not answer within {_START_DEADLINE_S:.0f} s")

    def _receive(self, worker: _Worker, outcomes: dict[int, Outcome | None]) -> None:
        replies, has_ended = worker.read()
        for reply in replies:
            if worker.job_idx is None:
                worker.is_ready = True
            else:
                outcomes[worker.job_idx], worker.job_idx = Outcome(**reply), None
        if has_ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_EXIT_DEADLINE_S)
            self._give_up(worker, outcomes, f"ended with exit status {worker.process.poll()}")

    def _give_up(self, worker: _Worker, outcomes: dict[int, Outcome | None], what: str) -> None:
        self._workers.remove(worker)
        worker.kill()
        if not worker.is_ready:
            raise WorkerError(f"a reward worker {what} before it had loaded its function: {' '.join(self._command)}")
        if worker.job_idx is not None:
            outcomes[worker.job_idx] = None

    def _timed_out(self, sample: Sample) -> Outcome:
        reason = f"no result within {self._deadline_s:g} s; its process was ended"
        if self._on_timeout == "unscored":
            return Outcome(score=None, error=f"TimeoutError: {reason}")
        probe = dataclasses.replace(sample, response="0")
        key = repr(sample.ground_truth)
        if key not in self._hanging_golds:
            self._hanging_golds[key] = self._run([_to_line(probe)])[0] is None
        if self._hanging_golds[key]:
            return Outcome(score=None, error=f"TimeoutError: the ground truth itself gives {reason}")
        return Outcome(score=0.0, metrics={"accuracy": 0.0, "timeout": 1.0})


def _to_line(sample: Sample) -> bytes:
    return json.dumps(dataclasses.asdict(sample), default=_to_json).encode() + b"\n"


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return list(value)
    return str(value)  # dates, times, decimals
