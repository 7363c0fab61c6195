"""Environment of vLLM on a CPU, set before vLLM is imported; without vLLM every module of this folder is skipped."""

import importlib.util
import os
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import pytest
from fork_server import ForkServer

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def _is_installed() -> bool:
    """Whether vLLM is; this folder, which Python could take for a package of its name, does not count."""
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None


class _Absent(pytest.Module):
    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip("vLLM is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip instead of importing what imports vLLM."""
    return None if _is_installed() or "vllm" in sys.modules else _Absent.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def scenarios() -> Iterator[ForkServer]:
    """Runs scripts in processes that have vLLM and Transformers imported: most of a small scenario's time otherwise."""
    with ForkServer(
        ["torch", "transformers.models.auto.modeling_auto", "vllm.entrypoints.llm"],
        changeable=["VLLM_ENABLE_V1_MULTIPROCESSING"],
        environment=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as server:
        yield server


_NOT_ON_A_CPU = (
    "MLA is not supported on CPU",
    "cannot import name 'compile_flash_attn_varlen_func_from_specs'",  # latent attention in 0.28
    "_C::dynamic_per_token_scaled_fp8_quant() expected at most 0 argument",
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """What the CPU build of an older vLLM can't run at all is no failure of ours."""
    try:
        return (yield)
    except (RuntimeError, ImportError) as error:
        if not any(words in str(error) for words in _NOT_ON_A_CPU):
            raise
        pytest.skip(f"vLLM's CPU build can't: {str(error).splitlines()[0]}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Planned engines first: they need a process that no live engine has given a process group yet."""
    items.sort(key=lambda item: item.path.name not in ("test_vllm_layouts.py", "test_vllm_layouts_full_size.py"))
