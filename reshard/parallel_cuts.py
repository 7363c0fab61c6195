"""How one rank of a tensor parallel group holds one tensor, in each style of engine (note "styles" in
``parallel_layout``).
"""

import math
from dataclasses import dataclass, replace

from reshard.errors import LayoutError
from reshard.spec import ModelSpec, ModelTensor

MEGATRON_VOCAB_MULTIPLE = 128
VLLM_VOCAB_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor at ``offset`` elements from the start of a storage, with strides in elements."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """The boxes of one tensor in one rank's parameter, which has ``num_rows`` rows of ``row_numel`` elements on dim 0.

    ``is_stacked``: dim 0 of the parameter numbers experts, so that each box lies in one row; else rows of the parameter
    are rows of the tensors in it.
    """

    boxes: tuple[Box, ...]
    num_rows: int
    row_numel: int
    is_stacked: bool = False

    def chunk(self, index: int, num_chunks: int) -> list[Box]:
        """What part ``index`` holds when the parameter is cut along its dim 0 in ceil chunks, each in a storage of its
        own, as ``torch.chunk`` and FSDP2 do: the last parts may be short or empty.
        """
        size = max(math.ceil(self.num_rows / num_chunks), 1)
        found = (self._between(box, index * size, (index + 1) * size) for box in self.boxes)
        return [box for box in found if box is not None]

    def _between(self, box: Box, low: int, high: int) -> Box | None:
        first = box.offset // self.row_numel
        last = first + (box.stop[0] - box.start[0] if box.start and not self.is_stacked else 1)
        begin, end = max(low, first), min(high, last)
        if begin >= end:
            return None
        if self.is_stacked or not box.start:
            return replace(box, offset=box.offset - low * self.row_numel)
        start = box.start[0] + begin - first
        return Box(
            (start, *box.start[1:]),
            (start + end - begin, *box.stop[1:]),
            box.offset + (begin - first - low) * self.row_numel,
            box.strides,
        )


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Which expert parallel rank has an expert, its number there, and how many that rank has."""

    part: int = 0
    local: int = 0
    num_local: int = 1

    @classmethod
    def of(cls, expert: int, *, num_experts: int, num_parts: int) -> "ExpertPlace":
        """Experts dealt out in order, as evenly as can be, early ranks first."""
        base, further = divmod(num_experts, num_parts)
        early = further * (base + 1)
        if expert < early:
            return cls(expert // (base + 1), expert % (base + 1), base + 1)
        return cls(further + (expert - early) // base, (expert - early) % base, base)


def padded_vocab(vocab_size: int, multiple: int) -> int:
    """The vocabulary rounded up to a multiple. Megatron pads to 128 times its tensor parallel size."""
    return -(-vocab_size // multiple) * multiple


def indivisible(name: str, what: str, axis: str, parts: int, units: int, *further: int) -> LayoutError:
    """An error that says what of a tensor does not divide among an axis, and which sizes of the axis would do.

    ``units``, and each of ``further``, must be a multiple of the axis.
    """
    good = [n for n in range(1, min(units, 4096) + 1) if all(size % n == 0 for size in (units, *further))]
    shown = ", ".join(map(str, good[:12])) + (f" ... {good[-1]}" if len(good) > 12 else "")
    return LayoutError(f"{name}: {what} does not divide among axis {axis}={parts}; sizes that do: {shown}")


class Cutter:
    """Cuts the tensors of one model among ``num_tp`` ranks in one style ("plain", "megatron" or "vllm")."""

    def __init__(self, model: ModelSpec, style: str, num_tp: int, *, whole_shared_experts: bool = False) -> None:
        self._model = model
        self._style = style
        self._num_tp = num_tp
        self._whole_shared_experts = whole_shared_experts

    def shard(self, tensor: ModelTensor, tp_idx: int, place: ExpertPlace) -> Shard:
        """What rank ``tp_idx`` holds of the tensor; ``place`` is the expert's, for a routed expert."""
        shard = self._within_parameter(tensor, tp_idx)
        if not self._is_stacked(tensor):
            return shard
        size = shard.num_rows * shard.row_numel
        boxes = tuple(replace(box, offset=box.offset + place.local * size) for box in shard.boxes)
        return Shard(boxes, place.num_local, size, is_stacked=True)

    def storage(self, tensor: ModelTensor, place: ExpertPlace) -> str:
        """The engine's name for the storage that the tensor's boxes lie in; vLLM's are those of its version 0.32."""
        name = tensor.spec.name
        if self._style == "plain" or tensor.layer is None:
            return name
        prefix, leaf = name.rsplit(".", 1)
        stem, last = prefix.rsplit(".", 1)
        experts = stem.rsplit(".", 1)[0]
        if self._is_stacked(tensor):
            return f"{experts}.routed_experts.{'w2_weight' if tensor.cut == 'columns' else 'w13_weight'}"
        if self._style == "megatron" and tensor.expert is not None:
            stem = f"{experts}.{place.local}"
        if tensor.cut in ("query", "key", "value"):
            return f"{stem}.{'linear_qkv' if self._style == 'megatron' else 'qkv_proj'}.{leaf}"
        if tensor.cut in ("gate", "up"):
            return f"{stem}.{'linear_fc1' if self._style == 'megatron' else 'gate_up_proj'}.{leaf}"
        if tensor.fused is not None and self._style == "vllm":
            return f"{stem}.fused_qkv_a_proj.{leaf}"
        return f"{stem}.{last}.{leaf}"

    def _is_stacked(self, tensor: ModelTensor) -> bool:
        return self._style == "vllm" and tensor.expert is not None

    def _within_parameter(self, tensor: ModelTensor, tp_idx: int) -> Shard:
        cut, style = tensor.cut, self._style
        if cut == "none" or (tensor.is_shared_expert and self._whole_shared_experts):
            return self._uncut(tensor)
        if cut == "columns":
            return _dense(tensor, 1, *self._even(tensor, 1, tp_idx))
        if cut == "vocab" and style != "plain":
            return self._padded_vocab(tensor, tp_idx)
        if style == "plain" or cut in ("rows", "vocab"):
            self._check_whole_heads(tensor)
            return _dense(tensor, 0, *self._even(tensor, 0, tp_idx))
        if cut in ("gate", "up"):
            return _fused(tensor, *self._even(tensor, 0, tp_idx))
        return self._megatron_qkv(tensor, tp_idx) if style == "megatron" else self._vllm_qkv(tensor, tp_idx)

    def _uncut(self, tensor: ModelTensor) -> Shard:
        if tensor.cut in ("gate", "up") and self._style != "plain":
            return _fused(tensor, 0, tensor.spec.shape[0])
        shard = _dense(tensor, 0, 0, tensor.spec.shape[0] if tensor.spec.shape else 1)
        if tensor.fused is None or self._style != "vllm":
            return shard
        first, num_rows = tensor.fused
        (box,) = shard.boxes
        return Shard((replace(box, offset=first * shard.row_numel),), num_rows, shard.row_numel)

    def _even(self, tensor: ModelTensor, dim: int, tp_idx: int) -> tuple[int, int]:
        size = tensor.spec.shape[dim]
        if size % self._num_tp:
            raise indivisible(tensor.spec.name, f"dim {dim} of size {size}", "tp", self._num_tp, size)
        part = size // self._num_tp
        return tp_idx * part, (tp_idx + 1) * part

    def _check_whole_heads(self, tensor: ModelTensor) -> None:
        """Engines give each rank whole heads of latent attention's projections."""
        if tensor.cut != "rows" or tensor.head_dim == 1 or self._style == "plain":
            return
        size = tensor.spec.shape[0]
        if (size // tensor.head_dim) % self._num_tp:
            what = f"dim 0 of size {size}, {size // tensor.head_dim} heads of {tensor.head_dim} rows,"
            raise indivisible(tensor.spec.name, what, "tp", self._num_tp, size // tensor.head_dim)

    def _padded_vocab(self, tensor: ModelTensor, tp_idx: int) -> Shard:
        size, num_tp = tensor.spec.shape[0], self._num_tp
        padded = padded_vocab(
            size, MEGATRON_VOCAB_MULTIPLE * num_tp if self._style == "megatron" else VLLM_VOCAB_MULTIPLE
        )
        if padded % num_tp:
            what = f"dim 0 of size {size}, padded to {padded},"
            raise indivisible(tensor.spec.name, what, "tp", num_tp, padded)
        part = padded // num_tp
        low, high = min(tp_idx * part, size), min((tp_idx + 1) * part, size)
        dense = _dense(tensor, 0, low, high)
        return Shard(dense.boxes if low < high else (), part, dense.row_numel)

    def _megatron_qkv(self, tensor: ModelTensor, tp_idx: int) -> Shard:
        """Fused rows go group by group: queries, key, value; the rank owns an even interval of them."""
        groups, head_dim = self._model.num_kv_heads, tensor.head_dim
        per_group = self._model.num_heads // groups
        group_rows = (per_group + 2) * head_dim
        part, left_over = divmod(groups * group_rows, self._num_tp)
        if left_over:
            what = f"dim 0 of the fused queries, keys and values, of size {groups * group_rows},"
            raise indivisible(tensor.spec.name, what, "tp", self._num_tp, groups * group_rows)
        own_low, own_high = tp_idx * part, (tp_idx + 1) * part
        shift = {"query": 0, "key": per_group, "value": per_group + 1}[tensor.cut] * head_dim
        rows = (per_group if tensor.cut == "query" else 1) * head_dim
        found = []
        for group in range(groups):
            first = group * group_rows + shift
            low, high = max(first, own_low), min(first + rows, own_high)
            if low < high:
                begin = group * rows + low - first
                found.append(_rows(tensor, begin, begin + high - low, low - own_low))
        return Shard(tuple(found), part, _row_numel(tensor))

    def _vllm_qkv(self, tensor: ModelTensor, tp_idx: int) -> Shard:
        """A rank's queries, then its keys, then its values; key/value heads are replicated where there are too few."""
        heads, kv_heads, head_dim = self._model.num_heads, self._model.num_kv_heads, tensor.head_dim
        num_tp = self._num_tp
        if heads % num_tp or (kv_heads % num_tp and num_tp % kv_heads):
            good = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
            raise LayoutError(
                f"{tensor.spec.name}: dim 0 of size {tensor.spec.shape[0]}: {heads} query and {kv_heads} key/value "
                f"heads don't divide among axis tp={num_tp}; sizes that do: {', '.join(map(str, good))}"
            )
        q_heads, own_kv = heads // num_tp, max(kv_heads // num_tp, 1)
        num_rows = (q_heads + 2 * own_kv) * head_dim
        if tensor.cut == "query":
            box = _rows(tensor, tp_idx * q_heads * head_dim, (tp_idx + 1) * q_heads * head_dim, 0)
        else:
            first = tp_idx * kv_heads // num_tp
            at_row = (q_heads + (own_kv if tensor.cut == "value" else 0)) * head_dim
            box = _rows(tensor, first * head_dim, (first + own_kv) * head_dim, at_row)
        return Shard((box,), num_rows, _row_numel(tensor))


def _dense(tensor: ModelTensor, dim: int, low: int, high: int) -> Shard:
    """The slice ``[low, high)`` of one dim, a dense parameter of its own."""
    shape = list(tensor.spec.shape)
    start, stop = [0] * len(shape), list(shape)
    if shape:
        start[dim], stop[dim] = low, high
        shape[dim] = high - low
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    box = Box(tuple(start), tuple(stop), 0, strides)
    return Shard((box,), shape[0] if shape else 1, strides[0] if shape else 1)


def _fused(tensor: ModelTensor, low: int, high: int) -> Shard:
    """Rows ``[low, high)`` of ``gate`` or ``up`` in a parameter that holds the former, then the latter."""
    box = _rows(tensor, low, high, high - low if tensor.cut == "up" else 0)
    return Shard((box,), 2 * (high - low), _row_numel(tensor))


def _row_numel(tensor: ModelTensor) -> int:
    return tensor.spec.numel // tensor.spec.shape[0]


def _rows(tensor: ModelTensor, low: int, high: int, at_row: int) -> Box:
    (box,) = _dense(tensor, 0, low, high).boxes
    return replace(box, offset=at_row * _row_numel(tensor))
