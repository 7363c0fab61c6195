"""The loader's order and its exact position; M1 and M3 name faults of resumed runs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algos.data import PromptDataset, PromptLoader, Row
from algos.data.chat import Encoded
from algos.errors import InputError


class Numbered:
    """In the place of a Chat: row i's only token is i + offset."""

    def __init__(self, offset=0):
        self.offset = offset

    def encode(self, rows):
        return [Encoded([row.index + self.offset], 0, has_bos=False) for row in rows]


def make_loader(num_rows=10, batch_size=3, *, offset=0, **options):
    rows = [Row(prompt="x", data_source="t", ground_truth="", extra_info=None, index=idx) for idx in range(num_rows)]
    return PromptLoader(PromptDataset(rows, chat=Numbered(offset)), batch_size, **options)


def take(loader, num_batches):
    return [[prompt.row.index for prompt in loader.next_batch()] for _ in range(num_batches)]


def flat(batches):
    return [row_idx for batch in batches for row_idx in batch]


def test_in_the_files_order():
    assert take(make_loader(5, 2, shuffle=False), 5) == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]
    loader = make_loader(5, 2, shuffle=False, drop_last=False)
    assert loader.num_batches_per_epoch == 3
    assert take(loader, 4) == [[0, 1], [2, 3], [4], [0, 1]]


def test_every_epoch_has_an_order_of_its_own_that_the_seed_decides():
    first, second = (take(make_loader(60, 4, seed=7), 30) for _ in range(2))
    assert first == second
    epochs = [flat(first[:15]), flat(first[15:])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(60))
    assert epochs[0] != epochs[1] != list(range(60))
    assert first != take(make_loader(60, 4, seed=8), 30)
    assert first != take(make_loader(60, 4, seed=7 + (1 << 32)), 30)


def test_dropped_prompts_differ_between_epochs():
    batches = take(make_loader(10, 3, seed=1), 60)
    left_out = [set(range(10)) - set(flat(batches[i : i + 3])) for i in range(0, 60, 3)]
    assert all(len(rest) == 1 for rest in left_out)
    assert len(set.union(*left_out)) > 3


def test_the_order_is_the_same_for_ever():
    assert take(make_loader(8, 8, seed=0), 2) == [[2, 6, 0, 4, 1, 3, 5, 7], [4, 0, 6, 1, 2, 7, 5, 3]]


@given(st.integers(0, 25), st.booleans(), st.booleans(), st.integers(0, 3))
def test_m3_a_resumed_loader_goes_on_exactly(num_done, shuffle, drop_last, seed):
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed}
    unbroken = make_loader(**options)
    take(unbroken, num_done)
    state = json.loads(json.dumps(unbroken.state_dict()))
    resumed = make_loader(**options)
    take(resumed, 2)
    resumed.load_state_dict(state)
    assert take(resumed, 10) == take(unbroken, 10)


def test_m1_a_position_at_the_end_of_an_epoch_is_the_start_of_the_next():
    loader = make_loader(60, 1)
    first = take(loader, 60)
    state = loader.state_dict()
    assert (state["epoch"], state["batch_idx"]) == (1, 0)
    resumed = make_loader(60, 1)
    resumed.load_state_dict(state)
    steps = [[prompt.row.index for prompt in batch] for _ in range(resumed.epoch, 2) for batch in resumed]
    assert len(steps) == 60, "steps 61 to 120 are run"
    assert sorted(steps) == sorted(first)
    assert steps != first


def test_m3_no_row_is_seen_twice_after_a_resume_inside_an_epoch():
    loader = make_loader(12, 2)
    seen = flat(take(loader, 5))
    resumed = make_loader(12, 2)
    resumed.load_state_dict(loader.state_dict())
    step_six = take(resumed, 1)[0]
    assert not set(step_six) & set(seen)
    assert step_six == take(loader, 1)[0]


def test_iterating_gives_what_is_left_of_the_epoch():
    loader = make_loader(10, 3)
    loader.next_batch()
    assert len(list(loader)) == 2
    assert loader.epoch == 1
    assert len(list(loader)) == 3


def test_a_position_of_other_data_or_options_is_refused():
    state = make_loader().state_dict()
    for other, what in [
        (make_loader(batch_size=2), "batch_size was 3 and is 2"),
        (make_loader(seed=5), "seed was 0 and is 5"),
        (make_loader(9), "num_prompts was 10 and is 9; data_digest was "),
        (make_loader(offset=1), "data_digest was .* and is "),
        (make_loader(shuffle=False), "shuffle was True and is False"),
    ]:
        with pytest.raises(InputError, match=f"belongs to other data or options: {what}"):
            other.load_state_dict(state)
    with pytest.raises(InputError, match="lacks batch_idx, seed; it can't be resumed from"):
        make_loader().load_state_dict({key: value for key, value in state.items() if key not in ("seed", "batch_idx")})


def test_batches_that_cannot_be_are_refused():
    with pytest.raises(
        InputError, match=r"data.train_batch_size=11 prompts, but the data has only 10; use a batch of at most"
    ):
        make_loader(10, 11)
    with pytest.raises(InputError, match="at least 1 prompt, got 0"):
        make_loader(10, 0)
    with pytest.raises(InputError, match="0 or more, got -1"):
        make_loader(seed=-1)
    assert take(make_loader(10, 11, drop_last=False, shuffle=False), 1) == [list(range(10))]
