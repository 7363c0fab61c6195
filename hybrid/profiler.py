"""Phases: where the wall-clock time of a step went.

    with record_phases() as record:
        with phase("rollout"):
            with phase("decode"):
                ...
    record.metrics()  # {"time/rollout": 1.2, "time/rollout/decode": 1.1}

A phase outside any `record_phases` costs next to nothing and leaves nothing. Recording is per context (thread or task);
worker groups carry the phases of their workers back and add them below the caller's phase. `trace` writes the same
phases as a timeline for chrome://tracing or Perfetto.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseEvent:
    """One run of one phase: its path ("rollout/decode"), start on the monotonic clock, and duration, in seconds."""

    path: str
    start_s: float
    duration_s: float


class PhaseRecord:
    """The phases that ended while it was recording. Safe to use from several threads."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._events: list[PhaseEvent] = []
        self._added: dict[str, float] = {}

    @property
    def events(self) -> tuple[PhaseEvent, ...]:
        """Every phase in the order in which it ended; those of other processes are in `seconds` only."""
        with self._lock:
            return tuple(self._events)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by path, summed over a phase's runs; a phase contains the phases below it."""
        with self._lock:
            totals = dict(self._added)
            for event in self._events:
                totals[event.path] = totals.get(event.path, 0.0) + event.duration_s
        return totals

    def metrics(self, *, prefix: str = "time/") -> dict[str, float]:
        """Return `seconds` with each path behind `prefix`."""
        return {f"{prefix}{path}": seconds for path, seconds in self.seconds.items()}

    def append(self, event: PhaseEvent) -> None:
        """Add a phase that ended."""
        with self._lock:
            self._events.append(event)

    def add(self, seconds: Mapping[str, float], *, below: str = "") -> None:
        """Add seconds measured elsewhere, for example in a worker, under the path `below`."""
        with self._lock:
            for path, value in seconds.items():
                full = f"{below}/{path}" if below else path
                self._added[full] = self._added.get(full, 0.0) + value


_record: contextvars.ContextVar[PhaseRecord | None] = contextvars.ContextVar("phase_record", default=None)
_path: contextvars.ContextVar[str] = contextvars.ContextVar("phase_path", default="")


@contextlib.contextmanager
def record_phases() -> Iterator[PhaseRecord]:
    """Record the phases of this context into a new record; an outer recording sees them as well when it ends."""
    outer, base = _record.get(), _path.get()
    record = PhaseRecord()
    record_token, path_token = _record.set(record), _path.set("")
    try:
        yield record
    finally:
        _record.reset(record_token)
        _path.reset(path_token)
        if outer is not None:
            _pass_on(record, outer, base)


def _pass_on(record: PhaseRecord, outer: PhaseRecord, base: str) -> None:
    prefix = f"{base}/" if base else ""
    for event in record.events:
        outer.append(dataclasses.replace(event, path=prefix + event.path))
    outer.add(record._added, below=base)


@contextlib.contextmanager
def phase(name: str, *, synchronize: Callable[[], None] | None = None) -> Iterator[None]:
    """Time the block as a phase, below the phase that it is in.

    `synchronize` (for example `torch.cuda.synchronize`) runs at both ends, so that a device's work counts where it was
    asked for. A block that raises is recorded too.
    """
    record = _record.get()
    if record is None:
        yield
        return
    outer = _path.get()
    path = f"{outer}/{name}" if outer else name
    token = _path.set(path)
    if synchronize is not None:
        synchronize()
    start_s = time.monotonic()
    try:
        yield
    finally:
        if synchronize is not None:
            synchronize()
        record.append(PhaseEvent(path, start_s, time.monotonic() - start_s))
        _path.reset(token)


def add_phases(seconds: Mapping[str, float]) -> None:
    """Add phases measured elsewhere below the current phase, if anything records."""
    record = _record.get()
    if record is not None:
        record.add(seconds, below=_path.get())


@contextlib.contextmanager
def trace(path: str | Path) -> Iterator[PhaseRecord]:
    """Record the block's phases and write them to `path` as Chrome trace events, also when the block raises."""
    with record_phases() as record:
        try:
            yield record
        finally:
            _write_trace(record, Path(path))


def _write_trace(record: PhaseRecord, path: Path) -> None:
    events = [
        {
            "name": event.path.rsplit("/", 1)[-1],
            "cat": "phase",
            "ph": "X",
            "ts": event.start_s * 1e6,
            "dur": event.duration_s * 1e6,
            "pid": os.getpid(),
            "tid": 0,
            "args": {"path": event.path},
        }
        for event in record.events
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
