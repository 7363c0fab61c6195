"""The reward for GSM8K and other problems whose answer is one number."""

from fractions import Fraction
from typing import Any, Literal, get_args

from algos.rewards.numbers import MARKER, after_marker, last_number

Method = Literal["flexible", "strict"]


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Method = "flexible",
    format_weight: float = 0.0,
) -> dict[str, float]:
    """``format_weight`` * (a number follows "####") + (1 - ``format_weight``) * (the answer is right).

    The answer is the number right after the last "####" that has one; ``flexible`` takes the last number in the text
    where there is no such marker, ``strict`` takes none. Numbers are compared exactly: 29.00 is 29, and 1,000 is 1000.

    Raises:
        ValueError: the ground truth holds no number, or ``method`` is unknown.
    """
    if method not in get_args(Method):
        raise ValueError(f"gsm8k: method must be one of {', '.join(get_args(Method))}, got {method!r}")
    gold = _gold(ground_truth)
    marked = after_marker(solution_str)
    answer = last_number(solution_str) if marked is None and method == "flexible" else marked
    right, formatted = float(answer == gold), float(marked is not None)
    return {
        "score": format_weight * formatted + (1 - format_weight) * right,
        "accuracy": right,
        "format": formatted,
    }


def _gold(ground_truth: Any) -> Fraction:
    text = str(ground_truth)
    gold = after_marker(text) if MARKER in text else last_number(text)
    if gold is None:
        raise ValueError(f"gsm8k: the ground truth must hold a number, got {text[:60]!r}")
    return gold
