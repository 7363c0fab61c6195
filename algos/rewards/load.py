"""From a reward's spec to something that scores.

``gsm8k``, ``math``, ``reasoning_gym``, ``package.module:function`` or ``path/to/file.py:function``, each with options
behind it: ``gsm8k:method=strict``, ``rewards.py:score:bonus=0.5``. Options are the function's keyword arguments; two
are ours: ``timeout_s`` (seconds a sample; the function then runs in worker processes) and ``num_workers``.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from algos.errors import InputError
from algos.rewards.base import InlineReward, Reward, RewardFunction
from algos.rewards.pool import WorkerReward
from algos.spec_text import nearest, parse_options, parse_scalar

_FORMS = "gsm8k, math, reasoning_gym, package.module:function or path/to/file.py:function"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_WORKER_MEMORY_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltIn:
    module: str
    function: str
    needs: str | None = None
    timeout_s: float | None = None


_BUILT_IN = {
    "gsm8k": _BuiltIn(module="algos.rewards.gsm8k", function="gsm8k"),
    "math": _BuiltIn(module="algos.rewards.math_answers", function="math", needs="math_verify", timeout_s=10.0),
    "reasoning_gym": _BuiltIn(
        module="algos.rewards.tasks", function="reasoning_gym", needs="reasoning_gym", timeout_s=10.0
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    module: str
    function: str
    options: Mapping[str, Any]
    built_in: _BuiltIn | None
    timeout_s: float | None
    num_workers: int


def load_reward(spec: str) -> Reward:
    """The reward that a spec names, ready to score; worker processes, where it has any, are starting.

    Raises:
        InputError: the spec has another form, the module or file can't be imported or lacks the function, the function
            can't be called with a reward function's arguments, or an option is unknown.
    """
    parsed = _parse(spec)
    if parsed.built_in is not None and parsed.built_in.needs and not importlib.util.find_spec(parsed.built_in.needs):
        package = parsed.built_in.needs.replace("_", "-")
        raise InputError(f"reward {spec!r} needs the package {package}; install it with: pip install {package}")
    if parsed.timeout_s is None:
        return InlineReward(_import_function(spec, parsed))
    _import_function(spec, parsed)
    return WorkerReward(
        spec,
        deadline_s=parsed.timeout_s,
        num_workers=parsed.num_workers,
        on_timeout="zero" if parsed.built_in else "unscored",
        memory_bytes=_WORKER_MEMORY_BYTES if parsed.built_in else 0,
    )


def load_function(spec: str) -> RewardFunction:
    """The function that a spec names with its options bound, to be called in this process.

    Raises:
        InputError: as `load_reward`.
    """
    return _import_function(spec, _parse(spec))


def is_built_in(spec: str) -> bool:
    """Whether a spec names one of this package's rewards."""
    return spec.partition(":")[0] in _BUILT_IN


def _parse(spec: str) -> _Spec:
    name, *rest = spec.split(":")
    built_in = _BUILT_IN.get(name)
    if built_in is None and (not rest or not rest[0] or "=" in rest[0]):
        raise InputError(f"reward {spec!r}: expected {_FORMS}{nearest(name, _BUILT_IN)}")
    module, function = (built_in.module, built_in.function) if built_in else (name, rest.pop(0))
    written = parse_options(rest, where=f"reward {spec!r}")
    options = {key: parse_scalar(value) for key, value in written.items()}
    timeout_s = options.pop("timeout_s", built_in.timeout_s if built_in else None)
    num_workers = options.pop("num_workers", min(4, os.cpu_count() or 1))
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
        raise InputError(f"reward {spec!r}: timeout_s must be a number of seconds above 0, got {timeout_s!r}")
    if not isinstance(num_workers, int) or num_workers < 1:
        raise InputError(f"reward {spec!r}: num_workers must be a whole number of at least 1, got {num_workers!r}")
    return _Spec(
        module=module,
        function=function,
        options=options,
        built_in=built_in,
        timeout_s=None if timeout_s is None else float(timeout_s),
        num_workers=num_workers,
    )


def _import_function(spec: str, parsed: _Spec) -> RewardFunction:
    module = _import_file(spec, parsed.module) if parsed.module.endswith(".py") else _import_module(spec, parsed.module)
    functions = {name: value for name, value in vars(module).items() if callable(value)}
    if parsed.function not in functions:
        raise InputError(
            f"reward {spec!r}: {parsed.module} has no function {parsed.function!r}{nearest(parsed.function, functions)}"
        )
    function = functions[parsed.function]
    _check_signature(spec, function, parsed.options)
    return functools.partial(function, **parsed.options) if parsed.options else function


def _import_module(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise InputError(f"reward {spec!r}: can't import {name}: {type(error).__name__}: {error}") from error


def _import_file(spec: str, path_text: str) -> ModuleType:
    path = Path(path_text).expanduser().resolve()
    if not path.is_file():
        raise InputError(f"reward {spec!r}: no file {str(path)!r}; expected {_FORMS}")
    name = f"reward_file_{path.stem}_{abs(hash(str(path))):x}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(f"reward {spec!r}: can't import {path}: {type(error).__name__}: {error}") from error
    return module


def _check_signature(spec: str, function: RewardFunction, options: Mapping[str, Any]) -> None:
    if inspect.iscoroutinefunction(function):
        raise InputError(f"reward {spec!r} is async; expected a plain function (it may call asyncio.run itself)")
    try:
        inspect.signature(function).bind(**dict.fromkeys(_ARGUMENTS), **options)
    except TypeError as error:
        raise InputError(
            f"reward {spec!r} can't be called with {', '.join(_ARGUMENTS)}"
            f"{' and ' + ', '.join(options) if options else ''}: {error}"
        ) from error
    except ValueError:
        return  # a built-in of C has no signature to look at
