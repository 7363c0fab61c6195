"""Reports of backends, and the log level."""

import importlib.util
import logging

import pytest

from hybrid.backends import check_backends, require
from hybrid.errors import BackendUnavailable
from hybrid.log import PACKAGES, configure_logging


def test_every_backend_reports_itself_with_a_reason() -> None:
    reports = {(report.role, report.name): report for report in check_backends()}
    assert reports["controller", "inline"].usable
    assert reports["train", "torch"].usable
    assert "transformers" in reports["rollout", "torch"].detail
    assert all(report.detail for report in reports.values())
    for name in ("ray", "vllm"):
        found = [report for report in reports.values() if report.name == name]
        if importlib.util.find_spec(name) is None:
            assert not found[0].usable
            assert found[0].detail == f"package {name} is not installed; install reshard[{name}]"
            assert str(found[0]).endswith(f"not usable: {found[0].detail}")


def test_require_raises_the_reason() -> None:
    require("inline")
    with pytest.raises(BackendUnavailable, match="unknown backend 'rya'; use one of cuda, host, inline, ray"):
        require("rya")
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(BackendUnavailable, match=r"'vllm' is not usable: package vllm .* install reshard\[vllm\]"):
            require("vllm")


def test_a_version_outside_the_tested_range_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.99.1")
    with pytest.raises(BackendUnavailable, match=r"vllm 0.99.1 is installed, and >=0.26,<0.34 is what"):
        require("vllm")


@pytest.fixture
def levels() -> object:
    before = {name: logging.getLogger(name).level for name in PACKAGES}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.usefixtures("levels")
def test_the_log_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_LOG_LEVEL", "debug")
    assert configure_logging() == "DEBUG"
    assert all(logging.getLogger(f"{name}.module").isEnabledFor(logging.DEBUG) for name in PACKAGES)
    monkeypatch.delenv("RESHARD_LOG_LEVEL")
    assert configure_logging() == "WARNING"
    assert not logging.getLogger("hybrid").isEnabledFor(logging.INFO)
    monkeypatch.setenv("RESHARD_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match=r"RESHARD_LOG_LEVEL must be one of DEBUG, INFO.*got 'LOUD'"):
        configure_logging()
