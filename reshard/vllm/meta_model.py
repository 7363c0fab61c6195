"""A vLLM engine's model once more, on the meta device: same classes, same shapes, same loader, no weights.

Note: what must not change around it
    Layers register themselves in the config's forward context when they are built, custom operators count themselves
    there, quantisation configs rewrite their own names, and rotary embeddings share one cache. So the second model is
    built under copies of those, and the process's defaults come back as they were: a live engine runs on as before.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import initialize_model

_FACTORIES = frozenset({torch.empty, torch.full, torch.zeros, torch.ones, torch.arange, torch.tensor, torch.as_tensor})
_MAX_REAL_ELEMENTS = 1 << 16


def meta_model(vllm_config: VllmConfig) -> nn.Module:
    """The model that an engine of this config and of this process's parallel state would build, on the meta device.

    Safe beside a live engine. Small integer tensors (expert maps) are real, as loaders read them. vLLM's parallel state
    must be set up: by a live engine, or by ``reshard.vllm.planning``.
    """
    config = isolated_config(vllm_config)
    with _building(config):
        model: nn.Module = initialize_model(vllm_config=config)
    _to_meta(model)
    return model


def isolated_config(vllm_config: VllmConfig) -> VllmConfig:
    """A copy of the config whose registries are its own and empty; compiling is off, as the model never runs."""
    config = copy.copy(vllm_config)
    compilation = copy.copy(vllm_config.compilation_config)
    for name in {field.name for field in dataclasses.fields(compilation)} & set(_EMPTY):
        object.__setattr__(compilation, name, _EMPTY[name]())
    object.__setattr__(compilation, "mode", CompilationMode.NONE)
    object.__setattr__(config, "compilation_config", compilation)
    object.__setattr__(config, "quant_config", copy.deepcopy(vllm_config.quant_config))
    return config


_EMPTY: Mapping[str, Callable[[], object]] = {
    "static_forward_context": dict,
    "static_all_moe_layers": list,
    "enabled_custom_ops": Counter,
    "disabled_custom_ops": Counter,
    "traced_files": set,
}


@contextmanager
def _building(config: VllmConfig) -> Iterator[None]:
    """vLLM's own surroundings of a model's construction, but on the meta device."""
    default, ropes = torch.get_default_dtype(), dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            set_current_vllm_config(config),
            torch.device("meta"),
            _RealIntegers(),
        ):
            yield
    finally:
        torch.set_default_dtype(default)
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(ropes)


class _RealIntegers(TorchFunctionMode):
    """Under ``torch.device("meta")``: small integer tensors go to the CPU, what asks for another device to meta."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES:
            dtype, device = kwargs.get("dtype"), kwargs.get("device")
            real = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
            if real and _num_elements(args) <= _MAX_REAL_ELEMENTS:
                kwargs["device"] = "cpu"
            elif device is not None and torch.device(device).type != "cpu":
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _num_elements(args: Sequence[Any]) -> int:
    """Elements that a factory call asks for, 0 where its arguments are data."""
    sizes = args[0] if args and isinstance(args[0], tuple | list | torch.Size) else args
    count = 1
    for size in sizes:
        if not isinstance(size, int):
            return 0
        count *= max(size, 1)
    return count


def _to_meta(model: nn.Module) -> None:
    """Move parameters that were built elsewhere, class and loader attributes kept; shared ones stay shared."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.device.type == "meta":
                continue
            if id(parameter) not in moved:
                twin = torch.Tensor._make_subclass(type(parameter), parameter.data.to("meta"), False)
                twin.__dict__.update(parameter.__dict__)
                moved[id(parameter)] = twin
            module._parameters[name] = moved[id(parameter)]
