"""Quantising copies: weights into float8_e4m3fn with float32 scales, in one table like plain copies.

The formulas are those that vLLM's own quantisers apply on a GPU, so that finite weights come out bit for bit the same:

- ``blocks``: groups of 128 x 128 (smaller at the last rows and columns); ``scale = max(amax, 1e-4) * fl(1/448)``,
  ``value = x * fl(1/scale)`` (vllm.utils.deep_gemm.per_block_cast_to_fp8, where torch turns the division by the scalar
  448 into a multiplication by its float32 reciprocal on CUDA);
- ``rows``: one group a row; ``scale = max(amax / 448, 1 / (448 * 512))``, ``value = x / scale``
  (scaled_fp8_quant with use_per_token_if_dynamic);
- ``blocks_ue8m0``: ``blocks``, and what that keeps of the weight quantised again with scales that are powers of two:
  ``y = value * scale``, ``scale = 2^ceil(log2(max(amax(y), 1e-4) * fl(1/448)))``, ``value = y * fl(1/scale)``. So does
  an engine whose GEMM kernels want such scales (requant_weight_ue8m0_inplace).

All in float32; values are rounded to e4m3 to nearest, ties to even, at most 448. A NaN becomes e4m3's NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

from reshard.dtype import DType
from reshard.errors import PlanError

if TYPE_CHECKING:
    import torch

BLOCK = 128
QuantMode = Literal["blocks", "rows", "blocks_ue8m0"]
MODES: tuple[QuantMode, ...] = get_args(QuantMode)

QUANT_RECORD = np.dtype(
    [
        ("src", np.uint64),
        ("dst", np.uint64),
        ("scale", np.uint64),
        ("extents", np.int64, 2),
        ("src_strides", np.int64, 2),
        ("dst_strides", np.int64, 2),
        ("scale_strides", np.int64, 2),
        ("src_dtype", np.uint8),
        ("mode", np.uint8),
        ("through_bf16", np.uint8),
        ("full_division", np.uint8),
        ("reserved", np.uint8, 36),
    ]
)

QuantTable = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantEntry:
    """One matrix to quantise. Its first element must begin a group of the destination on both axes.

    Attributes:
        src: ``[rows, columns]``, float32, bfloat16 or float16, any strides.
        dst: ``[rows, columns]``, float8_e4m3fn, any strides (a view of the engine's live weight).
        scale: float32, ``[ceil(rows / 128), ceil(columns / 128)]`` for blocks of either kind, ``[rows]`` or
            ``[rows, 1]`` for rows.
        mode: one of the above.
        through_bf16: round to bfloat16 first, as an engine does that loads bfloat16 weights and quantises those.
        full_division: on a GPU, take ``1/scale`` of blocks by PTX's div.full.f32, within 2 ulp, as kernels do that
            Triton compiles: the engine's quantiser at load time is one. Else, and on the host, rounded correctly.
        label: name for error messages.
    """

    src: torch.Tensor
    dst: torch.Tensor
    scale: torch.Tensor
    mode: QuantMode
    through_bf16: bool = True
    full_division: bool = False
    label: str = ""


def scale_shape(rows: int, columns: int, mode: QuantMode) -> tuple[int, int]:
    """Scales of a ``[rows, columns]`` matrix, down and across."""
    return (rows, 1) if mode == "rows" else (-(-rows // BLOCK), -(-columns // BLOCK))


def make_quant_table(entries: Iterable[QuantEntry]) -> QuantTable:
    """Return the quantising table of ``entries``: a 1-d array of ``QUANT_RECORD``. Empty matrices leave no record.

    The tensors are borrowed: they must outlive the table's use.

    Raises:
        PlanError: names the entry whose shapes, dtypes or mode don't fit.
    """
    rows = []
    for entry in entries:
        scale = _checked_scale(entry)
        if 0 in entry.src.shape:
            continue
        rows.append(
            (
                entry.src.data_ptr(),
                entry.dst.data_ptr(),
                scale.data_ptr(),
                tuple(entry.src.shape),
                _stride_bytes(entry.src),
                _stride_bytes(entry.dst),
                _stride_bytes(scale),
                DType.parse(str(entry.src.dtype)).code,
                MODES.index(entry.mode),
                int(entry.through_bf16),
                int(entry.full_division),
                np.zeros(36, dtype=np.uint8),
            )
        )
    table: QuantTable = np.array(rows, dtype=QUANT_RECORD)
    return table


def _stride_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    down, across = tensor.stride()
    return down * tensor.element_size(), across * tensor.element_size()


def _checked_scale(entry: QuantEntry) -> torch.Tensor:
    """The entry's scales as a matrix; PlanError if anything about the entry is wrong."""
    name = f"quantising copy of {entry.label!r}" if entry.label else "quantising copy"
    if entry.mode not in MODES:
        raise PlanError(f"{name}: mode must be one of {list(MODES)}, but is {entry.mode!r}")
    if entry.src.dim() != 2 or entry.src.shape != entry.dst.shape:
        raise PlanError(
            f"{name}: source {tuple(entry.src.shape)} and destination {tuple(entry.dst.shape)} must be one matrix shape"
        )
    if not DType.parse(str(entry.src.dtype)).is_castable:
        raise PlanError(f"{name}: source is {entry.src.dtype}; quantise from float32, bfloat16 or float16")
    if DType.parse(str(entry.dst.dtype)) is not DType.FLOAT8_E4M3FN:
        raise PlanError(f"{name}: destination is {entry.dst.dtype}; it must be float8_e4m3fn")
    wanted = scale_shape(entry.src.shape[0], entry.src.shape[1], entry.mode)
    scale = entry.scale.unsqueeze(1) if entry.mode == "rows" and entry.scale.dim() == 1 else entry.scale
    if DType.parse(str(scale.dtype)) is not DType.FLOAT32 or tuple(scale.shape) != wanted:
        raise PlanError(f"{name}: scales are {scale.dtype} {tuple(scale.shape)}; expected float32 {wanted}")
    return scale
