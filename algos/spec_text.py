"""Specs written as one word, ``name:key=value:key=value``: none of their characters mean anything to a shell or YAML.

A list is written ``key=a,b``; ``%3A`` stands for a colon inside a value, ``%2C`` for a comma.
"""

import difflib
from collections.abc import Iterable, Sequence
from urllib.parse import unquote

from algos.errors import InputError

Scalar = str | int | float | bool | None
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "none": None, "null": None}


def parse_options(pairs: Sequence[str], *, where: str, known: Iterable[str] | None = None) -> dict[str, str]:
    """The ``key=value`` parts of a spec as they were written; with ``known``, any other key is refused.

    Raises:
        InputError: a part has no ``=``, a key comes twice or is unknown (the nearest known one is offered).
    """
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InputError(f"{where}: expected key=value, got {pair!r}")
        if key in options:
            raise InputError(f"{where}: {key!r} is given twice; keep one")
        if known is not None and key not in set(known):
            raise InputError(
                f"{where}: no such key {key!r}{nearest(key, known)}; it may be one of {', '.join(sorted(known))}"
            )
        options[key] = value
    return options


def parse_scalar(text: str) -> Scalar:
    """A value as an int, float, bool or None where it reads as one, and as text otherwise."""
    text = unquote(text)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def parse_list(text: str) -> list[Scalar]:
    """A comma-separated list of scalars."""
    return [parse_scalar(item) for item in text.split(",")]


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known word that is closest, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
