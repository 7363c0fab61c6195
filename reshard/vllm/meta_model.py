"""A vLLM engine's model once more, on the meta device: same classes, same shapes, same loader, no weights.

Note: what must not change around it
    Layers register themselves in the config when they are built, custom operators count themselves there, quantisation
    configs rewrite their own names; rotary embeddings share one cache, offloaders collect modules, and what a pipeline
    stage lacks is remembered by a model's address. So a second model is built and loaded under copies of those, and the
    process's own come back as they were: a live engine runs on as before.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import utils as model_utils
from vllm.model_executor.offloader import NoopOffloader, get_offloader, set_offloader

_FACTORIES = frozenset({torch.empty, torch.full, torch.zeros, torch.ones, torch.arange, torch.tensor, torch.as_tensor})
_MAX_REAL_ELEMENTS = 1 << 16
_FRESH: Mapping[str, Callable[[], object]] = {
    "static_forward_context": dict,
    "static_all_moe_layers": list,
    "enabled_custom_ops": Counter,
    "disabled_custom_ops": Counter,
    "traced_files": set,
}


def meta_model(vllm_config: VllmConfig, *, quantised: bool = True) -> nn.Module:
    """The model that an engine of this config and of this process's parallel state would build, on the meta device.

    Safe beside a live engine. Small integer tensors (expert maps) are real, as loaders read them. vLLM's parallel state
    must be set up: by a live engine, or by ``reshard.vllm.planning``. Load it under ``isolated`` too. Without
    ``quantised`` all parameters are in full precision, whatever the config says.
    """
    with isolated(vllm_config) as config, torch.device("meta"), _RealIntegers():
        if not quantised:
            object.__setattr__(config, "quant_config", None)
        model: nn.Module = initialize_model(vllm_config=config)
    _to_meta(model)
    return model


@contextmanager
def isolated(vllm_config: VllmConfig) -> Iterator[VllmConfig]:
    """Surroundings in which a model can be built and loaded without touching a live engine; yields the config for it.

    Compiling is off in that config, as the model never runs. The default dtype is the model's, gradients are off.
    """
    config = _own_config(vllm_config)
    default, offloader = torch.get_default_dtype(), get_offloader()
    torch.set_default_dtype(config.model_config.dtype)
    set_offloader(NoopOffloader())
    try:
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            set_current_vllm_config(config),
            _emptied(rotary_embedding._ROPE_DICT),
            _emptied(model_utils._model_to_pp_missing_layer_names),
        ):
            yield config
    finally:
        set_offloader(offloader)
        torch.set_default_dtype(default)


def _own_config(vllm_config: VllmConfig) -> VllmConfig:
    """A copy of the config whose registries are its own and empty."""
    config = copy.copy(vllm_config)
    compilation = copy.copy(vllm_config.compilation_config)
    for name in {field.name for field in dataclasses.fields(compilation)} & set(_FRESH):
        object.__setattr__(compilation, name, _FRESH[name]())
    object.__setattr__(compilation, "mode", CompilationMode.NONE)
    object.__setattr__(config, "compilation_config", compilation)
    object.__setattr__(config, "quant_config", copy.deepcopy(vllm_config.quant_config))
    return config


@contextmanager
def _emptied(registry: MutableMapping[Any, Any]) -> Iterator[None]:
    """One of vLLM's module-level registries is empty inside and as it was afterwards."""
    before = dict(registry)
    registry.clear()
    try:
        yield
    finally:
        registry.clear()
        registry.update(before)


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
