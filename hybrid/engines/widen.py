"""bf16 weights on a CPU that has no bf16 arithmetic: kept in bf16, widened to fp32 where they are used.

Without native support a bf16 matrix product runs about eight times slower than an fp32 one. `widen_at_use` leaves every
weight where it is (its storage is what a transition writes into) and makes each module compute in fp32 with a widened
copy of its weight that lives only for the call: at most `CHUNK_BYTES` at a time for the large matrices, so that the
copy stays in the processor's cache. Activations and the key-value cache are fp32.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

CHUNK_BYTES = 4 * 2**20
_NATIVE_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@functools.cache
def has_native_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware (AVX512-BF16, AMX or Arm BF16), by its flags on Linux.

    Elsewhere the answer is no, which is right everywhere and slow nowhere: the products are then done in fp32.
    """
    info = Path("/proc/cpuinfo")
    return info.is_file() and lists_bf16_arithmetic(info.read_text())


def lists_bf16_arithmetic(cpu_info: str) -> bool:
    """Whether the flags in the text of /proc/cpuinfo have an instruction set that multiplies bf16 matrices."""
    for line in cpu_info.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return not _NATIVE_FLAGS.isdisjoint(value.split())
    return False


def widen_at_use(model: nn.Module) -> None:
    """Make every module of `model` that owns bf16 or fp16 parameters compute in fp32; the parameters stay as they are.

    For inference only: no gradient flows through a widened matrix product.
    """
    replacements: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            replacements[name] = _WideLinear(module)
        elif type(module) is Conv1D:
            replacements[name] = _WideConv1D(module)
        elif type(module) is nn.Embedding:
            replacements[name] = _WideEmbedding(module)
        elif any(_is_narrow(parameter) for parameter in module.parameters(recurse=False)):
            _widen_around_call(module)
    for name, module in replacements.items():
        model.set_submodule(name, module)


def _is_narrow(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16)


class _WideLinear(nn.Linear):
    """A linear layer that shares the parameters of another and widens them a slab of output features at a time."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__(original.in_features, original.out_features, bias=original.bias is not None, device="meta")
        self.weight, self.bias = original.weight, original.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.in_features)
        output = rows.new_empty((rows.shape[0], self.out_features))
        step = max(1, CHUNK_BYTES // (4 * self.in_features))
        for begin in range(0, self.out_features, step):
            slab = self.weight[begin : begin + step].to(rows.dtype)
            torch.mm(rows, slab.t(), out=output[:, begin : begin + step])
        if self.bias is not None:
            output += self.bias
        return output.view(*input.shape[:-1], self.out_features)


class _WideConv1D(Conv1D):
    """The same for GPT-2's layer, whose weight is [input features, output features]."""

    def __init__(self, original: Conv1D) -> None:
        with torch.device("meta"):
            super().__init__(original.nf, original.nx)
        self.weight, self.bias = original.weight, original.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.nx)
        output = rows.new_empty((rows.shape[0], self.nf))
        step = max(1, CHUNK_BYTES // (4 * self.nx))
        for begin in range(0, self.nf, step):
            slab = self.weight[:, begin : begin + step].to(rows.dtype)
            torch.mm(rows, slab, out=output[:, begin : begin + step])
        output += self.bias
        return output.view(*input.shape[:-1], self.nf)


class _WideEmbedding(nn.Embedding):
    """An embedding that shares another's table and widens the rows that it looked up."""

    def __init__(self, original: nn.Embedding) -> None:
        super().__init__(
            original.num_embeddings, original.embedding_dim, padding_idx=original.padding_idx, device="meta"
        )
        self.weight = original.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).float()


def _widen_around_call(module: nn.Module) -> None:
    """Let `module` (a norm, a router, fused experts) see fp32 copies of its own parameters during its forward."""
    narrow: dict[str, nn.Parameter] = {}

    def swap_in(_module: nn.Module, _inputs: Any) -> None:
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and _is_narrow(parameter):
                narrow[name] = parameter
                module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)

    def swap_out(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        module._parameters.update(narrow)
        narrow.clear()

    module.register_forward_pre_hook(swap_in)
    module.register_forward_hook(swap_out, always_call=True)
