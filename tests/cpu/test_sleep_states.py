"""Which step may follow which when an engine sleeps and wakes, and its options: no engine, no device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import StateError
from reshard.vllm.options import MemoryOptions
from reshard.vllm.states import SleepState

RUNNING = SleepState()


def test_level_one_wakes_by_either_tag_first():
    asleep = RUNNING.suspend(1)
    assert asleep.name == "SUSPENDED level 1" and not asleep.is_running
    assert asleep.wake(None) == RUNNING
    assert asleep.wake(["weights"]).name == "WEIGHTS_READY"
    assert asleep.wake(["kv_cache"]).name == "KV_READY"
    assert asleep.wake(["kv_cache"]).wake(["weights"]) == asleep.wake(["weights"]).wake(["kv_cache"]) == RUNNING


def test_level_two_runs_only_after_new_weights():
    asleep = RUNNING.suspend(2)
    for tags in (None, ["kv_cache"], ["weights", "kv_cache"]):
        with pytest.raises(StateError, match=r"SUSPENDED level 2 and would generate without weights; next: call wake"):
            asleep.wake(tags)
    with pytest.raises(StateError, match="no memory to arrive in: the engine is SUSPENDED level 2"):
        asleep.weights_arrived()
    waiting = asleep.wake(["weights"])
    assert waiting.name == "AWAITING_WEIGHTS" and waiting.wake(["weights"]) == waiting
    with pytest.raises(StateError, match="AWAITING_WEIGHTS; next: send new weights"):
        waiting.require_running()
    with pytest.raises(StateError, match="can't wake yet: the engine is AWAITING_WEIGHTS"):
        waiting.wake(None)
    with pytest.raises(StateError, match="can't sleep at level 1: it is AWAITING_WEIGHTS"):
        waiting.suspend(1)
    assert waiting.suspend(2) == asleep
    ready = waiting.weights_arrived()
    assert ready.name == "WEIGHTS_READY" and ready.wake(None) == RUNNING


def test_what_is_refused_says_what_comes_next():
    with pytest.raises(ValueError, match="expected sleep level 1 or 2, got 3; level 0 is vLLM's own pause"):
        RUNNING.suspend(3)
    with pytest.raises(StateError, match="it is SUSPENDED level 1 already; next: call wake_up"):
        RUNNING.suspend(1).suspend(2)
    with pytest.raises(ValueError, match=r"expected tags of \['weights', 'kv_cache'\], got \['graphs'\]"):
        RUNNING.wake(["graphs"])
    with pytest.raises(StateError, match="can't be given up: the engine is SUSPENDED level 1"):
        RUNNING.suspend(1).discard_kv()
    assert RUNNING.discard_kv().name == "WEIGHTS_READY" and RUNNING.discard_kv().suspend(2).level == 2
    assert RUNNING.wake(None) == RUNNING.weights_arrived() == RUNNING


STEPS = st.sampled_from(["sleep 1", "sleep 2", "discard", "weights", "kv_cache", "all", "arrive"])


@given(st.lists(STEPS, max_size=12))
def test_no_order_of_steps_runs_without_weights_or_gets_stuck(steps):
    """A model of what the memory holds beside the machine: whenever it says RUNNING, both are truly there."""
    state, weights, kv = RUNNING, True, True
    for step in steps:
        try:
            match step.split():
                case ["sleep", level]:
                    was, state = state, state.suspend(int(level))
                    weights, kv = weights and level == "1" and was.weights == "valid", False
                case ["discard"]:
                    state, kv = state.discard_kv(), False
                case ["arrive"]:
                    state, weights = state.weights_arrived(), True
                case [tag]:
                    state = state.wake(None if tag == "all" else [tag])
                    kv = kv or tag in ("all", "kv_cache")
        except StateError:
            continue
        assert not state.is_running or (weights and kv)
    for call in (lambda s: s.wake(["weights"]), lambda s: s.weights_arrived(), lambda s: s.wake(None)):
        state = call(state)
    assert state == RUNNING


def test_options_are_read_and_checked():
    assert MemoryOptions.from_config({}) == MemoryOptions.from_config(None) == MemoryOptions()
    given_ = {"reshard": {"mappings": "drop", "chunk_classes": [4 << 20, 2 << 20], "budget_bytes": 1 << 30}}
    options = MemoryOptions.from_config(given_)
    assert (options.mappings, options.chunk_classes, options.budget_bytes) == ("drop", (4 << 20, 2 << 20), 1 << 30)
    with pytest.raises(ValueError, match=r"no option 'mapings': did you mean 'mappings'\?"):
        MemoryOptions.from_config({"reshard": {"mapings": "drop"}})
    with pytest.raises(
        ValueError, match=r"'level1_weights' of reshard: expected one of \['keep', 'offload'\], got 'x'"
    ):
        MemoryOptions.from_config({"reshard": {"level1_weights": "x"}})
    with pytest.raises(ValueError, match="'budget_bytes' of reshard: expected bytes above 0, got 0"):
        MemoryOptions(budget_bytes=0)
    with pytest.raises(ValueError, match="expected additional_config"):
        MemoryOptions.from_config({"reshard": "drop"})
