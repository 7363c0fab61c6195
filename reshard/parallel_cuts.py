"""How one rank of a tensor parallel group holds one tensor, in each style of engine (note "styles" in
``parallel_layout``).
"""

from dataclasses import dataclass

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


def padded_vocab(vocab_size: int, multiple: int) -> int:
    """The vocabulary rounded up to a multiple. Megatron pads to 128 times its tensor parallel size."""
    return -(-vocab_size // multiple) * multiple


class Cutter:
    """Cuts the tensors of one model among ``num_tp`` ranks in one style ("plain", "megatron" or "vllm")."""

    def __init__(self, model: ModelSpec, style: str, num_tp: int) -> None:
        self._model = model
        self._style = style
        self._num_tp = num_tp

    def boxes(self, tensor: ModelTensor, tp_idx: int, local_expert: int) -> list[Box]:
        """What rank ``tp_idx`` holds of the tensor; ``local_expert`` is the expert's place in a stack."""
        found = self._within_storage(tensor, tp_idx)
        if self._style == "vllm" and tensor.expert is not None:
            size = self._expert_size(tensor)
            found = [Box(b.start, b.stop, b.offset + local_expert * size, b.strides) for b in found]
        return found

    def storage(self, tensor: ModelTensor, local_expert: int) -> str:
        """The engine's name for the storage that the tensor's boxes lie in."""
        name = tensor.spec.name
        if self._style == "plain" or tensor.layer is None:
            return name
        prefix, leaf = name.rsplit(".", 1)
        stem, last = prefix.rsplit(".", 1)
        if self._style == "vllm" and tensor.expert is not None:
            stack = "w2_weight" if tensor.cut == "columns" else "w13_weight"
            return f"{stem.rsplit('.', 1)[0]}.{stack}"
        if self._style == "megatron" and tensor.expert is not None:
            name = f"{stem.rsplit('.', 1)[0]}.{local_expert}.{last}.{leaf}"
            stem = f"{stem.rsplit('.', 1)[0]}.{local_expert}"
        if tensor.cut in ("query", "key", "value"):
            return f"{stem}.{'linear_qkv' if self._style == 'megatron' else 'qkv_proj'}.{leaf}"
        if tensor.cut in ("gate", "up"):
            return f"{stem}.{'linear_fc1' if self._style == 'megatron' else 'gate_up_proj'}.{leaf}"
        return name

    def _expert_size(self, tensor: ModelTensor) -> int:
        """Elements of one expert's slice of its stack: gate and up together, or down."""
        return tensor.spec.numel // self._num_tp * (1 if tensor.cut == "columns" else 2)

    def _within_storage(self, tensor: ModelTensor, tp_idx: int) -> list[Box]:
        cut = tensor.cut
        if cut == "none":
            return [self._dense(tensor, 0, 0, tensor.spec.shape[0] if tensor.spec.shape else 1)]
        if cut == "columns":
            low, high = self._even(tensor, 1, tp_idx)
            return [self._dense(tensor, 1, low, high)]
        if cut == "vocab":
            return self._vocab(tensor, tp_idx)
        if self._style == "plain" or cut == "rows":
            return [self._dense(tensor, 0, *self._even(tensor, 0, tp_idx))]
        if cut in ("gate", "up"):
            low, high = self._even(tensor, 0, tp_idx)
            box = self._dense(tensor, 0, low, high)
            shift = (high - low) * self._row_size(tensor) if cut == "up" else 0
            return [Box(box.start, box.stop, shift, box.strides)]
        return self._megatron_qkv(tensor, tp_idx) if self._style == "megatron" else self._vllm_qkv(tensor, tp_idx)

    def _even(self, tensor: ModelTensor, dim: int, tp_idx: int) -> tuple[int, int]:
        size = tensor.spec.shape[dim]
        if size % self._num_tp:
            good = [n for n in range(1, min(size, 1024) + 1) if size % n == 0]
            raise LayoutError(
                f"{tensor.spec.name}: dim {dim} of size {size} does not divide among axis tp={self._num_tp}; "
                f"sizes that do: {', '.join(map(str, good[:12]))}"
            )
        part = size // self._num_tp
        return tp_idx * part, (tp_idx + 1) * part

    def _dense(self, tensor: ModelTensor, dim: int, low: int, high: int) -> Box:
        """The slice ``[low, high)`` of one dim, dense in a storage of its own."""
        shape = list(tensor.spec.shape)
        start = [0] * len(shape)
        stop = list(shape)
        if shape:
            start[dim], stop[dim] = low, high
            shape[dim] = high - low
        strides, step = [0] * len(shape), 1
        for axis in reversed(range(len(shape))):
            strides[axis] = step
            step *= shape[axis]
        return Box(tuple(start), tuple(stop), 0, tuple(strides))

    def _row_size(self, tensor: ModelTensor) -> int:
        return tensor.spec.numel // tensor.spec.shape[0]

    def _rows(self, tensor: ModelTensor, low: int, high: int, at_row: int) -> Box:
        box = self._dense(tensor, 0, low, high)
        return Box(box.start, box.stop, at_row * self._row_size(tensor), box.strides)

    def _vocab(self, tensor: ModelTensor, tp_idx: int) -> list[Box]:
        size = tensor.spec.shape[0]
        if self._style == "plain":
            return [self._dense(tensor, 0, *self._even(tensor, 0, tp_idx))]
        base = MEGATRON_VOCAB_MULTIPLE * self._num_tp if self._style == "megatron" else VLLM_VOCAB_MULTIPLE
        part, left_over = divmod(padded_vocab(size, base), self._num_tp)
        if left_over:
            raise LayoutError(f"{tensor.spec.name}: a padded vocabulary does not divide among axis tp={self._num_tp}")
        low, high = min(tp_idx * part, size), min((tp_idx + 1) * part, size)
        return [self._dense(tensor, 0, low, high)] if low < high else []

    def _megatron_qkv(self, tensor: ModelTensor, tp_idx: int) -> list[Box]:
        """Fused rows go group by group: queries, key, value; the rank owns an even interval of them."""
        groups, head_dim = self._model.num_kv_heads, tensor.head_dim
        per_group = self._model.num_heads // groups
        group_rows = (per_group + 2) * head_dim
        if groups * group_rows % self._num_tp:
            raise LayoutError(
                f"{tensor.spec.name}: {groups * group_rows} fused rows don't divide among axis tp={self._num_tp}"
            )
        part = groups * group_rows // self._num_tp
        own_low, own_high = tp_idx * part, (tp_idx + 1) * part
        shift = {"query": 0, "key": per_group, "value": per_group + 1}[tensor.cut] * head_dim
        rows = (per_group if tensor.cut == "query" else 1) * head_dim
        found = []
        for group in range(groups):
            first = group * group_rows + shift
            low, high = max(first, own_low), min(first + rows, own_high)
            if low < high:
                begin = group * rows + low - first
                found.append(self._rows(tensor, begin, begin + high - low, low - own_low))
        return found

    def _vllm_qkv(self, tensor: ModelTensor, tp_idx: int) -> list[Box]:
        """A rank's queries, then its keys, then its values; key/value heads are replicated where there are too few."""
        heads, kv_heads, head_dim, num_tp = (
            self._model.num_heads,
            self._model.num_kv_heads,
            tensor.head_dim,
            self._num_tp,
        )
        if heads % num_tp or (kv_heads % num_tp and num_tp % kv_heads):
            raise LayoutError(
                f"{tensor.spec.name}: {heads} query and {kv_heads} key/value heads don't divide among axis tp={num_tp}"
            )
        q_heads, own_kv = heads // num_tp, max(kv_heads // num_tp, 1)
        if tensor.cut == "query":
            return [self._rows(tensor, tp_idx * q_heads * head_dim, (tp_idx + 1) * q_heads * head_dim, 0)]
        first = tp_idx * kv_heads // num_tp
        at_row = (q_heads + (own_kv if tensor.cut == "value" else 0)) * head_dim
        return [self._rows(tensor, first * head_dim, (first + own_kv) * head_dim, at_row)]
