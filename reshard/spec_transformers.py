"""Checkpoint tensors and model specs of any causal language model that Transformers knows, read from the module itself
on the meta device.

Transformers may hold tensors in another form than checkpoints do (all experts of a layer in one stack); its own
conversion for saving brings them back to the published names and shapes.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from reshard.dtype import DType
from reshard.errors import LayoutError
from reshard.layout import TensorSpec
from reshard.spec import Cut, ModelSpec, ModelTensor
from reshard.torch_layout import dtype_of

_CUTS: dict[str, Cut] = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "columns",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "columns",
    "w1": "gate",
    "w3": "up",
    "w2": "columns",
    "q_b_proj": "rows",
    "kv_b_proj": "rows",
    "embed_tokens": "vocab",
    "lm_head": "vocab",
}
_LATENT_ROWS = frozenset({"q_proj", "q_b_proj", "kv_b_proj"})
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a published checkpoint of a model lists: every tensor once; ``ties`` maps further names to listed ones."""

    tensors: tuple[TensorSpec, ...]
    ties: Mapping[str, str]
    architecture: str


def checkpoint_from_transformers(config: Any, *, dtype: DType = DType.BFLOAT16) -> Checkpoint:
    """What ``save_pretrained`` of ``AutoModelForCausalLM.from_config(config)`` would write, weights being ``dtype``.

    Built on the meta device, so it takes no memory. Persistent buffers count; tensors that Transformers keeps in
    float32 are float32, and integers stay what they are. Needs ``transformers``.
    """
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, model.state_dict())
    kept = re.compile("|".join(map(re.escape, model._keep_in_fp32_modules_strict or ())) or "(?!)")
    follows = set(model.all_tied_weights_keys)
    first: dict[object, str] = {}
    for name in sorted(saved, key=lambda name: name in follows):
        first.setdefault(_identity(saved[name]), name)
    tensors = []
    for name in first.values():
        own = dtype_of(saved[name].dtype)
        wanted = DType.FLOAT32 if kept.search(name) else dtype
        tensors.append(TensorSpec(name, tuple(saved[name].shape), wanted if own.is_castable else own))
    ties = {name: first[_identity(t)] for name, t in saved.items() if first[_identity(t)] != name}
    return Checkpoint(tensors=tuple(tensors), ties=ties, architecture=type(model).__name__)


def _identity(tensor: torch.Tensor) -> object:
    """Equal for two tensors that are the same elements of one storage."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def spec_from_transformers(config: Any, *, name: str = "", dtype: DType = DType.BFLOAT16) -> ModelSpec:
    """The spec of ``AutoModelForCausalLM.from_config(config)``, under its checkpoint's names.

    Tensors whose last module is none of the usual projections count as uncut: every rank of a tensor parallel group
    then holds them whole. Needs ``transformers``. Raises LayoutError for a model without layers.
    """
    checkpoint = checkpoint_from_transformers(config, dtype=dtype)
    text = config.get_text_config()
    tensors = tuple(_tensors(checkpoint, _Heads.of(text)))
    num_layers = 1 + max((t.layer for t in tensors if t.layer is not None), default=-1)
    if not num_layers:
        raise LayoutError(f"{checkpoint.architecture} has no numbered layers: its tensors can't be dealt out to stages")
    return ModelSpec(
        name=name or text.model_type,
        origin=f"transformers {checkpoint.architecture}",
        num_layers=num_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads or text.num_attention_heads,
        vocab_size=text.vocab_size,
        tensors=tensors,
        ties=checkpoint.ties,
    )


@dataclass(frozen=True, slots=True)
class _Heads:
    """Numbers of attention heads; ``is_latent`` where all heads share one compressed key and value."""

    queries: int
    pairs: int
    is_latent: bool

    @classmethod
    def of(cls, text: Any) -> "_Heads":
        fields = text.to_dict()
        num = int(text.num_attention_heads)
        return cls(num, int(text.num_key_value_heads or num), fields.get("kv_lora_rank") is not None)

    def place(self, module: str, num_rows: int) -> tuple[Cut, int]:
        """How the rows of a projection are cut, and how many make a head."""
        if self.is_latent and module in _LATENT_ROWS:
            return "rows", num_rows // self.queries
        cut = _CUTS.get(module, "none")
        if cut == "query":
            return cut, num_rows // self.queries
        return cut, num_rows // self.pairs if cut in ("key", "value") else 1


def _tensors(checkpoint: Checkpoint, heads: _Heads) -> Iterator[ModelTensor]:
    rows = {spec.name: spec.shape[0] for spec in checkpoint.tensors if spec.shape}
    for spec in checkpoint.tensors:
        parts = spec.name.split(".")
        module = parts[-2] if len(parts) > 1 else ""
        layer, expert = _LAYER.search(spec.name), _EXPERT.search(spec.name)
        cut, head_dim = heads.place(module, spec.shape[0] if spec.shape else 1)
        if parts[-1] == "bias" and cut == "columns":
            cut = "none"
        yield ModelTensor(
            spec,
            cut,
            layer=int(layer.group(1)) if layer else None,
            expert=int(expert.group(1)) if expert else None,
            head_dim=head_dim,
            is_output=(layer is None and cut != "vocab") or parts[0] == "lm_head",
            is_shared_expert=".shared_experts." in spec.name,
            fused=_fused_rows(spec.name, rows),
        )


def _fused_rows(name: str, rows: Mapping[str, int]) -> tuple[int, int] | None:
    """First row and number of rows in the down-projection that engines fuse for latent attention."""
    stem, module, leaf = name.rsplit(".", 2) if name.count(".") > 1 else ("", "", "")
    queries, pairs = f"{stem}.q_a_proj.{leaf}", f"{stem}.kv_a_proj_with_mqa.{leaf}"
    if module not in ("q_a_proj", "kv_a_proj_with_mqa") or queries not in rows or pairs not in rows:
        return None
    return (0 if module == "q_a_proj" else rows[queries], rows[queries] + rows[pairs])
