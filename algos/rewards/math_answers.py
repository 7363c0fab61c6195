"""The reward for mathematics: answers that mean the same are equal, however they are written.

Runs in a worker process only (`algos.rewards.pool`): some expressions keep a computer-algebra system busy for ever.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Eq

# It warns on every call without its own timeout, which is an alarm that cannot interrupt arithmetic; the pool's can.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_COMMAND = re.compile(r"\\[A-Za-z]+")
_TEXT_GROUP = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z]{4,}")
_FUNCTIONS = {"sqrt", "sinh", "cosh", "tanh", "asin", "acos", "atan", "arcsin", "arccos", "arctan", "infty"}
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float] | None:
    """1 for a response whose answer equals the ground truth, else 0; None where the ground truth can't be read.

    The answer is the last ``\\boxed{}``; without one, what math-verify takes for the answer in the text. A ground truth
    that is one word, or only ``\\text{}``, is compared as text with the box; one with words in it besides mathematics
    is unreadable, since as mathematics it would be a product of letters.
    """
    gold_text = "" if ground_truth is None else _last_box(str(ground_truth)) or str(ground_truth).strip().strip("$")
    words = _as_text(gold_text)
    gold = () if words is not None else _parse_gold(gold_text)
    if words is None and not gold:
        return None
    box = _last_box(solution_str)
    if words is not None:
        right = box is not None and _squeeze(_TEXT_GROUP.sub(r"\1", box)) == words
    else:
        answer = _answer_text(solution_str, box, is_equation=any(isinstance(item, Eq) for item in gold))
        right = bool(answer) and verify(list(gold), list(_parse(answer)), timeout_seconds=None)
    return {"score": float(right), "accuracy": float(right), "format": float(box is not None)}


def _as_text(gold: str) -> str | None:
    """The ground truth as squeezed text where it is words and not mathematics."""
    if re.fullmatch(r"[A-Za-z]{4,}", gold) and gold not in _FUNCTIONS:
        return _squeeze(gold)
    groups = _TEXT_GROUP.fullmatch(gold)
    return _squeeze(groups[1]) if groups and re.search(r"[A-Za-z]", groups[1]) else None


def _squeeze(text: str) -> str:
    return re.sub(r"[^\w]+", " ", text).strip().casefold()


@lru_cache(maxsize=1024)
def _parse_gold(gold: str) -> tuple[Any, ...]:
    bare = _COMMAND.sub(" ", _TEXT_GROUP.sub(" ", gold))
    if any(word not in _FUNCTIONS for word in _WORD.findall(bare)):
        return ()
    return tuple(_parse(f"${gold}$")) or tuple(_parse(gold))


def _parse(text: str) -> list[Any]:
    found: list[Any] = parse(
        text, [LatexExtractionConfig(), ExprExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )
    return found


def _answer_text(response: str, box: str | None, *, is_equation: bool) -> str:
    """What to parse of a response. An unmarked equation is taken whole: its right side alone is often just 0."""
    if box is not None:
        return f"\\boxed{{{box}}}"
    if is_equation and "$" not in response and "\\[" not in response and "\\(" not in response:
        return f"${_last_equation(response)}$"
    return response


def _last_equation(text: str) -> str:
    """The last run of tokens with an equals sign in it that no word interrupts."""
    runs: list[list[str]] = [[]]
    for token in re.findall(r"\S+|\n", text):
        if token == "\n" or re.fullmatch(r"[*`(]*[A-Za-z]{2,}[*`).,:;]*", token):
            runs.append([])
        else:
            runs[-1].append(token)
    equations = [" ".join(run) for run in runs if any("=" in token for token in run)]
    return equations[-1].strip("*`.,;: ") if equations else ""


def _last_box(text: str) -> str | None:
    """What the last complete ``\\boxed{}`` holds, or None."""
    for start in reversed([match.end() for match in _BOX.finditer(text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None
