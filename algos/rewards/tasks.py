"""The reward for reasoning-gym's tasks: the task's own scorer, with the ways round it closed.

Runs in a worker process only (`algos.rewards.pool`): some of those scorers evaluate the answer as Python or SymPy.
"""

import ast
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, get_args

from algos.data.tasks import TaskSpec, make_task
from algos.rewards.numbers import MARKER, last_number, whole_number

Format = Literal["none", "number", "tags"]
Extract = Literal["whole", "last_number"]

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")

# Tasks whose scorer hands the answer to eval() or to SymPy's parser, which evaluates names and attributes too.
_PYTHON_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
_EXPRESSIONS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
_EXPRESSION_NAMES = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "pi", "Abs"),
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def reasoning_gym(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    format: Format = "none",
    format_weight: float = 0.5,
    extract: Extract = "whole",
    partial: bool = False,
) -> dict[str, float]:
    """The share ``format_weight`` of the score for the form that was asked for, the rest for the right answer; without
    a ``format`` all of it is for the answer.

    ``format``: ``number`` asks for a bare number and nothing else, ``tags`` for one ``<answer>...</answer>``, last.
    The answer is the last ``<answer>``, else the last ``\\boxed{}``, else what follows the last "####" on its line,
    else the whole response, or with ``extract="last_number"`` the last number in it. It is right where the task's own
    scorer gives it full marks; ``partial`` lets that scorer's part marks through, though never for holding the right
    answer among other text.

    Raises:
        ValueError: the row was not made by a ``reasoning_gym:`` data spec, or the installed version makes another task
            of it, or an option is unknown.
    """
    _check_option("format", format, get_args(Format))
    _check_option("extract", extract, get_args(Extract))
    task, entry, name = _entry_of(ground_truth, extra_info)
    right = _rate(task, entry, name, _extract(solution_str, extract), partial=partial)
    metrics = {"accuracy": float(right == 1.0)}
    if format == "none":
        return {"score": right, **metrics}
    formatted = float(_has_format(solution_str, format))
    return {"score": format_weight * formatted + (1 - format_weight) * right, "format": formatted, **metrics}


def _check_option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"reasoning_gym: {name} must be one of {', '.join(allowed)}, got {value!r}")


def _entry_of(ground_truth: Any, extra_info: dict[str, Any] | None) -> tuple[Any, dict[str, Any], str]:
    source = (extra_info or {}).get("reasoning_gym")
    if not isinstance(source, dict):
        raise ValueError(
            "reasoning_gym: extra_info lacks 'reasoning_gym' with task, options and entry_idx; "
            "this reward is for rows that a reasoning_gym:NAME data spec makes"
        )
    task = _task(source["task"], json.dumps(source["options"], sort_keys=True))
    entry = task[source["entry_idx"]]
    if str(entry["answer"]) != str(ground_truth):
        raise ValueError(
            f"reasoning_gym: the installed version answers entry {source['entry_idx']} of {source['task']!r} with "
            f"{entry['answer']!r}, but the row says {ground_truth!r}; make the rows again"
        )
    return task, entry, source["task"]


@lru_cache(maxsize=64)
def _task(name: str, options: str) -> Any:
    return make_task(TaskSpec(name, json.loads(options)))


def _extract(response: str, extract: Extract) -> str:
    tagged = _TAGGED.findall(response) or _BOXED.findall(response)
    if tagged:
        return str(tagged[-1]).strip()
    if MARKER in response:
        after = response.rpartition(MARKER)[2].strip().splitlines()
        return after[0].strip(" *$") if after else ""
    if extract == "last_number":
        number = last_number(response)
        return "" if number is None else str(number)
    return response.strip()


def _has_format(response: str, format: Format) -> bool:
    if format == "number":
        return whole_number(response) is not None
    return len(_TAGGED.findall(response)) == 1 and response.rstrip().endswith("</answer>")


def _rate(task: Any, entry: dict[str, Any], name: str, answer: str, *, partial: bool) -> float:
    if not answer or not _is_safe(name, answer):
        return 0.0
    rating = min(1.0, max(0.0, float(task.score_answer(_as_gold_writes(answer, str(entry["answer"])), entry))))
    if rating == 1.0:
        return float(name not in _GUARDS or _GUARDS[name](answer, entry["metadata"]))
    return rating if partial and str(entry["answer"]) not in answer else 0.0


def _as_gold_writes(answer: str, gold: str) -> str:
    """The gold's own spelling of the same number ("5" for "5.0", "1000" for "1,000"); many scorers compare text."""
    value = whole_number(gold)
    same = value is not None and gold == str(value) and whole_number(answer) == value
    return gold if same and not re.match(r"[-+]?0\d", answer) else answer


def _is_safe(name: str, answer: str) -> bool:
    """Whether a scorer that evaluates answers may see this one: a literal, or arithmetic on single letters."""
    if name in _PYTHON_LITERALS and "[" in answer:
        return _literal(answer) is not None
    if name in _EXPRESSIONS:
        words = re.findall(r"[^\W\d]\w*", answer)
        plain = not re.search(r"__|[\"'\\\[\]{}:;@]|\.\s*[^\W\d]", answer)
        return plain and all(len(word) == 1 or word in _EXPRESSION_NAMES for word in words)
    return True


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _uses_numbers(answer: str, numbers: list[int], target: int) -> bool:
    """Whether an expression of + - * / uses exactly these numbers, as often as given, and equals the target."""
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
        constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        used = sorted(value for value in constants if isinstance(value, int))
        return used == sorted(numbers) and _evaluate(tree) == target
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError, MemoryError, RecursionError):
        return False


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError(f"not plain arithmetic: {ast.dump(node)[:80]}")


# Conditions that these tasks' own scorers miss: they round to an integer or compare with a tolerance.
_GUARDS: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    "countdown": lambda answer, meta: _uses_numbers(answer, meta["numbers"], meta["target"]),
    "puzzle24": lambda answer, meta: _uses_numbers(answer, meta["numbers"], 24),
}
