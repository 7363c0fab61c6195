"""Model specs of any causal language model that Transformers knows, read from the module itself on the meta device."""

import re
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
    "embed_tokens": "vocab",
    "lm_head": "vocab",
}
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def spec_from_transformers(config: Any, *, name: str = "", dtype: DType = DType.BFLOAT16) -> ModelSpec:
    """The spec of ``AutoModelForCausalLM.from_config(config)``; builds it on the meta device, so it takes no memory.

    Names are the module's own. Tensors whose last module is none of the usual projections count as uncut: every rank
    of a tensor parallel group then holds them whole. Needs ``transformers``. Raises LayoutError for a model without
    layers.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    text = config.get_text_config()
    kept = dict(model.named_parameters(remove_duplicate=True))
    everything = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in kept.items()}
    ties = {other: first[id(p)] for other, p in everything.items() if first[id(p)] != other}
    tensors = tuple(_tensor(name, parameter, text, dtype) for name, parameter in kept.items())
    num_layers = 1 + max((t.layer for t in tensors if t.layer is not None), default=-1)
    if not num_layers:
        raise LayoutError(f"{type(model).__name__} has no numbered layers: its tensors can't be dealt out to stages")
    return ModelSpec(
        name=name or text.model_type,
        origin=f"transformers {type(model).__name__}",
        num_layers=num_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads or text.num_attention_heads,
        vocab_size=text.vocab_size,
        tensors=tensors,
        ties=ties,
    )


def _tensor(name: str, parameter: torch.Tensor, text: Any, dtype: DType) -> ModelTensor:
    parts = name.split(".")
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    cut = _CUTS.get(parts[-2], "none") if len(parts) > 1 else "none"
    if parts[-1] == "bias" and cut == "columns":
        cut = "none"
    heads = text.num_attention_heads if cut == "query" else text.num_key_value_heads or text.num_attention_heads
    head_dim = parameter.shape[0] // heads if cut in ("query", "key", "value") else 1
    stored = dtype if dtype_of(parameter.dtype).is_castable else dtype_of(parameter.dtype)
    return ModelTensor(
        TensorSpec(name, tuple(parameter.shape), stored),
        cut,
        layer=int(layer.group(1)) if layer else None,
        expert=int(expert.group(1)) if expert else None,
        head_dim=head_dim,
        is_output=(layer is None and cut != "vocab") or parts[0] == "lm_head",
    )
