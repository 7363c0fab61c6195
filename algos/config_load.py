"""Read a Config from dataclasses, mappings, OmegaConf, YAML files and ``key=value`` arguments."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from algos.config import Config
from algos.config_value import KeySpec, convert
from algos.config_verl import shorten
from algos.errors import InputError


@dataclass(frozen=True, slots=True)
class Loaded:
    """A Config and the names of the keys that the caller set."""

    config: Config
    given: frozenset[str]


def _walk(cls: type[Any], prefix: str) -> Iterator[KeySpec]:
    hints = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        name = prefix + item.name
        if dataclasses.is_dataclass(hints[item.name]):
            yield from _walk(hints[item.name], name + ".")
        else:
            yield KeySpec(name, hints[item.name], item.default, item.metadata)


@functools.cache
def known_keys() -> Mapping[str, KeySpec]:
    """Every key by its dotted name, in the order of ``--help``."""
    return {spec.name: spec for spec in _walk(Config, "")}


def load_config(source: Config | Mapping[str, Any] | DictConfig | None = None, args: Sequence[str] = ()) -> Loaded:
    """Build a Config from ``source`` (nested or dotted names) and then ``args`` (``key=value``, later ones win).

    ``config=FILE.yaml`` among the args is read before the others. Raises InputError for an unknown key, a value of the
    wrong type or out of range, and a file that can't be read.
    """
    raw: dict[str, Any] = {}
    if isinstance(source, Config):
        raw.update({name: value for name, value in to_flat(source).items() if value != known_keys()[name].default})
    elif source is not None:
        raw.update(_leaves(_plain(source)))
    pairs = [_split(arg) for arg in args]
    for name, text in pairs:
        if name == "config":
            raw.update(shorten(_leaves(_read_yaml(Path(text)))))
    raw.update(shorten(_leaves(_from_args([pair for pair in pairs if pair[0] != "config"]))))
    flat = shorten(raw)
    for name in flat:
        if name not in known_keys():
            raise InputError(_unknown(name))
    values = {name: convert(known_keys()[name], value) for name, value in flat.items()}
    return Loaded(_build(Config, "", values), frozenset(values))


def to_flat(config: Config) -> dict[str, Any]:
    """All keys of ``config`` by dotted name."""
    return {name: functools.reduce(getattr, name.split("."), config) for name in known_keys()}


def to_yaml(config: Config) -> str:
    """``config`` as YAML that ``config=FILE.yaml`` reads back."""
    nested: dict[str, Any] = {}
    for name, value in to_flat(config).items():
        *sections, leaf = name.split(".")
        place = functools.reduce(lambda inner, part: inner.setdefault(part, {}), sections, nested)
        place[leaf] = list(value) if isinstance(value, tuple) else value
    return OmegaConf.to_yaml(OmegaConf.create(nested))


def help_text() -> str:
    """Every key with its default and meaning."""
    lines = []
    for spec in known_keys().values():
        shown = list(spec.default) if isinstance(spec.default, tuple) else spec.default
        default = "" if shown is None or shown == "" else str(shown)
        meaning = spec.rules["meaning"]
        if spec.rules["choices"]:
            meaning += f" ({', '.join(spec.rules['choices'])})"
        lines.append(f"  {spec.name}={default}")
        lines.extend(textwrap.wrap(meaning, 100, initial_indent="      ", subsequent_indent="      "))
    return "\n".join(lines)


def _build(cls: type[Any], prefix: str, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(cls)
    chosen = {}
    for item in dataclasses.fields(cls):
        name = prefix + item.name
        if dataclasses.is_dataclass(hints[item.name]):
            chosen[item.name] = _build(hints[item.name], name + ".", values)
        elif name in values:
            chosen[item.name] = values[name]
    return cls(**chosen)


def _split(arg: str) -> tuple[str, str]:
    name, equals, text = arg.partition("=")
    if not equals or not name:
        raise InputError(f"expected key=value, got {arg!r}; --help lists all keys")
    return name.lstrip("+"), text


def _from_args(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Read texts as YAML values, except for keys that hold text: those are taken as they are."""
    flat: dict[str, Any] = {}
    for name, text in pairs:
        spec = known_keys().get(next(iter(shorten({name: text})), name))
        is_text = spec is not None and spec.kind is str
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        try:
            value = (text[1:-1] if quoted else text) if is_text else yaml.safe_load(text)
        except yaml.YAMLError:
            raise InputError(f"{name}: can't read {text!r} as a value; put quotes around text") from None
        flat[name] = value
    return _plain(flat)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"config={path}: no such file")
    try:
        loaded = OmegaConf.load(path)
    except (yaml.YAMLError, OSError) as error:
        raise InputError(f"config={path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, DictConfig):
        raise InputError(f"config={path}: expected keys and values at the top level")
    return _plain(loaded)


def _plain(source: Mapping[str, Any] | DictConfig) -> dict[str, Any]:
    """Resolve interpolations and return plain Python values."""
    try:
        tree = source if isinstance(source, DictConfig) else OmegaConf.create(dict(source))
        plain = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise InputError(f"config: {' '.join(str(error).split())}") from None
    if not isinstance(plain, dict):
        raise InputError(f"config: expected keys and values, got {type(plain).__name__}")
    return {str(name): value for name, value in plain.items()}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for part, value in tree.items():
        if isinstance(value, Mapping):
            leaves.update(_leaves(value, f"{prefix}{part}."))
        else:
            leaves[f"{prefix}{part}"] = value
    return leaves


def _unknown(name: str) -> str:
    names = list(known_keys())
    inside = next((known for known in names if known.startswith(name + ".")), None)
    if inside:
        return f"{name} is a section, not a key; set one of its keys, such as {inside}"
    leaf = name.rpartition(".")[2]
    same_leaf = [known for known in names if known.rpartition(".")[2] == leaf]
    near = difflib.get_close_matches(name, same_leaf or names, n=1, cutoff=0.0)
    return f"unknown key {name!r}; the nearest is {near[0]!r} (--help lists all keys)"
