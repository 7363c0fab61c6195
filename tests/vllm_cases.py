"""Small models that keep the real structure of those that vLLM serves, and the proof that a learnt layout is exact.

Labels: element ``i`` of a checkpoint tensor has the value ``first + i``, different in all tensors, exact in float32.
vLLM's own loader puts them into a real model of the same rank; each element of it must be what the layout says.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import initialize_model

from reshard import TensorSpec
from reshard.plan_oracle import byte_offsets, elements
from reshard.spec import SPECS
from reshard.vllm.layout import EngineLayout, learn_layout
from reshard.vllm.meta_model import isolated
from reshard.vllm.planning import engine_config, parallel_rank

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WITHOUT_HEAD_DIM = {key: value for key, value in BASE.items() if key != "head_dim"}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
LATENT = {
    **WITHOUT_HEAD_DIM,
    **EXPERTS,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True},
    "qwen2": {
        **WITHOUT_HEAD_DIM,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
    },
    "qwen3": {**BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        **BASE,
        **EXPERTS,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    },
    "gemma3": {
        **BASE,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 64,
    },
    "deepseek_v2": {
        **LATENT,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
    },
    "deepseek_v3": {
        **LATENT,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 24,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
    },
}
FIRST_LABEL = 10


@dataclass(frozen=True, slots=True)
class Engine:
    """A planned engine: a model's folder, its checkpoint, and how it is parallel."""

    folder: Path
    checkpoint: Sequence[TensorSpec]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False

    @contextlib.contextmanager
    def rank(self, rank: int, **model: Any) -> Iterator[VllmConfig]:
        """vLLM's parallel state of one rank, in float32."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep}
        config = engine_config(self.folder, **sizes, rank=rank, dtype=torch.float32, **model)
        with parallel_rank(config, rank=rank):
            yield config


def real_model(config: VllmConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> nn.Module:
    """The model that the rank builds, on the CPU: each parameter filled with -1, then loaded by vLLM's own loader."""
    with isolated(config) as own:
        model = initialize_model(vllm_config=own)
        for parameter in model.parameters():
            parameter.fill_(-1)
        model.load_weights(weights)
    return model


def first_labels(checkpoint: Sequence[TensorSpec]) -> dict[str, int]:
    """The label of every tensor's first element."""
    found, at = {}, FIRST_LABEL
    for spec in checkpoint:
        found[spec.name] = at
        at += spec.numel
    assert at < 1 << 24, "labels must be exact in float32"
    return found


def labelled(checkpoint: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    for spec, first in zip(checkpoint, first_labels(checkpoint).values(), strict=True):
        yield spec.name, torch.arange(first, first + spec.numel, dtype=torch.float32).reshape(spec.shape)


def check_rank(engine: Engine, rank: int) -> EngineLayout:
    """Learn one rank's layout, load labels into a real model of that rank, compare every element of every parameter."""
    with engine.rank(rank) as config:
        learnt = learn_layout(config, engine.checkpoint, rank=rank)
        model = real_model(config, labelled(engine.checkpoint))
    check_storages(learnt, rank, dict(model.named_parameters()), first_labels(engine.checkpoint))
    return learnt


def check_storages(
    learnt: EngineLayout, rank: int, parameters: Mapping[str, torch.Tensor], firsts: Mapping[str, int]
) -> None:
    """Each parameter must hold exactly the labels that the layout says, and no label where it says nothing."""
    wanted = {name: torch.full((_flat(tensor).numel(),), math.nan) for name, tensor in parameters.items()}
    for holding in learnt.layout.holdings(rank):
        region, address = holding.region, holding.address
        at = torch.from_numpy(byte_offsets(region, address)) // address.dtype.itemsize
        labels = elements(region, learnt.layout.specs[region.name].shape) + firsts[region.name]
        assert wanted[address.storage][at].isnan().all(), f"{address.storage}: two holdings claim the same elements"
        wanted[address.storage][at] = torch.from_numpy(labels).float()
    for name, tensor in parameters.items():
        flat, said = _flat(tensor).float(), ~wanted[name].isnan()
        assert torch.equal(flat[said], wanted[name][said]), f"{name}: the layout is wrong"
        assert name in learnt.opaque or bool((flat[~said] < FIRST_LABEL).all()), f"{name}: the layout misses elements"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def full_config(name: str) -> dict[str, Any]:
    """A bundled spec's fields with those that vLLM needs besides, as the published config.json has them."""
    fields: dict[str, Any] = json.loads((SPECS / f"{name}.json").read_text())
    return {**fields, **_FULL[fields["model_type"]]}


_FULL: Mapping[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 8, "norm_topk_prob": True},
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
    },
}
