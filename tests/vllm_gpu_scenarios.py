"""Live updates of vLLM engines on a GPU, with CUDA graphs: ``python THIS updates|fresh|stock KIND FOLDER [UPDATE]``.

``updates``: a Transformers model in fp32 trains for two optimizer steps; after each, a bf16 or float8 engine, which
sleeps while the model trains, is updated in place; its tokens, log-probs and digests of all its parameters are written.
``fresh``: the same of a new engine with the same settings that loads the checkpoint of that update, and ``stock`` of
one of plain vLLM, whose settings lead to other compiled kernels: its parameters have to be the same, not its rounding.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

VOCABULARY = 5000
NUM_TOKENS = 12
FP8_CHECKPOINT = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
KINDS = ("dense", "moe", "dense_fp8", "dense_fp8_checkpoint", "moe_fp8")


OURS = {
    "weight_transfer_config": {"backend": "reshard"},
    "enable_sleep_mode": True,
    "additional_config": {"sleep_mode_backend": "reshard"},
}


def config_of(kind: str) -> PretrainedConfig:
    """Small, and with every kind of tensor: biases, grouped KV heads, a padded vocabulary, a head of its own."""
    common = {
        "hidden_size": 1024,
        "intermediate_size": 1280,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind.startswith("moe"):
        return Qwen3MoeConfig(**common, moe_intermediate_size=256, num_experts=32, num_experts_per_tok=4)
    return Qwen2Config(**common)


def engine_options(kind: str) -> dict:
    return {"quantization": "fp8_per_block"} if kind.endswith("_fp8") else {}


def start(folder: Path, kind: str, **options):
    from vllm import LLM

    return LLM(
        str(folder),
        **{
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "skip_tokenizer_init": True,
            "gpu_memory_utilization": 0.06,
            "kv_cache_memory_bytes": 1 << 30,
            "enable_prefix_caching": True,
            "seed": 0,
        }
        | engine_options(kind)
        | options,
    )


def observed(llm) -> dict:
    """Greedy tokens, their log-probs, and a digest of every parameter."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(17 * i + 5 * k) % 3000 + 3 for k in range(20 + 70 * i)]} for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    digests = {
        name: hashlib.sha256(p.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        for name, p in model.named_parameters()
    }
    return {
        "tokens": [list(o.token_ids) for o in outputs],
        "log_probs": [[step[t].logprob for t, step in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs],
        "digests": digests,
        "mode": str(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode),
    }


def save(model: PreTrainedModel, folder: Path, kind: str) -> None:
    """The checkpoint that an engine of this kind starts from."""
    from safetensors.torch import load_file, save_file

    from reshard.oracle import quantize_reference

    half = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.save_pretrained(folder)
    if kind != "dense_fp8_checkpoint":
        return
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor
        if tensor.dim() == 2 and "_proj." in name:
            tensors[name], scale = quantize_reference(tensor.cuda(), mode="blocks")
            tensors[f"{name.removesuffix('weight')}weight_scale_inv"] = scale.contiguous()
    save_file({n: t.cpu() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FP8_CHECKPOINT}))


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A real optimizer step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (4, 64), generator=generator).cuda()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def updates(kind: str, folder: Path) -> None:
    """Two cycles of sleeping, training and waking with new weights."""
    from reshard.vllm import LLMClient, WeightSync
    from reshard.vllm.engine import local_engine

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    save(model, folder / "update-0", kind)
    llm = start(folder / "update-0", kind, **OURS)
    sync = WeightSync.connect(LLMClient(llm), model)
    engine = local_engine()
    assert engine is not None
    quantised = engine.live.quantised
    found = {
        "staging_bytes": engine.live.staging_bytes,
        "modes": [] if quantised is None else sorted(quantised.modes),
        "updates": [observed(llm)],
    }
    for update in (1, 2):
        llm.sleep(1)
        train(model, optimizer, update)
        save(model, folder / f"update-{update}", kind)
        llm.wake_up(["weights"])
        stats = sync.push()
        llm.wake_up(["kv_cache"])
        found["updates"].append(observed(llm))
        found["launches"] = stats.num_launches
        found["verified_bytes"] = sync.verify()
        sync.begin_training()
    (folder / "updates.json").write_text(json.dumps(found))


def fresh(kind: str, folder: Path, update: str) -> None:
    """What an engine with the same settings gives that loads the checkpoint of an update."""
    llm = start(folder / f"update-{update}", kind, **OURS)
    (folder / f"fresh-{update}.json").write_text(json.dumps(observed(llm)))


def stock(kind: str, folder: Path, update: str) -> None:
    """What an engine of plain vLLM gives."""
    os.environ["VLLM_PLUGINS"] = ""
    llm = start(folder / f"update-{update}", kind)
    (folder / f"stock-{update}.json").write_text(json.dumps(observed(llm)))


if __name__ == "__main__":
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    what, chosen, place, *rest = sys.argv[1:]
    {"updates": updates, "fresh": fresh, "stock": stock}[what](chosen, Path(place), *rest)
