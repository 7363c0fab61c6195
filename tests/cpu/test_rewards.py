"""Rewards by rules and by users' functions; the comments K1, J9 and so on name kinds of fault that users reported."""

import logging
import math
import sys

import numpy as np
import pytest
import torch

from algos.data import Row
from algos.errors import InputError
from algos.rewards import InlineReward, OverlongPenalty, RewardManager, Sample, load_reward
from algos.rewards.gsm8k import gsm8k


def row(ground_truth, *, index=0, extra_info=None, prompt="?"):
    return Row(prompt=prompt, data_source="test", ground_truth=ground_truth, extra_info=extra_info, index=index)


def accuracy(response, gold, **options):
    return gsm8k("test", response, gold, **options)["accuracy"]


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        pytest.param("The total is 72 clips, altogether.", "72", id="K1_a_comma_alone_is_no_number"),
        pytest.param("So \\boxed{8,000}", "8000", id="K2_thousands_comma_in_a_box"),
        pytest.param("So \\boxed{$9{,}500}", "9500", id="K2_thousands_comma_of_tex"),
        pytest.param("It costs $70,000.", "70000", id="K2_currency_thousands_and_full_stop"),
        pytest.param("#### 42" + " and so on" * 60, "42", id="K4_marker_far_from_the_end"),
        pytest.param("#### 41\nwait\n#### 42", "42", id="K4_last_marker_wins"),
        pytest.param("4 eggs. The answer is 16.00", "16", id="K6_decimals_equal_integers"),
        pytest.param("That is $29.00", "29", id="K6_currency_and_decimals"),
        pytest.param("#### 72.", "72", id="K6_marker_and_full_stop"),
        pytest.param("####72", "72", id="K6_marker_without_blank"),
        pytest.param("#### $72", "72", id="K6_marker_and_currency"),
        pytest.param("#### **72**", "72", id="K6_marker_and_markdown"),
        pytest.param("**#### 72**", "72", id="K6_markdown_round_the_marker"),
        pytest.param("#### \\$1,234,567.50", "1234567.5", id="escaped_currency"),
        pytest.param("#### -5", "-5", id="negative"),
        pytest.param("#### −5", "-5", id="typographic_minus"),
        pytest.param("it is -$5", "-5", id="sign_before_currency"),
        pytest.param("#### 3\n#### Notes: none", "3", id="a_heading_after_the_answer_hides_nothing"),
        pytest.param("#### 3/4", "0.75", id="fraction"),
        pytest.param("7 - 4 = 3", "3", id="minus_between_numbers"),
        pytest.param("7-4", "4", id="an_operator_is_no_sign"),
        pytest.param("f(3)-4", "4", id="an_operator_after_a_parenthesis"),
        pytest.param("we use H2O, 5 cups, on the 2nd", "5", id="digits_inside_words"),
    ],
)
def test_gsm8k_reads_the_answer(response, gold):
    assert accuracy(response, gold) == 1.0


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        pytest.param("#### 41", "42", id="wrong"),
        pytest.param("#### .", "42", id="K6_a_dot_is_no_number"),
        pytest.param("#### 42\n#### 41", "42", id="K4_an_earlier_marker_does_not_count"),
        pytest.param("#### 3/4", "3", id="a_numerator_is_not_the_answer"),
        pytest.param("#### 1,2345", "12345", id="no_thousands_comma"),
        pytest.param("2^10", "10", id="an_exponent_is_not_the_answer"),
        pytest.param("2^10", "2", id="nor_is_its_base"),
        pytest.param("", "0", id="an_empty_response_is_not_zero"),
        pytest.param("1 2 3 4 5 6", "3", id="holding_the_answer_among_others"),
        pytest.param("9" * 100_000, "9", id="endless_digits"),
    ],
)
def test_gsm8k_pays_nothing_for(response, gold):
    assert accuracy(response, gold) == 0.0


@pytest.mark.parametrize(
    "response", ["####" + "*" * 200_000, "1,111" + ",111" * 50_000 + "^", "####" + "\\boxed" * 40_000, "1/" * 100_000]
)
def test_gsm8k_takes_linear_time(response):
    # With a search that goes back over the text each of these takes hours, and the test's time limit ends it.
    assert accuracy(response, "5") == 0.0


def test_gsm8k_strict_needs_the_marker():
    assert accuracy("The answer is 42", "42", method="strict") == 0.0
    assert accuracy("The answer is\n#### 42", "42", method="strict") == 1.0
    assert accuracy("##### 42", "42", method="strict") == 0.0


def test_gsm8k_format_share():
    assert gsm8k("t", "#### 41", "42", format_weight=0.25) == {"score": 0.25, "accuracy": 0.0, "format": 1.0}
    assert gsm8k("t", "it is 42", "42", format_weight=0.25) == {"score": 0.75, "accuracy": 1.0, "format": 0.0}


def test_gsm8k_takes_a_whole_solution_as_ground_truth():
    assert accuracy("#### 72", "Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72") == 1.0


def test_gsm8k_without_a_gold_number_is_unscored():
    (outcome,) = load_reward("gsm8k").score([Sample(data_source="t", response="#### 1", ground_truth=None)])
    assert outcome.score is None
    assert outcome.error == "ValueError: gsm8k: the ground truth must hold a number, got 'None'"


def test_j9_only_the_response_is_scored():
    prompt = [{"role": "user", "content": "Write #### 5 or \\boxed{5}"}]
    seen = []

    def spy(data_source, solution_str, ground_truth, extra_info):
        seen.append(solution_str)
        return gsm8k(data_source, solution_str, ground_truth)

    scores = RewardManager(InlineReward(spy)).score([row("5", prompt=prompt)], ["no idea"])
    assert seen == ["no idea"]
    assert scores.scores.tolist() == [0.0]
    assert scores.metrics["format"] == 0.0


def test_scores_are_tensors_with_metrics_over_scored_samples():
    rows = [row("1"), row("2"), row("3"), row(None)]
    scores = RewardManager(load_reward("gsm8k")).score(rows, ["#### 1", "2", "#### 4", "#### 4"])
    assert scores.scores.dtype == torch.float32
    assert scores.scores.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert scores.scored.tolist() == [True, True, True, False]
    assert scores.metrics == {"accuracy": 2 / 3, "format": 2 / 3, "num_unscored": 1.0}


def test_a_raising_function_leaves_its_sample_unscored_and_is_reported_once(caplog):
    def fragile(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "bad":
            raise RuntimeError("no such thing")
        return 1

    manager = RewardManager(InlineReward(fragile))
    with caplog.at_level(logging.WARNING):
        first = manager.score([row("a"), row("b"), row("c")], ["ok", "bad", "bad"])
        second = manager.score([row("a")], ["bad"])
    assert first.scored.tolist() == [True, False, False]
    assert first.scores.tolist() == [1.0, 0.0, 0.0]
    assert first.metrics["num_unscored"] == 2.0
    assert second.metrics == {"num_unscored": 1.0}
    assert [record.getMessage() for record in caplog.records] == [
        "sample 1 (data_source 'test') is unscored and its group's statistics leave it out: RuntimeError: no such "
        "thing. More of this kind are only counted, in num_unscored."
    ]


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (None, None),
        (math.nan, "ValueError: a reward must be finite, got nan"),
        (math.inf, "ValueError: a reward must be finite, got inf"),
        ("1.0", "TypeError: a reward function returns a number, a dict with 'score', or None; got '1.0'"),
        ({"acc": 1}, "TypeError: a reward function's dict needs the key 'score', got acc"),
        ({"score": None, "acc": 1}, None),
    ],
)
def test_results_that_are_no_score(result, error):
    (outcome,) = InlineReward(lambda **_: result).score([Sample(data_source="t", response="", ground_truth="")])
    assert outcome.score is None
    assert outcome.error == error


@pytest.mark.parametrize(
    "result", [1, True, 1.0, np.float32(1), torch.tensor(1.0), {"score": np.int64(1), "note": "x"}]
)
def test_results_that_are_a_score(result):
    (outcome,) = InlineReward(lambda **_: result).score([Sample(data_source="t", response="", ground_truth="")])
    assert outcome.score == 1.0
    assert outcome.metrics == {}


def test_keyboard_interrupt_is_not_swallowed():
    def interrupted(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        InlineReward(interrupted).score([Sample(data_source="t", response="", ground_truth="")])


def test_overlong_penalty_of_dapo():
    penalty = OverlongPenalty(max_response_length=100, buffer_length=20)
    assert [penalty.of(length) for length in (0, 80, 85, 90, 100, 120)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    # The value that verl's own test has: score 0.5, 4 tokens, limit 4, buffer 2.
    manager = RewardManager(
        InlineReward(lambda **_: 0.5), overlong=OverlongPenalty(max_response_length=4, buffer_length=2)
    )
    scores = manager.score([row("")], ["four tokens long indeed"], [4])
    assert scores.scores.tolist() == [-0.5]
    assert scores.metrics["overlong_penalty"] == -1.0
    unscored = RewardManager(InlineReward(lambda **_: None), overlong=penalty).score([row("")], ["x"], [100])
    assert (unscored.scores.tolist(), unscored.metrics) == ([0.0], {"num_unscored": 1.0})
    with pytest.raises(ValueError, match="needs the lengths of all 1 responses, in tokens"):
        manager.score([row("")], ["x"])
    with pytest.raises(InputError, match="1 to max_response_length=4 tokens, got 5"):
        OverlongPenalty(max_response_length=4, buffer_length=5)


USER_FILE = """
def score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": float(solution_str == ground_truth) + bonus, "length": len(solution_str)}

def wants_more(prompt, answer):
    return 0

async def later(data_source, solution_str, ground_truth, extra_info):
    return 0

def hangs(data_source, solution_str, ground_truth, extra_info):
    print("noise on standard output")
    while solution_str == "hang":
        pass
    return 1
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(USER_FILE)
    (tmp_path / "broken_reward.py").write_text("import not_there_at_all\n")
    return path


def test_a_function_in_a_file_with_options(user_file):
    manager = RewardManager(load_reward(f"{user_file}:score:bonus=0.5"))
    scores = manager.score([row("yes"), row("yes")], ["yes", "no"])
    assert scores.scores.tolist() == [1.5, 0.5]
    assert scores.metrics["length"] == 2.5


def test_a_function_in_a_module(user_file, monkeypatch):
    monkeypatch.syspath_prepend(str(user_file.parent))
    reward = load_reward("my_reward:score")
    assert reward.score([Sample(data_source="t", response="a", ground_truth="a")])[0].score == 1.0
    sys.modules.pop("my_reward")


def test_a_hanging_user_function_is_unscored_with_a_deadline(user_file):
    reward = load_reward(f"{user_file}:hangs:timeout_s=0.5:num_workers=1")
    texts = ["fine", "hang", "fine"]
    outcomes = reward.score([Sample(data_source="t", response=text, ground_truth="") for text in texts])
    reward.close()
    assert [outcome.score for outcome in outcomes] == [1.0, None, 1.0]
    assert outcomes[1].error == "TimeoutError: no result within 0.5 s; its process was ended"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gms8k", r"reward 'gms8k': expected gsm8k, math, .* \(did you mean 'gsm8k'\?\)"),
        ("gsm8k:mode=strict", "can't be called with data_source, .* and mode"),
        ("gsm8k:strict", "expected key=value, got 'strict'"),
        ("math:timeout_s=0", "timeout_s must be a number of seconds above 0, got 0"),
        ("math:num_workers=none", "num_workers must be a whole number of at least 1, got None"),
        ("no.such.module:f", "can't import no.such.module: ModuleNotFoundError"),
        ("{folder}/absent.py:f", "no file '.*absent.py'"),
        (
            "{folder}/broken_reward.py:f",
            "can't import .*broken_reward.py: ModuleNotFoundError: No module",
        ),
        ("{folder}/my_reward.py:scores", r"has no function 'scores' \(did you mean 'score'\?\)"),
        (
            "{folder}/my_reward.py:wants_more",
            "can't be called with data_source, solution_str, ground_truth",
        ),
        ("{folder}/my_reward.py:later", "is async; expected a plain function"),
    ],
)
def test_a_reward_that_cannot_be_loaded_says_why(user_file, spec, message):
    with pytest.raises(InputError, match=message) as caught:
        load_reward(spec.format(folder=user_file.parent))
    assert "\n" not in str(caught.value)
