"""Live updates of a real vLLM engine, each scenario in a process of its own: ``python vllm_scenarios.py NAME FOLDER``.

The trainer is the Transformers model that the engine's folder was written from. Every update follows a real optimizer
step; then the engine's greedy tokens and their log-probs must be those of the trainer, and of a fresh engine that loads
the saved weights (whose tokens the caller compares).
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

PROMPTS = [[5, 17, 29, 3, 44], [101, 7, 7, 63, 9, 12, 250], list(range(30, 50))]
NUM_TOKENS = 8
VOCABULARY = 300


def make_model(folder: Path, kind: str = "llama", *, vocabulary: int = VOCABULARY) -> None:
    """A tiny model with grouped KV heads and a vocabulary that vLLM pads, in fp32, as a checkpoint."""
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(model_config(kind, vocabulary), dtype=torch.float32).save_pretrained(folder)


def model_config(kind: str, vocabulary: int) -> PretrainedConfig:
    common = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": vocabulary,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    if kind == "qwen3_moe":
        return Qwen3MoeConfig(**common, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
    return LlamaConfig(**common, tie_word_embeddings=kind == "llama_tied")


def start_engine(folder: Path, **options):
    """vLLM on the checkpoint, fp32, with the transfer engine of the plug-in."""
    from vllm import LLM

    return LLM(
        str(folder),
        **{
            "dtype": "float32",
            "max_model_len": 128,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "weight_transfer_config": {"backend": "reshard"},
            "seed": 0,
            "kv_cache_memory_bytes": 64 << 20,
        }
        | options,
    )


def keep_weights_in_place() -> None:
    """Let vLLM's linear layers on a CPU use their parameters as loaded, as they do on a GPU, not a packed copy."""
    import vllm.model_executor.layers.utils as utils

    def plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def sample(llm) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens and their log-probs for ``PROMPTS``."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    log_probs = [
        [step[t].logprob for t, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)]
        for o in outputs
    ]
    return tokens, log_probs


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A real optimizer step that moves every weight."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (4, 24), generator=generator)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def expect_trainer(model: PreTrainedModel, tokens: list[list[int]], log_probs: list[list[float]]) -> None:
    """The engine's tokens are the trainer's greedy ones, and the log-probs are the trainer's."""
    for prompt, got, scores in zip(PROMPTS, tokens, log_probs, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + got])).logits[0].log_softmax(-1)
        rows = logits[len(prompt) - 1 : -1]
        wanted = rows[torch.arange(len(got)), torch.tensor(got)]
        torch.testing.assert_close(torch.tensor(scores), wanted, rtol=1e-4, atol=2e-4)
        assert (rows.max(-1).values - wanted).max() < 1e-3, "not the greedy tokens"


def run_updates(folder: Path, llm, sync, model: PreTrainedModel, save: Path) -> None:
    """Two updates; the tokens after each, and the weights that gave them, are saved for comparison."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    before = sample(llm)
    expect_trainer(model, *before)
    seen = [before[0]]
    for update in (1, 2):
        train(model, optimizer, update)
        stats = sync.push()
        assert sync.version == update and stats.num_transitions == update
        tokens, log_probs = sample(llm)
        expect_trainer(model, tokens, log_probs)
        assert tokens not in seen, "the update changed no token: the test shows nothing"
        seen.append(tokens)
        model.save_pretrained(save / f"update-{update}")
        sync.begin_training()
    (save / "tokens.json").write_text(json.dumps(seen[1:]))


def colocated(folder: Path, *, in_place: bool) -> None:
    from reshard.vllm import LLMClient, WeightSync
    from reshard.vllm.engine import local_engine

    if in_place:
        keep_weights_in_place()
    model = AutoModelForCausalLM.from_pretrained(folder)
    llm = start_engine(folder, enable_prefix_caching=True)
    sync = WeightSync.connect(LLMClient(llm), model)
    assert all(sync.plan.received_bytes(r) == 0 for r in sync.plan.scope)
    has_experts = model.config.model_type == "qwen3_moe"
    assert (local_engine().live.staging_bytes > 0) == (has_experts or not in_place)
    run_updates(folder, llm, sync, model, folder)
    assert sync.verify() > 0
    sync.close()


def colocated_in_place(folder: Path) -> None:
    colocated(folder, in_place=True)


def colocated_repacked(folder: Path) -> None:
    colocated(folder, in_place=False)


def fresh(folder: Path) -> None:
    """Tokens of engines that load the weights saved in the folders inside."""
    from vllm.distributed import cleanup_dist_env_and_memory

    keep_weights_in_place()
    found: dict[str, list[list[list[int]]]] = {}
    for own in sorted(path.parent for path in folder.glob("*/tokens.json")):
        for update in (1, 2):
            llm = start_engine(own / f"update-{update}", weight_transfer_config=None)
            found.setdefault(own.name, []).append(sample(llm)[0])
            del llm
            cleanup_dist_env_and_memory()  # vLLM 0.26 makes no groups for experts where a dense engine made its own
    (folder / "fresh.json").write_text(json.dumps(found))


def spread(folder: Path, *, staging_bytes: int) -> None:
    """Under torchrun: two trainer ranks with FSDP2 shards, a tensor parallel engine over the same two processes."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from reshard import CollectiveTransport
    from reshard.vllm import LLMClient, WeightSync

    keep_weights_in_place()
    dist.init_process_group("gloo")
    llm = start_engine(folder, tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    whole = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    transport = CollectiveTransport(dist.group.WORLD, staging_bytes=staging_bytes)
    sync = WeightSync.connect(LLMClient(llm), model, transport=transport)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    tokens = []
    for update in (1, 2):
        train(model, optimizer, update)
        sync.push()
        whole.load_state_dict({name: t.full_tensor() for name, t in model.state_dict().items()})
        found, log_probs = sample(llm)
        expect_trainer(whole, found, log_probs)
        tokens.append(found)
        if dist.get_rank() == 0:
            whole.save_pretrained(folder / f"update-{update}")
        sync.begin_training()
    if dist.get_rank() == 0:
        (folder / "tokens.json").write_text(json.dumps(tokens))
    sync.close()


def spread_in_small_rounds(folder: Path) -> None:
    spread(folder, staging_bytes=8 << 10)


def spread_at_once(folder: Path) -> None:
    spread(folder, staging_bytes=64 << 20)


def separate(folder: Path, *, tensor_parallel: int) -> None:
    """The engine in processes of its own, the trainer in this one; bytes go through shared memory, then as if afar."""
    from reshard.vllm import LLMClient, WeightSync

    model = AutoModelForCausalLM.from_pretrained(folder)
    llm = start_engine(folder, tensor_parallel_size=tensor_parallel)
    sync = WeightSync.connect(LLMClient(llm), model, num_engine_ranks=tensor_parallel)
    assert sync.stats.transport == "peer"
    run_updates(folder, llm, sync, model, folder)
    sync.close()
    afar = WeightSync.connect(LLMClient(llm), model, num_engine_ranks=tensor_parallel, transport="collective")
    assert afar.stats.transport == "collective"
    optimizer, before = torch.optim.AdamW(model.parameters(), lr=0.02), sample(llm)[0]
    for update in (3, 4):
        train(model, optimizer, update)
        afar.push()
        tokens, log_probs = sample(llm)
        expect_trainer(model, tokens, log_probs)
        assert tokens != before, "the update changed no token: the test shows nothing"
        before = tokens
        afar.begin_training()
    afar.close()


def separate_one(folder: Path) -> None:
    separate(folder, tensor_parallel=1)


def separate_two(folder: Path) -> None:
    separate(folder, tensor_parallel=2)


def separate_replicas(folder: Path) -> None:
    """Two engines in one session: both follow, and where one has requests in flight neither is opened."""
    from vllm import SamplingParams

    from reshard.errors import StateError
    from reshard.vllm import LLMClient, Replicas, WeightSync

    model = AutoModelForCausalLM.from_pretrained(folder)
    engines = [start_engine(folder) for _ in range(2)]
    sync = WeightSync.connect(Replicas([LLMClient(llm) for llm in engines]), model, num_engine_ranks=2)
    run_updates(folder, engines[0], sync, model, folder)
    first, second = (sample(llm) for llm in engines)
    assert first == second and sync.version == 2

    busy = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    engines[1].llm_engine.add_request("busy", {"prompt_token_ids": PROMPTS[0]}, busy)
    expect(StateError, "engine 1 of 2: 1 requests are in flight", sync.push)
    assert sample(engines[0]) == first, "the other engine goes on"
    while engines[1].llm_engine.has_unfinished_requests():
        engines[1].llm_engine.step()
    sync.push()
    assert sample(engines[1]) == first and sync.version == 3
    sync.close()


def trainer_interface(folder: Path) -> None:
    """The trainer's side by vLLM's own factory, which takes a config besides in vLLM 0.26."""
    import inspect

    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from reshard.errors import LayoutError
    from reshard.vllm import LLMClient
    from reshard.vllm.trainer_engine import LiveSource, ReshardTrainerInitInfo

    model = AutoModelForCausalLM.from_pretrained(folder)
    llm = start_engine(folder)
    make = WeightTransferTrainerFactory.trainer_init
    info = ReshardTrainerInitInfo(rank=0)
    has_config = "config" in inspect.signature(make).parameters
    arguments = ("reshard", WeightTransferConfig(backend="reshard"), info) if has_config else (info,)
    connect = lambda source: make(*arguments, client=LLMClient(llm), source=source)  # noqa: E731
    expect(LayoutError, "but the source is a ModuleSource", lambda: connect(ModuleSource(model)))
    trainer = connect(LiveSource(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    tokens = [sample(llm)[0]]
    for update in (1, 2):
        train(model, optimizer, update)
        trainer.send_weights()
        found, log_probs = sample(llm)
        expect_trainer(model, found, log_probs)
        assert found not in tokens and trainer.sync.version == update
        tokens.append(found)
    trainer.shutdown()


def refusals(folder: Path) -> None:
    """Every wrong trainer is named before anything is written, and the engine goes on with its old weights."""
    from reshard.errors import LayoutError, StateError
    from reshard.vllm import LLMClient, WeightSync

    keep_weights_in_place()
    model = AutoModelForCausalLM.from_pretrained(folder)
    llm = start_engine(folder)
    client, before = LLMClient(llm), sample(llm)
    named = dict(model.named_parameters())
    lacking = {n: t for n, t in named.items() if n != "model.layers.1.mlp.up_proj.weight"}
    wider = AutoModelForCausalLM.from_config(model_config("llama", 400))
    other = {n.replace("self_attn", "attention"): t for n, t in named.items()}
    for weights, error, words in (
        (lacking, LayoutError, "1 missing (model.layers.1.mlp.up_proj.weight)"),
        (named | {"model.extra.weight": torch.ones(3)}, LayoutError, "1 unknown (model.extra.weight)"),
        (wider, LayoutError, "lm_head.weight is [400, 64], the engine's [300, 64]"),
        (other, LayoutError, "12 missing"),
        (named | {"model.layers.0.lora_A.weight": torch.ones(2, 2)}, LayoutError, "merge the adapters"),
    ):
        expect(error, words, lambda weights=weights: WeightSync.connect(client, weights))
        assert sample(llm) == before
    sync = WeightSync.connect(client, {f"_orig_mod.{n}": t for n, t in named.items()})
    sync.push(version=5)
    expect(StateError, "not newer", lambda: sync.push(version=5))
    request = {"prompt_token_ids": PROMPTS[0]}
    from vllm import SamplingParams

    llm.llm_engine.add_request("busy", request, SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False))
    expect(StateError, "in flight", sync.push)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    sync.push()
    assert sample(llm) == before, "the weights have not changed"


def expect(error, words: str, call) -> None:
    try:
        call()
    except error as caught:
        assert words in str(caught), f"{words!r} is not in {caught}"
        return
    raise AssertionError(f"no error with {words!r}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    globals()[sys.argv[1]](Path(sys.argv[2]))
    Path(sys.argv[2], f"{sys.argv[1]}.done").touch()
