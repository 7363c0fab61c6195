"""Does vLLM move elements of a parameter after loading, though its shape and strides stay? Its own step answers, on a
copy of the layer.

Some kernels want their weights in another order (a fused gate and up projection the other way round, shuffled rows of
experts). Form alone can't tell, so each distinct kind of layer is tried once: a stand-in with random bits in its
parameters goes through the step that vLLM ran after loading, and what comes out must be what went in.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

_DONE = "_already_called_process_weights_after_loading"
FAILURES = (RuntimeError, ValueError, AssertionError, AttributeError, TypeError, KeyError)


def moved_elements(fresh: nn.Module, live: nn.Module, *, skip: Collection[str] = ()) -> dict[str, str]:
    """Parameters of ``live`` whose elements lie elsewhere than their loader put them, each with the reason.

    ``fresh`` is the same model as it is before loading, on the meta device. Needs memory for one layer more on the live
    parameters' device. A parameter whose layer can't be tried counts as moved. Live tensors are not touched. Modules
    named in ``skip`` are left out.
    """
    modules = dict(fresh.named_modules())
    known: dict[object, dict[str, str]] = {}
    found = {}
    for name, module in live.named_modules():
        method = method_of(module)
        if name in skip or name not in modules or not isinstance(method, QuantizeMethodBase) or not _has_step(method):
            continue
        kind = kind_of_layer(module, method)
        if kind not in known:
            known[kind] = _try(module, modules[name], method)
        found.update({f"{name}.{parameter}": reason for parameter, reason in known[kind].items()})
    return found


def method_of(module: nn.Module) -> object | None:
    """How a layer of vLLM holds its weights; some of these are modules themselves."""
    return vars(module).get("quant_method") or module._modules.get("quant_method")


def _has_step(method: QuantizeMethodBase) -> bool:
    """Whether a layer's method does anything after loading."""
    step = type(method).process_weights_after_loading
    return step is not QuantizeMethodBase.process_weights_after_loading


def kind_of_layer(module: nn.Module, method: QuantizeMethodBase) -> object:
    """Equal for layers that vLLM treats alike."""
    forms = tuple((n, tuple(p.shape), p.stride(), p.dtype) for n, p in module.named_parameters(recurse=False))
    return type(module), type(method), str(vars(method).get("unquantized_backend")), forms


def _try(module: nn.Module, fresh: nn.Module, method: QuantizeMethodBase) -> dict[str, str]:
    """Reasons by parameter of one layer; empty if the step leaves every element where it is."""
    loaded = {name: p for name, p in fresh.named_parameters(recurse=False) if _same_form(p, module, name)}
    if not loaded:
        return {}
    device = module.get_parameter(next(iter(loaded))).device
    try:
        before = {name: random_bits(parameter, device) for name, parameter in loaded.items()}
        after = run_step(module, before, method)
    except FAILURES as error:
        return {name: f"its layer can't be tried: {type(error).__name__}: {error}" for name in loaded}
    return {
        name: "the engine moved its elements after loading, though its form is the same"
        for name, tensor in before.items()
        if name not in after or not torch.equal(as_bits(after[name]), as_bits(tensor))
    }


def _same_form(parameter: torch.Tensor, module: nn.Module, name: str) -> bool:
    live = module._parameters.get(name)
    return live is not None and live.shape == parameter.shape and live.dtype == parameter.dtype


def run_step(
    module: nn.Module, parameters: Mapping[str, torch.Tensor], method: QuantizeMethodBase
) -> dict[str, torch.Tensor]:
    """Parameters of a copy of ``module`` after vLLM's step for loaded weights, given those before it.

    The copy shares nothing with ``module`` that the step re-binds; ``parameters`` are cloned.
    """
    stand_in = copy.copy(module)
    vars(stand_in).update({n: dict(vars(module)[n]) for n in ("_parameters", "_buffers", "_modules")})
    vars(stand_in).pop(_DONE, None)
    for name in [n for n, p in module.named_parameters(recurse=False) if n not in parameters]:
        if name.startswith("weight") or "_weight" in name:
            del stand_in._parameters[name]
    for name, tensor in parameters.items():
        stand_in._parameters[name] = _parameter_like(module._parameters.get(name), tensor.clone())
    own = copy.copy(method)
    stand_in.quant_method = own
    with torch.no_grad():
        own.process_weights_after_loading(stand_in)
    return dict(_tensors(stand_in))


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters(recurse=False):
        yield name, parameter.detach()


def _parameter_like(like: nn.Parameter | None, tensor: torch.Tensor) -> nn.Parameter:
    """``tensor`` as a parameter of the live one's class, with its attributes."""
    if like is None:
        return nn.Parameter(tensor, requires_grad=False)
    made: Any = torch.Tensor._make_subclass(type(like), tensor, False)
    made.__dict__.update(like.__dict__)
    return made  # type: ignore[no-any-return]


def random_bits(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A dense tensor of the parameter's form with small random integers in it: few elements equal their neighbours."""
    generator = torch.Generator(device="cpu").manual_seed(parameter.numel())
    values = torch.randint(-128, 128, tuple(parameter.shape), generator=generator, dtype=torch.int16)
    return values.to(device=device).to(parameter.dtype)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Elements in row-major order, to compare bit for bit."""
    return tensor.detach().contiguous().view(torch.uint8)
