"""Models by shape, their trainer's weights, and one vLLM engine, for the benches that need them."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
)
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

if importlib.util.find_spec("ray") is None:
    sys.modules["ray"] = types.ModuleType("ray")  # vLLM's ipc engine imports it and uses it in another of its modes

SHAPES: dict[str, dict[str, Any]] = {
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "4b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1024,
    },
    "30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "vocab_size": 151936,
    },
}
COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GIB = 1 << 30
Weights = dict[str, torch.Tensor]


def model_config(model: str) -> dict[str, Any]:
    """The config.json of one of the ``SHAPES``."""
    return COMMON | SHAPES[model]


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensors of a config, of those above."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    of_layer = {**attention_shapes(config), **mlp_shapes(config)}
    for name in ("input_layernorm", "post_attention_layernorm"):
        of_layer[f"{name}.weight"] = (hidden,)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Projections with biases in Qwen2, with norms of each head in Qwen3."""
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    rows = {"q": config["num_attention_heads"] * head_dim}
    rows |= dict.fromkeys(("k", "v"), config["num_key_value_heads"] * head_dim)
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{n}_proj.weight": (size, hidden) for n, size in rows.items()}
    if config["model_type"] == "qwen2":
        shapes |= {f"self_attn.{n}_proj.bias": (size,) for n, size in rows.items()}
    else:
        shapes |= {f"self_attn.{n}_norm.weight": (head_dim,) for n in ("q", "k")}
    return shapes | {"self_attn.o_proj.weight": (hidden, rows["q"])}


def mlp_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """One gated MLP, or a router and its experts."""
    hidden = config["hidden_size"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    one = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if "num_experts" not in config:
        return {f"mlp.{name}.weight": shape for name, shape in one.items()}
    experts = range(config["num_experts"])
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (len(experts), hidden)}
    return shapes | {f"mlp.experts.{e}.{name}.weight": shape for e in experts for name, shape in one.items()}


def random_weights(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, *, device: torch.device | str = "cuda"
) -> Weights:
    """The trainer's weights."""
    generator = torch.Generator(device).manual_seed(0)
    scale = {name: 0.05 if len(shape) > 1 else 1.0 for name, shape in shapes.items()}
    return {
        name: torch.randn(shape, device=device, generator=generator, dtype=dtype).mul_(scale[name])
        for name, shape in shapes.items()
    }


Outcome = dict[str, Any]


def outcome_of(phase: Callable[..., Outcome], *arguments: Any) -> Outcome:
    """What ``phase(*arguments)`` returns in a process of its own; its failure ends this one too."""
    context = mp.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=send_outcome, args=(its, phase, arguments))
    process.start()
    its.close()
    try:
        outcome: Outcome = mine.recv()
    except EOFError:
        raise SystemExit(f"{phase.__name__}{arguments[:1]} failed") from None
    process.join(timeout=60)
    process.kill()
    return outcome


def send_outcome(pipe: Connection, phase: Callable[..., Outcome], arguments: tuple[Any, ...]) -> None:
    """In that process."""
    pipe.send(phase(*arguments))


class Engine:
    """One engine and what it generates."""

    def __init__(self, folder: str, utilization: float, **options: Any) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            gpu_memory_utilization=utilization,
            max_model_len=4096,
            enable_prefix_caching=True,
            seed=0,
            **options,
        )
        self.params = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
        self.model = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()

    @property
    def num_blocks(self) -> int:
        """KV blocks."""
        return int(self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)

    def tokens(self) -> list[list[int]]:
        """Greedy tokens of a few prompts."""
        prompts = [{"prompt_token_ids": [(13 * i + 5 * k) % 3000 + 3 for k in range(64 + 100 * i)]} for i in range(4)]
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(prompts, self.params, use_tqdm=False)]
