"""Turn what a caller wrote into the type that a key declares."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from algos.errors import InputError

WORDS = {True: ("true", "yes", "on", "1"), False: ("false", "no", "off", "0")}


@dataclass(frozen=True, slots=True)
class KeySpec:
    """One key as declared in ``algos.config``: dotted name, type, default and rules."""

    name: str
    kind: Any
    default: Any
    rules: Mapping[str, Any]


def convert(spec: KeySpec, value: Any) -> Any:
    """Return ``value`` as the type of ``spec``; raise InputError where it does not fit or breaks the key's rules."""
    kind, optional = spec.kind, False
    if isinstance(kind, types.UnionType):
        kind, optional = next(arm for arm in get_args(kind) if arm is not type(None)), True
    if value is None or (isinstance(value, str) and value == "" and kind is not str):
        if optional or (value is None and kind is str):
            return None if optional else ""
        if get_origin(kind) is tuple:
            return ()
        raise InputError(f"{spec.name}: expected {_called(kind)}, got nothing")
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_scalar(spec.name, get_args(kind)[0], item) for item in items)
    converted = _scalar(spec.name, kind, value)
    _check_rules(spec, converted)
    return converted


def _scalar(name: str, kind: type, value: Any) -> Any:
    if kind is bool:
        return _boolean(name, value)
    fits = isinstance(value, str | int | float) and not isinstance(value, bool)
    if fits and kind is str:
        return str(value)
    try:
        number = float(value) if fits else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (kind is int and number != int(number)):
        raise InputError(f"{name}: expected {_called(kind)}, got {value!r}")
    return int(value) if kind is int and isinstance(value, int) else kind(number)


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    for meaning, words in WORDS.items():
        if str(value).lower() in words:
            return meaning
    raise InputError(f"{name}: expected true or false, got {value!r}")


def _called(kind: Any) -> str:
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(kind, "a list")


def _check_rules(spec: KeySpec, value: Any) -> None:
    rules = spec.rules
    if rules["choices"] and value not in rules["choices"]:
        raise InputError(f"{spec.name}: expected one of {', '.join(rules['choices'])}, got {value!r}")
    if rules["at_least"] is not None and value < rules["at_least"]:
        raise InputError(f"{spec.name}: expected {rules['at_least']} or more, got {value}")
    if rules["above"] is not None and value <= rules["above"]:
        raise InputError(f"{spec.name}: expected more than {rules['above']}, got {value}")
    if rules["at_most"] is not None and value > rules["at_most"]:
        raise InputError(f"{spec.name}: expected {rules['at_most']} or less, got {value}")
