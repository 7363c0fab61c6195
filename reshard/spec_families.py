"""Checkpoint tensors of the model families that we know, from config fields.

Names and shapes follow the checkpoints of Llama, Mistral, Qwen2, Qwen3, Gemma-3, Qwen3-MoE, Mixtral, DeepSeek-V2/V3 and
Kimi-K2 as published on Hugging Face; tests compare them with Transformers' own modules on the meta device. Of Gemma-3
only the text model is described, under the names that it has by itself (``model.layers...``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.dtype import DType
from reshard.errors import LayoutError
from reshard.layout import TensorSpec
from reshard.spec import Cut, ModelSpec, ModelTensor

DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3_text"})
LATENT = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})
SPARSE = frozenset({"mixtral", "qwen3_moe"})
KNOWN = DENSE | LATENT | SPARSE
# What Gemma-3's config.json leaves to the defaults of Transformers' Gemma3TextConfig.
GEMMA_DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class _Config:
    """Fields of a config.json; a missing one is an error that names it."""

    fields: Mapping[str, Any]

    def number(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name)
        if value is None:
            if default is None:
                raise LayoutError(f"model config lacks {name!r}, which {self.kind} models have")
            return default
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.fields.get(name)
        return default if value is None else bool(value)

    @property
    def kind(self) -> str:
        return str(self.fields.get("model_type"))

    @property
    def head_dim(self) -> int:
        return self.number("head_dim", self.number("hidden_size") // self.number("num_attention_heads"))


def build_tensors(fields: Mapping[str, Any], *, name: str, dtype: DType | None) -> ModelSpec:
    """The ModelSpec of a config; see ``ModelSpec.from_config``."""
    config = _Config(_text_fields(fields))
    if config.kind not in KNOWN:
        raise LayoutError(
            f"model_type {config.kind!r} is not among {', '.join(sorted(KNOWN))}; "
            "for others reshard.spec_transformers.spec_from_transformers reads the shapes from the model itself"
        )
    stored = (
        DType.parse(str(config.fields.get("dtype") or config.fields.get("torch_dtype") or "bfloat16"))
        if dtype is None
        else dtype
    )
    build = _Builder(config, stored)
    tied = config.flag("tie_word_embeddings")
    tensors = tuple(build.all(tied))
    return ModelSpec(
        name=name or config.kind,
        origin=str(fields.get("origin", "config")),
        num_layers=config.number("num_hidden_layers"),
        num_heads=config.number("num_attention_heads"),
        num_kv_heads=config.number("num_key_value_heads", config.number("num_attention_heads")),
        vocab_size=config.number("vocab_size"),
        tensors=tensors,
        ties={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
    )


def _text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the text model, with Gemma-3's defaults filled in."""
    if fields.get("model_type") == "gemma3":
        outer = {key: fields[key] for key in ("origin", "dtype", "torch_dtype") if key in fields}
        fields = outer | dict(fields.get("text_config") or {}) | {"model_type": "gemma3_text"}
    if fields.get("model_type") == "gemma3_text":
        fields = {**GEMMA_DEFAULTS, **{key: value for key, value in fields.items() if value is not None}}
    return fields


@dataclass(frozen=True, slots=True)
class _Builder:
    """Yields tensors in model order."""

    config: _Config
    dtype: DType

    def all(self, tied: bool) -> Iterator[ModelTensor]:
        config = self.config
        hidden, vocab = config.number("hidden_size"), config.number("vocab_size")
        yield self._tensor("model.embed_tokens.weight", (vocab, hidden), "vocab")
        for layer in range(config.number("num_hidden_layers")):
            yield from self._layer(layer)
        yield self._tensor("model.norm.weight", (hidden,), "none", is_output=True)
        if not tied:
            yield self._tensor("lm_head.weight", (vocab, hidden), "vocab", is_output=True)

    def _tensor(self, name: str, shape: tuple[int, ...], cut: Cut, **place: Any) -> ModelTensor:
        dtype = place.pop("dtype", self.dtype)
        return ModelTensor(TensorSpec(name, shape, dtype), cut, **place)

    def _layer(self, layer: int) -> Iterator[ModelTensor]:
        prefix, hidden = f"model.layers.{layer}", self.config.number("hidden_size")
        yield self._tensor(f"{prefix}.input_layernorm.weight", (hidden,), "none", layer=layer)
        if self.config.kind in LATENT:
            yield from self._latent_attention(f"{prefix}.self_attn", layer)
        else:
            yield from self._attention(f"{prefix}.self_attn", layer)
        norms = ["post_attention_layernorm"]
        if self.config.kind == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for norm in norms:
            yield self._tensor(f"{prefix}.{norm}.weight", (hidden,), "none", layer=layer)
        if self._is_sparse(layer):
            yield from self._experts(prefix, layer)
        else:
            yield from self._mlp(f"{prefix}.mlp", self.config.number("intermediate_size"), layer)

    def _is_sparse(self, layer: int) -> bool:
        config = self.config
        if config.kind == "qwen3_moe":
            skipped = layer in (config.fields.get("mlp_only_layers") or ())
            return not skipped and (layer + 1) % config.number("decoder_sparse_step", 1) == 0
        if config.kind in LATENT:
            first, every = config.number("first_k_dense_replace", 0), config.number("moe_layer_freq", 1)
            return layer >= first and layer % every == 0
        return config.kind == "mixtral"

    def _attention(self, prefix: str, layer: int) -> Iterator[ModelTensor]:
        config = self.config
        hidden, head_dim, heads = config.number("hidden_size"), config.head_dim, config.number("num_attention_heads")
        kv_heads = config.number("num_key_value_heads", heads)
        has_bias = config.kind == "qwen2" or config.flag("attention_bias")
        cuts: tuple[tuple[str, int, Cut], ...] = (
            ("q", heads, "query"),
            ("k", kv_heads, "key"),
            ("v", kv_heads, "value"),
        )
        for letter, count, cut in cuts:
            name, size = f"{prefix}.{letter}_proj", count * head_dim
            yield self._tensor(f"{name}.weight", (size, hidden), cut, layer=layer, head_dim=head_dim)
            if has_bias:
                yield self._tensor(f"{name}.bias", (size,), cut, layer=layer, head_dim=head_dim)
        yield self._tensor(f"{prefix}.o_proj.weight", (hidden, heads * head_dim), "columns", layer=layer)
        if config.kind in ("llama", "qwen3", "qwen3_moe", "gemma3_text") and config.flag("attention_bias"):
            yield self._tensor(f"{prefix}.o_proj.bias", (hidden,), "none", layer=layer)
        if config.kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            for letter in "qk":
                yield self._tensor(f"{prefix}.{letter}_norm.weight", (head_dim,), "none", layer=layer)

    def _latent_attention(self, prefix: str, layer: int) -> Iterator[ModelTensor]:
        """Multi-head latent attention: the down-projections are shared by all heads, so engines replicate them."""
        config = self.config
        hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
        rope, nope = config.number("qk_rope_head_dim"), config.number("qk_nope_head_dim")
        value, latent = config.number("v_head_dim"), config.number("kv_lora_rank")
        query, rank = heads * (rope + nope), config.number("q_lora_rank", 0)
        fused = (rank, rank + latent + rope) if rank else None
        if fused:
            first = (0, fused[1])
            yield self._tensor(f"{prefix}.q_a_proj.weight", (rank, hidden), "none", layer=layer, fused=first)
            yield self._tensor(f"{prefix}.q_a_layernorm.weight", (rank,), "none", layer=layer)
            yield self._tensor(f"{prefix}.q_b_proj.weight", (query, rank), "rows", layer=layer, head_dim=rope + nope)
        else:
            yield self._tensor(f"{prefix}.q_proj.weight", (query, hidden), "rows", layer=layer, head_dim=rope + nope)
        shape = (latent + rope, hidden)
        yield self._tensor(f"{prefix}.kv_a_proj_with_mqa.weight", shape, "none", layer=layer, fused=fused)
        yield self._tensor(f"{prefix}.kv_a_layernorm.weight", (latent,), "none", layer=layer)
        rows = heads * (nope + value)
        yield self._tensor(f"{prefix}.kv_b_proj.weight", (rows, latent), "rows", layer=layer, head_dim=nope + value)
        yield self._tensor(f"{prefix}.o_proj.weight", (hidden, heads * value), "columns", layer=layer)

    def _mlp(self, prefix: str, size: int, layer: int, **place: Any) -> Iterator[ModelTensor]:
        hidden = self.config.number("hidden_size")
        names = ("w1", "w3", "w2") if self.config.kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        yield self._tensor(f"{prefix}.{names[0]}.weight", (size, hidden), "gate", layer=layer, **place)
        yield self._tensor(f"{prefix}.{names[1]}.weight", (size, hidden), "up", layer=layer, **place)
        yield self._tensor(f"{prefix}.{names[2]}.weight", (hidden, size), "columns", layer=layer, **place)

    def _experts(self, prefix: str, layer: int) -> Iterator[ModelTensor]:
        config = self.config
        hidden = config.number("hidden_size")
        block = f"{prefix}.block_sparse_moe" if config.kind == "mixtral" else f"{prefix}.mlp"
        num = self._num_experts()
        size = config.number("intermediate_size" if config.kind == "mixtral" else "moe_intermediate_size")
        yield self._tensor(f"{block}.gate.weight", (num, hidden), "none", layer=layer)
        if config.kind in ("deepseek_v3", "kimi_k2"):
            name = f"{block}.gate.e_score_correction_bias"
            yield self._tensor(name, (num,), "none", layer=layer, dtype=DType.FLOAT32)
        for expert in range(num):
            yield from self._mlp(f"{block}.experts.{expert}", size, layer, expert=expert)
        shared = config.number("n_shared_experts", 0) if config.kind in LATENT else 0
        if shared:
            yield from self._mlp(f"{block}.shared_experts", size * shared, layer, is_shared_expert=True)

    def _num_experts(self) -> int:
        """Routed experts of a layer. Transformers 5 writes Qwen3-MoE's under the name that Mixtral has for them."""
        config = self.config
        if config.kind in LATENT:
            return config.number("n_routed_experts")
        is_local = config.kind == "mixtral" or (
            "num_experts" not in config.fields and "num_local_experts" in config.fields
        )
        return config.number("num_local_experts" if is_local else "num_experts")
