"""Rewards that run in worker processes: mathematics and reasoning-gym's tasks."""

import re
import subprocess
from pathlib import Path

import pytest

from algos.data import DataSpec, load_rows
from algos.rewards import RewardManager, Sample, load_reward
from algos.rewards.tasks import reasoning_gym

TOWER = r"\frac{1}{5^{5^{5^{5^{5}}}}}"


@pytest.fixture(scope="module")
def reward():
    made = load_reward("math:timeout_s=30:num_workers=2")
    yield made
    made.close()


def score(reward, response, gold):
    (outcome,) = reward.score([Sample(data_source="t", response=response, ground_truth=gold)])
    return outcome.score


RIGHT = [
    pytest.param("Final Answer: **73**", "73", id="K15_bold_markdown"),
    pytest.param(r"So \boxed{8,000}", "8000", id="K2_thousands_comma"),
    pytest.param(r"So \boxed{$9{,}500}", "9500", id="K2_thousands_comma_of_tex"),
    pytest.param("The line is 3x-y+13=0.", "3x-y+13=0", id="K8_the_same_equation"),
    pytest.param(r"\boxed{6x-2y+26=0}", "3x-y+13=0", id="K8_a_multiple_of_the_equation"),
    pytest.param(r"first \boxed{1}, no: \boxed{\frac{1}{2}}", "0.5", id="last_box_wins"),
    pytest.param(r"\boxed{(x+1)^2}", "x^2+2x+1", id="algebra"),
    pytest.param(r"\boxed{\text{East}}", r"\text{east}", id="words"),
    pytest.param(r"\boxed{5}", 5, id="a_gold_that_is_a_number"),
    pytest.param(r"\boxed{7}", r"so the answer is \boxed{7}", id="a_gold_that_is_a_solution"),
]
WRONG = [
    pytest.param("3x+4y+14=0", "3x-y+13=0", id="K8_another_equation"),
    pytest.param("$3x+4y+14=0$", "3x-y+13=0", id="K8_another_equation_marked"),
    pytest.param("0", "3x-y+13=0", id="K8_a_right_side_alone"),
    pytest.param(r"\boxed{2}, or \boxed{3}", "2", id="an_earlier_box"),
    pytest.param("it lies in the west", "east", id="words_without_a_box"),
    pytest.param(r"\boxed{tase}", "east", id="a_word_is_no_product_of_letters"),
    pytest.param("", "4", id="empty"),
]


@pytest.mark.parametrize(("response", "gold"), RIGHT)
def test_math_right(reward, response, gold):
    assert score(reward, response, gold) == 1.0


@pytest.mark.parametrize(("response", "gold"), WRONG)
def test_math_wrong(reward, response, gold):
    assert score(reward, response, gold) == 0.0


@pytest.mark.parametrize("gold", ["free text", "There are 5 apples", "", None])
def test_k11_an_unreadable_gold_is_unscored_and_never_paid(reward, gold):
    assert score(reward, str(gold), gold) is None


def test_k9_a_hanging_expression_gets_zero_at_the_deadline_and_harms_no_other():
    reward = load_reward("math:timeout_s=1.5:num_workers=1")
    texts = [r"\boxed{4}", f"\\boxed{{{TOWER}}}", r"\boxed{4}"]
    samples = [Sample(data_source="t", response=text, ground_truth="4") for text in texts]
    outcomes = reward.score(samples)
    reward.close()
    assert [outcome.score for outcome in outcomes] == [1.0, 0.0, 1.0]
    assert outcomes[1].metrics["timeout"] == 1.0


def test_k9_a_hanging_gold_is_unscored():
    reward = load_reward("math:timeout_s=1:num_workers=1")
    (outcome,) = reward.score([Sample(data_source="t", response=r"\boxed{1}", ground_truth=TOWER)])
    reward.close()
    assert outcome.score is None
    assert outcome.error == "TimeoutError: the ground truth itself gives no result within 1 s; its process was ended"


def test_a_worker_that_ended_while_idle_costs_no_sample(reward):
    assert score(reward, r"\boxed{4}", "4") == 1.0
    for worker in reward._workers:
        subprocess.run(["kill", "-9", str(worker.process.pid)], check=True)
        worker.process.wait()
    assert score(reward, r"\boxed{4}", "4") == 1.0


def test_after_an_interrupt_no_late_reply_is_taken_for_another_samples(reward, monkeypatch):
    assert score(reward, r"\boxed{4}", "4") == 1.0

    def interrupt(outcomes):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(reward, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            score(reward, r"\boxed{4}", "4")
    assert score(reward, r"\boxed{5}", "4") == 0.0


def test_closing_ends_every_process():
    reward = load_reward("math:num_workers=2")
    processes = [worker.process for worker in reward._workers]
    assert len(processes) == 2
    reward.close()
    reward.close()
    assert all(process.poll() is not None for process in processes)


ADDITION = (
    "reasoning_gym:basic_arithmetic:min_terms=2:max_terms=2:min_digits=1:max_digits=2:operators=+"
    ":allow_parentheses=false:size=8:seed=1"
)


@pytest.fixture(scope="module")
def sums():
    rows = load_rows(DataSpec(files=(ADDITION,), prompt_template="What is {expression}? Answer with the number only."))
    assert rows[0].prompt == "What is 4 + 1? Answer with the number only."
    assert rows[0].ground_truth == "5"
    return rows


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("5", 1.0),
        (" 5\n", 1.0),
        ("5.0", 1.0),
        ("05", 0.5),
        ("6", 0.5),
        ("15", 0.5),
        ("4 + 1 = 5", 0.0),
        ("5 6 7", 0.0),
        ("The answer is 5.", 0.0),
        ("", 0.0),
    ],
)
def test_half_for_a_bare_number_and_half_for_the_right_one(sums, response, expected):
    row = sums[0]
    result = reasoning_gym(row.data_source, response, row.ground_truth, row.extra_info, format="number")
    assert result["score"] == expected


@pytest.mark.parametrize(
    ("response", "score", "format"),
    [
        pytest.param("<think>4+1</think><answer>5</answer>", 1.0, 1.0, id="K14_no_final_newline_needed"),
        pytest.param("<answer>5</answer> and more", 0.5, 0.0, id="text_behind_the_tags"),
        pytest.param("<answer>4</answer><answer>5</answer>", 0.5, 0.0, id="two_answers_last_wins"),
        pytest.param("<answer>4</answer>", 0.5, 1.0, id="formatted_and_wrong"),
    ],
)
def test_tags(sums, response, score, format):
    row = sums[0]
    result = reasoning_gym(row.data_source, response, row.ground_truth, row.extra_info, format="tags")
    assert (result["score"], result["format"]) == (score, format)


def test_no_part_marks_for_the_answer_among_others(sums):
    row = sums[0]
    for response in ("1 2 3 4 5 6 7 8 9", "15", "the 5"):
        for partial in (False, True):
            result = reasoning_gym(row.data_source, response, row.ground_truth, row.extra_info, partial=partial)
            assert result["score"] == 0.0, response


def test_last_number_where_asked(sums):
    row = sums[0]
    found = reasoning_gym(row.data_source, "4 + 1 = 5.", row.ground_truth, row.extra_info, extract="last_number")
    assert found == {"score": 1.0, "accuracy": 1.0}


def test_a_row_of_another_origin_is_an_error():
    with pytest.raises(ValueError, match="extra_info lacks 'reasoning_gym'"):
        reasoning_gym("t", "5", "5", None)


def test_a_row_of_another_version_is_an_error(sums):
    with pytest.raises(ValueError, match=r"the installed version answers entry 0 .* with '5', but the row says '77'"):
        reasoning_gym("t", "5", "77", sums[0].extra_info)


def test_an_unknown_option_is_an_error(sums):
    with pytest.raises(ValueError, match="format must be one of none, number, tags, got 'json'"):
        reasoning_gym("t", "5", "5", sums[0].extra_info, format="json")


class FixedTask:
    """reasoning-gym's own scorer of a task on an entry of our choice."""

    def __init__(self, name, entry):
        from reasoning_gym import create_dataset

        self.entry, self.score_answer = entry, create_dataset(name, seed=0).score_answer

    def __getitem__(self, entry_idx):
        return self.entry


def rate(monkeypatch, name, answer, **metadata):
    task = FixedTask(name, {"answer": "x", "metadata": metadata})
    monkeypatch.setattr("algos.rewards.tasks._task", lambda *_: task)
    source = {"reasoning_gym": {"task": name, "options": {}, "entry_idx": 0}}
    return reasoning_gym(name, answer, "x", source)["score"]


@pytest.mark.parametrize(
    ("answer", "numbers", "target", "expected"),
    [
        pytest.param("81*1", [1, 81, 1, 1], 81, 0.0, id="K12_each_number_as_often_as_given"),
        pytest.param("11/2", [11, 2], 5, 0.0, id="K12_a_value_is_not_cut_to_an_integer"),
        pytest.param("100000/3", [100000, 3], 33333, 0.0, id="K12_nor_compared_with_a_tolerance"),
        pytest.param("81*1*1*1", [1, 81, 1, 1], 81, 1.0, id="all_numbers"),
        pytest.param("(7 - 2) * 3", [2, 3, 7], 15, 1.0, id="parentheses"),
        pytest.param("2**3", [2, 3], 8, 0.0, id="powers_are_not_allowed"),
        pytest.param("7/(3-3)", [3, 3, 7], 8, 0.0, id="division_by_zero"),
    ],
)
def test_k12_countdown(monkeypatch, answer, numbers, target, expected):
    assert rate(monkeypatch, "countdown", answer, numbers=numbers, target=target) == expected


@pytest.mark.parametrize(
    ("answer", "numbers", "expected"),
    [
        pytest.param("(5 - 1) * 6 * 1", [1, 1, 5, 6], 1.0, id="right"),
        pytest.param("(5 - 1) * 6 * 1", [1, 2, 5, 6], 0.0, id="K12_other_numbers"),
        pytest.param("7 * 7 / 2 * 1", [1, 2, 7, 7], 0.0, id="K12_24.5_is_not_24"),
    ],
)
def test_k12_puzzle24(monkeypatch, answer, numbers, expected):
    assert rate(monkeypatch, "puzzle24", answer, numbers=numbers) == expected


@pytest.mark.parametrize(
    "answer", ["__import__('os').getpid() * 0 + 8", "open(x)", "(2).real*4", "eval(chr(56))", "[8][0]", "exit()"]
)
def test_answers_are_not_run_as_programs(monkeypatch, answer):
    called = []
    task = FixedTask("countdown", {"answer": "x", "metadata": {"numbers": [8], "target": 8}})
    task.score_answer = lambda *_: called.append(1) or 1.0
    monkeypatch.setattr("algos.rewards.tasks._task", lambda *_: task)
    source = {"reasoning_gym": {"task": "countdown", "options": {}, "entry_idx": 0}}
    assert reasoning_gym("t", answer, "x", source)["score"] == 0.0
    assert not called


def test_reasoning_gym_in_its_workers(sums):
    manager = RewardManager(load_reward("reasoning_gym:format=number:num_workers=1:timeout_s=30"))
    scores = manager.score(sums[:4], ["5", "7", "I think 14", "105"])
    manager.close()
    assert scores.scores.tolist() == [1.0, 0.5, 0.0, 1.0]
    assert scores.metrics == {"format": 0.75, "accuracy": 0.5, "num_unscored": 0.0}


def test_the_examples_of_the_page_on_data_run(monkeypatch):
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs" / "data.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(compile(block, "docs/data.md", "exec"), names)
    assert {"rows", "sums", "manager", "scores"} <= set(names)
