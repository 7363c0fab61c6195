"""vLLM: layouts learnt from its own model classes, weights pushed into its live parameters, memory handed over."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.vllm.clients import EngineClient as EngineClient
    from reshard.vllm.clients import HTTPClient as HTTPClient
    from reshard.vllm.clients import LLMClient as LLMClient
    from reshard.vllm.clients import Replicas as Replicas
    from reshard.vllm.ray_client import RayClient as RayClient
    from reshard.vllm.weight_sync import WeightSync as WeightSync

_MODULE_OF = {
    "EngineClient": "clients",
    "HTTPClient": "clients",
    "LLMClient": "clients",
    "RayClient": "ray_client",
    "Replicas": "clients",
    "WeightSync": "weight_sync",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'reshard.vllm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"reshard.vllm.{_MODULE_OF[name]}"), name)
