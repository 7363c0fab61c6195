"""Phases: nesting, sums, errors, recordings inside recordings, and the trace file."""

import json
from pathlib import Path

import pytest

from hybrid.profiler import add_phases, phase, record_phases, trace


def test_nested_phases_have_paths_and_contain_one_another() -> None:
    with record_phases() as record:
        with phase("rollout"):
            for _ in range(3):
                with phase("decode"):
                    sum(range(1000))
        with phase("update"):
            pass
    seconds = record.seconds
    assert set(seconds) == {"rollout", "rollout/decode", "update"}
    assert 0 < seconds["rollout/decode"] <= seconds["rollout"]
    assert [event.path for event in record.events] == ["rollout/decode"] * 3 + ["rollout", "update"]
    assert record.metrics() == {f"time/{path}": value for path, value in seconds.items()}


def test_a_phase_that_raises_is_recorded_and_the_path_recovers() -> None:
    with record_phases() as record:
        with pytest.raises(KeyError), phase("outer"), phase("inner"):
            raise KeyError
        with phase("next"):
            pass
    assert set(record.seconds) == {"outer/inner", "outer", "next"}


def test_an_outer_recording_sees_the_inner_one_below_its_phase() -> None:
    with record_phases() as outer, phase("step"), record_phases() as inner, phase("rollout"):
        add_phases({"worker": 2.0})
    assert set(inner.seconds) == {"rollout", "rollout/worker"}
    assert set(outer.seconds) == {"step", "step/rollout", "step/rollout/worker"}
    assert outer.seconds["step/rollout/worker"] == 2.0


def test_without_a_recording_a_phase_does_nothing_not_even_synchronize() -> None:
    calls: list[str] = []
    with phase("alone", synchronize=lambda: calls.append("sync")):
        add_phases({"worker": 1.0})
    assert calls == []
    with record_phases(), phase("timed", synchronize=lambda: calls.append("sync")):
        assert calls == ["sync"]
    assert calls == ["sync", "sync"]


def test_trace_writes_chrome_events_also_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(RuntimeError), trace(path), phase("step"), phase("update"):
        raise RuntimeError
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["name"] for event in events] == ["update", "step"]
    assert [event["args"]["path"] for event in events] == ["step/update", "step"]
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events)
    assert events[1]["ts"] <= events[0]["ts"]
