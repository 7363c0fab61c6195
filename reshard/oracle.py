"""The copy table's meaning in plain torch: slow, obvious, and the reference that every executor is tested against."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from reshard.table import CopyTable

_TYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16}
_CANONICAL_NAN = {torch.float32: 0x7FFFFFFF, torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF}
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def cast_reference(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values.to(dtype)`` with every NaN canonical (0x7fff, 0x7fffffff), as the executors write it.

    A cast from bfloat16 to float32 is a shift and keeps a NaN's payload; equal types keep all bits.
    """
    if values.dtype == dtype:
        return values.clone()
    if (values.dtype, dtype) == (torch.bfloat16, torch.float32):
        return (values.contiguous().view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    bits = values.to(dtype).contiguous().view(_BITS[dtype])
    return torch.where(values.isnan(), torch.tensor(_CANONICAL_NAN[dtype], dtype=_BITS[dtype]), bits).view(dtype)


def copy_reference(table: CopyTable) -> None:
    """Run ``table`` on host memory, one record after the other.

    Args:
        table: what ``make_table`` returns, over memory of this process that the caller keeps alive.
    """
    for record in table:
        extents = [int(extent) for extent in record["extents"]]
        src_code, dst_code = int(record["src_dtype"]), int(record["dst_dtype"])
        src = _bytes_of(int(record["src"]), extents, record["src_strides"], int(record["src_itemsize"]))
        dst = _bytes_of(int(record["dst"]), extents, record["dst_strides"], int(record["dst_itemsize"]))
        if src_code == dst_code:
            dst.copy_(src)
            continue
        values = src.contiguous().view(_TYPES[src_code])
        dst.copy_(cast_reference(values, _TYPES[dst_code]).view(torch.uint8))


def checksum_reference(elements: torch.Tensor) -> int:
    """The checksum of csrc/convert.h over ``elements`` in row-major order: the sum of mixed words modulo 2**64."""
    size = elements.element_size()
    flat = elements.contiguous().view(-1).view(torch.uint8).reshape(-1, size).numpy().tobytes()
    words = -(-size // 8)
    total = 0
    for element in range(elements.numel()):
        raw = flat[element * size : (element + 1) * size]
        for word in range(words):
            total += _mix(int.from_bytes(raw[8 * word : 8 * word + 8], "little"), element * words + word)
    return total % 2**64


def _mix(word: int, index: int) -> int:
    mask = 2**64 - 1
    x = ((word ^ (index * 0x9E3779B97F4A7C15 & mask)) + 0x2545F4914F6CDD1D) & mask
    x = ((x ^ (x >> 32)) * 0xD6E8FEB86659FD93) & mask
    return x ^ (x >> 29)


def _bytes_of(address: int, extents: list[int], strides: Iterable[int], itemsize: int) -> torch.Tensor:
    """A view of the box as bytes: shape ``[*extents, itemsize]``."""
    steps = [int(stride) for stride in strides]
    num_bytes = itemsize + sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).as_strided((*extents, itemsize), (*steps, 1))


def quantize_reference(
    values: torch.Tensor, *, mode: str, through_bf16: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``[rows, columns]`` as reshard.quant says; returns float8_e4m3fn values and float32 scales.

    Finite values only: a cast of torch's saturates nothing, but scaled values stay below 464, which rounds to 448.
    """
    wide = (values.to(torch.bfloat16) if through_bf16 else values).float()
    rows, columns = wide.shape
    largest = torch.full((), 448.0, device=wide.device)  # a tensor: by a Python number, torch on CUDA divides inexactly
    if mode == "rows":
        scale = (wide.abs().amax(dim=1, keepdim=True) / largest).clamp(min=1.0 / (448.0 * 512.0))
        return (wide / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128, device=wide.device)
    padded[:rows, :columns] = wide
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-4)
    scale = amax * largest.reciprocal()
    quantized = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn)
    if mode == "blocks_ue8m0":
        kept = quantized.float() * scale
        amax = kept.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-4)
        scale = (amax * largest.reciprocal()).log2().ceil().exp2()
        quantized = (kept * (1.0 / scale)).to(torch.float8_e4m3fn)
    return quantized.view(padded.shape)[:rows, :columns].contiguous(), scale[:, 0, :, 0]
