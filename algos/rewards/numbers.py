"""Reading the final number out of a response, as an exact fraction."""

import re
from decimal import Decimal
from fractions import Fraction

MARKER = "####"

# What may stand between a marker or a sign and its number: blanks, markdown, currency, TeX's $ \$ \( { and a box. It
# never gives back what it took (*+), so that the search stays linear in any text.
_DECORATION = r"(?:[\s*_`~$€£¥({\[]|\\[$(\[{!,]|\\boxed|\\text\w*+)*+"
# Digits with or without thousands commas, decimals, an exponent or a denominator; never a part of a longer number.
_DIGITS = (
    r"(?P<digits>(?:(?:\d{1,3}(?:,\d{3}){1,12}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,2})?)"
    r"(?:/(?P<denominator>[1-9]\d*))?"
    r"(?![\d^/]|[.,]\d|[eE]\d|(?:st|nd|rd|th)\b)"
)
# A sign counts only where a number begins: in "7-4" the minus is an operator. "H2" and "2nd" are words.
_SIGN = r"(?:(?<!\))(?P<sign>[-+])[$€£¥]?|[$€£¥](?P<inner>[-+]))?"
_NUMBER = re.compile(rf"(?<![\w./^]){_SIGN}{_DIGITS}")
_MARKED = re.compile(rf"(?<!#){MARKER}(?!#){_DECORATION}(?P<sign>[-+])?{_DECORATION}{_DIGITS}")
_WHOLE = re.compile(rf"\s*(?P<sign>[-+])?{_DIGITS}\s*")


def after_marker(text: str) -> Fraction | None:
    """The number right after the last ``####`` that has one, or None; markdown, ``$`` and commas are no bar."""
    found = _last_match(_MARKED, text)
    return None if found is None else _value(found["sign"], found)


def last_number(text: str) -> Fraction | None:
    """The last number in a text, or None. A lone comma or full stop is no number, "72." is 72, "3/4" is one number."""
    found = _last_match(_NUMBER, text)
    return None if found is None else _value(found["sign"] or found["inner"], found)


def whole_number(text: str) -> Fraction | None:
    """The number that a text consists of, blanks aside, or None: "7", "-1,200" and "7.50" are, "7 apples" is not."""
    found = _WHOLE.fullmatch(_plain(text))
    return None if found is None else _value(found["sign"], found)


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(_plain(text)):
        last = match
    return last


def _plain(text: str) -> str:
    """TeX's thousands separators as commas, and the typographic minus as a hyphen."""
    return text.replace("{,}", ",").replace("\\!", "").replace("\u2212", "-").replace("\\$", "$")


def _value(sign: str | None, found: re.Match[str]) -> Fraction:
    value = Fraction(Decimal(found["digits"].replace(",", ""))) / int(found["denominator"] or 1)
    return -value if sign == "-" else value
