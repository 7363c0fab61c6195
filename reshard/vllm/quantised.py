"""How a live engine holds, quantised to float8, what its loader would have stored in full precision.

The engine quantises whole parameters as they lie on the rank: a fused projection's groups are counted in the fused
rows, so they need not end where its parts do. So the parts first meet in a *staged* copy of the parameter, dense and in
full precision, and one quantising copy goes from there into the live weight and its scales. Modes are those of
``reshard.quant``.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from reshard.dtype import DType
from reshard.quant import BLOCK, QuantEntry, QuantMode
from reshard.torch_layout import dtype_of

STAGED = "staged:"
"""Storages of parameters in full precision that a quantising copy reads."""
SCALES = ("_scale_inv", "_scale")
"""What the names of scales add to those of their weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Where a live tensor has the elements of an array: storage name, offset and one stride per dim, in elements."""

    storage: str
    offset: int
    strides: tuple[int, ...]

    def of(self, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """The view itself; the tensor called ``storage`` is borrowed."""
        tensor = tensors[self.storage]
        return tensor.detach().as_strided(tuple(shape), self.strides, self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantRule:
    """One parameter of ``shape`` (``[rows, columns]``, or ``[experts, rows, columns]``) and how it is quantised.

    Attributes:
        staged: storage of the layout that holds it dense and row-major in ``dtype``; the caller allocates it.
        weight: where the live float8 elements are, one stride per dim of ``shape``.
        scale: where the float32 scales are: per expert a plain grid ``[ceil(rows / 128), ceil(columns / 128)]`` in
            the modes of blocks, ``[rows, 1]`` in mode ``rows``.
        mode, full_division: how, see ``QuantEntry``.
    """

    staged: str
    shape: tuple[int, ...]
    dtype: DType
    weight: View
    scale: View
    mode: QuantMode
    full_division: bool = False

    @property
    def module(self) -> str:
        """The layer that holds the weight."""
        return self.weight.storage.rpartition(".")[0]

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Scales per dim of ``shape``."""
        return _grid(self.shape, self.mode)

    def entries(self, tensors: Mapping[str, torch.Tensor]) -> list[QuantEntry]:
        """The quantising copies, one a matrix. ``tensors`` are the live ones and the staged one, by storage name."""
        staged = tensors[self.staged].view(_with_experts(self.shape))
        return [self.entry(tensors, Part(expert, 0, 0), matrix) for expert, matrix in enumerate(staged)]

    def entry(self, tensors: Mapping[str, torch.Tensor], part: "Part", src: torch.Tensor) -> QuantEntry:
        """The quantising copy of a part in full precision, ``src``, into the live tensors.

        The part has to begin and end where groups do; see ``ends_with_groups``.
        """
        weight = self.weight.of(tensors, self.shape).view(_with_experts(self.shape))[part.expert]
        scale = self.scale.of(tensors, self.scale_shape).view(_with_experts(self.scale_shape))[part.expert]
        rows, columns = src.shape
        down, across = (1, columns) if self.mode == "rows" else (BLOCK, BLOCK)
        return QuantEntry(
            src=src,
            dst=weight[part.row : part.row + rows, part.column : part.column + columns],
            scale=scale[
                part.row // down : math.ceil((part.row + rows) / down),
                part.column // across : math.ceil((part.column + columns) / across),
            ],
            mode=self.mode,
            through_bf16=self.dtype is DType.BFLOAT16,
            full_division=self.full_division,
            label=self.weight.storage,
        )

    def ends_with_groups(self, part: "Part", shape: tuple[int, int]) -> bool:
        """Whether a matrix of ``shape`` at ``part`` consists of whole groups."""
        down, across = (1, self.shape[-1]) if self.mode == "rows" else (BLOCK, BLOCK)
        ends = (
            (part.row, shape[0], self.shape[-2], down),
            (part.column, shape[1], self.shape[-1], across),
        )
        return all(at % step == 0 and ((at + size) % step == 0 or at + size == end) for at, size, end, step in ends)


@dataclass(frozen=True, slots=True)
class Part:
    """Where a matrix begins inside a parameter; ``expert`` is 0 in one without experts."""

    expert: int
    row: int
    column: int


@dataclass(frozen=True, slots=True)
class _Reading:
    """One way to read a live weight and its scales: transposed or not, and what a scale belongs to."""

    weight_transposed: bool
    scale_transposed: bool
    mode: QuantMode


def find_rules(
    names: Iterable[str], loaded: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> tuple[dict[str, QuantRule], dict[str, str]]:
    """Rules of parameters by name, and the reasons of those that have none.

    ``loaded`` are the parameters in full precision as a loader fills them, ``live`` all live tensors. Only what shapes
    settle is a rule. A square matrix could be read either way: it is read as the others of its kind are, if those
    agree. Values that a kernel shuffled or scaled anew under an unchanged shape are not seen here: ``quantised_check``
    tries each rule on vLLM's own step.
    """
    readings: dict[str, tuple[str, list[_Reading]]] = {}
    reasons: dict[str, str] = {}
    for name in names:
        found = _readings(name, loaded[name], live)
        if isinstance(found, str):
            reasons[name] = found
        else:
            readings[name] = found
    rules = {}
    for name, (scale, possible) in readings.items():
        kind = _kind(name)
        settled = {own[0] for other, (_, own) in readings.items() if len(own) == 1 and _kind(other) == kind}
        chosen = possible if len(possible) == 1 else [reading for reading in possible if settled == {reading}]
        if len(chosen) == 1 and not (len(possible) > 1 and any(_kind(other) == kind for other in reasons)):
            rules[name] = _rule(name, scale, loaded[name], live, chosen[0])
        else:
            reasons[name] = "its form does not settle how it is quantised, and no other parameter of its kind does"
    return rules, reasons


def _kind(name: str) -> str:
    """Parameters of one kind are quantised by one method: ``weight`` of projections, ``w13_weight`` of experts."""
    return name.rpartition(".")[2]


def _readings(name: str, loaded: torch.Tensor, live: Mapping[str, torch.Tensor]) -> tuple[str, list[_Reading]] | str:
    """The name of the scales and all ways to read them, or why there is none."""
    weight = live.get(name)
    if weight is None or dtype_of(weight.dtype) is not DType.FLOAT8_E4M3FN or loaded.dim() not in (2, 3):
        return "it is no float8_e4m3fn matrix"
    names = [name + ending for ending in SCALES if name + ending in live]
    if len(names) != 1 or dtype_of(live[names[0]].dtype) is not DType.FLOAT32:
        return f"it has no float32 scales: found {names} of {[name + ending for ending in SCALES]}"
    shape, scale = tuple(loaded.shape), live[names[0]]
    modes: tuple[QuantMode, ...] = ("blocks", "rows")
    found: dict[object, _Reading] = {}
    for weight_transposed, scale_transposed, mode in itertools.product((False, True), (False, True), modes):
        elements = _seen(weight, weight_transposed)
        scales = _seen(_scales(scale, len(shape), mode), scale_transposed)
        if tuple(elements.shape) == shape and tuple(scales.shape) == _grid(shape, mode):
            places = (_steps(elements), _steps(scales), mode)
            found.setdefault(places, _Reading(weight_transposed, scale_transposed, mode))
    if not found:
        return f"weights of shape {tuple(weight.shape)} with scales of shape {tuple(scale.shape)} fit no known grouping"
    return names[0], list(found.values())


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dims along which there is any step."""
    return tuple(int(stride) if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _seen(tensor: torch.Tensor, transposed: bool) -> torch.Tensor:
    return tensor.transpose(-1, -2) if transposed and tensor.dim() > 1 else tensor


def _scales(scale: torch.Tensor, num_dims: int, mode: QuantMode) -> torch.Tensor:
    """Scales per row may lack their last dim of 1."""
    return scale.unsqueeze(-1) if mode == "rows" and scale.dim() == num_dims - 1 else scale


def _rule(
    name: str, scale_name: str, loaded: torch.Tensor, live: Mapping[str, torch.Tensor], reading: _Reading
) -> QuantRule:
    weight = _seen(live[name].detach(), reading.weight_transposed)
    scale = _seen(_scales(live[scale_name].detach(), loaded.dim(), reading.mode), reading.scale_transposed)
    return QuantRule(
        staged=STAGED + name,
        shape=tuple(loaded.shape),
        dtype=dtype_of(loaded.dtype),
        weight=View(storage=name, offset=int(weight.storage_offset()), strides=tuple(weight.stride())),
        scale=View(storage=scale_name, offset=int(scale.storage_offset()), strides=tuple(scale.stride())),
        mode=reading.mode,
    )


def _with_experts(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if len(shape) == 3 else (1, *shape)


def _grid(shape: tuple[int, ...], mode: QuantMode) -> tuple[int, ...]:
    *experts, rows, columns = shape
    return (*experts, rows, 1) if mode == "rows" else (*experts, math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
