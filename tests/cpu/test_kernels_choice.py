"""What runs copies, and what is said where nothing does."""

import importlib.util
import logging

import pytest
import torch

import reshard
from reshard import _C
from reshard.errors import DeviceError
from reshard.transports import kernels
from reshard.transports.kernels import choose_kernels

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def choose(monkeypatch):
    """`choose_kernels` in an install with or without CUDA kernels and Triton."""
    find_spec = importlib.util.find_spec

    def install(*, cuda: bool, triton: bool, wanted: str | None = None, device: torch.device | None = GPU) -> str:
        monkeypatch.setattr(_C, "CUDA_KERNELS", cuda)
        spec = torch.__spec__ if triton else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "triton" else find_spec(name))
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if wanted is None:
            monkeypatch.delenv("RESHARD_KERNELS", raising=False)
        else:
            monkeypatch.setenv("RESHARD_KERNELS", wanted)
        return choose_kernels(device)

    kernels._announce.cache_clear()
    yield install
    kernels._announce.cache_clear()


@pytest.mark.parametrize(
    ("cuda", "triton", "wanted", "expected"),
    [
        (True, True, None, "cuda"),
        (True, False, "auto", "cuda"),
        (False, True, None, "triton"),
        (True, True, "triton", "triton"),
        (True, True, "cuda", "cuda"),
    ],
)
def test_cuda_kernels_come_before_triton_unless_asked_otherwise(choose, cuda, triton, wanted, expected):
    assert choose(cuda=cuda, triton=triton, wanted=wanted) == expected


@pytest.mark.parametrize(
    ("cuda", "triton", "wanted", "words"),
    [
        (False, False, None, "copies on cuda:0: reshard._C was built without CUDA kernels and Triton is not installed"),
        (False, True, "cuda", r"copies on cuda:0 (RESHARD_KERNELS=cuda): reshard._C was built without CUDA kernels; "),
        (True, False, "triton", "copies on cuda:0 (RESHARD_KERNELS=triton): Triton is not installed; "),
    ],
)
def test_where_nothing_runs_both_remedies_are_named(choose, cuda, triton, wanted, words):
    with pytest.raises(DeviceError) as caught:
        choose(cuda=cuda, triton=triton, wanted=wanted)
    assert words in str(caught.value)
    assert "install Triton (pip install triton), or build reshard where nvcc is found" in str(caught.value)


def test_an_unknown_choice_is_refused(choose):
    with pytest.raises(ValueError, match="RESHARD_KERNELS must be one of auto, cuda, triton, but is 'numba'"):
        choose(cuda=True, triton=True, wanted="numba")


def test_the_host_needs_neither(choose):
    for wanted in (None, "cuda", "triton"):
        assert choose(cuda=False, triton=False, wanted=wanted, device=HOST) == "host"
    assert choose(cuda=False, triton=False, device=None) == "host"
    tensors = {"a": torch.arange(4.0)}
    destination = {"a": torch.zeros(4)}
    plan = reshard.make_plan(reshard.Layout.from_tensors(tensors), reshard.Layout.from_tensors(destination))
    with reshard.Resharder(plan, tensors, destination) as resharder:
        assert resharder.run().kernels == "host"


def test_the_choice_is_logged_once(choose, caplog):
    with caplog.at_level(logging.INFO, logger="reshard.transports.kernels"):
        for _ in range(2):
            choose(cuda=False, triton=True)
    assert [record.getMessage() for record in caplog.records] == [
        "copies on cuda run by Triton (reshard._C was built without CUDA kernels)"
    ]
