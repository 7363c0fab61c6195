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
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

PROMPTS = [[5, 17, 29, 3, 44], [101, 7, 7, 63, 9, 12, 250], list(range(30, 50))]
NUM_TOKENS = 8
VOCABULARY = 300


def make_model(folder: Path, *, tied: bool = False, vocabulary: int = VOCABULARY) -> None:
    """A tiny Llama with grouped KV heads and a vocabulary that vLLM pads, in fp32, as a checkpoint."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=vocabulary,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


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

    if in_place:
        keep_weights_in_place()
    model = AutoModelForCausalLM.from_pretrained(folder)
    llm = start_engine(folder, enable_prefix_caching=True)
    sync = WeightSync.connect(LLMClient(llm), model)
    assert all(sync.plan.received_bytes(r) == 0 for r in sync.plan.scope)
    staged = 0 if in_place else 1
    from reshard.vllm.engine import local_engine

    assert (local_engine().live.staging_bytes > 0) == bool(staged)
    run_updates(folder, llm, sync, model, folder)
    assert sync.verify() > 0
    sync.close()


def colocated_in_place(folder: Path) -> None:
    colocated(folder, in_place=True)


def colocated_repacked(folder: Path) -> None:
    colocated(folder, in_place=False)


def fresh(folder: Path) -> None:
    """Tokens of engines that load the saved weights."""
    keep_weights_in_place()
    found = [sample(start_engine(folder / f"update-{u}", weight_transfer_config=None))[0] for u in (1, 2)]
    (folder / "fresh.json").write_text(json.dumps(found))


def separate(folder: Path, *, tensor_parallel: int) -> None:
    """The engine in processes of its own, the trainer in this one; bytes go through shared memory."""
    from reshard.vllm import LLMClient, WeightSync

    model = AutoModelForCausalLM.from_pretrained(folder)
    llm = start_engine(folder, tensor_parallel_size=tensor_parallel)
    sync = WeightSync.connect(LLMClient(llm), model, num_engine_ranks=tensor_parallel)
    assert sync.stats.transport == "peer"
    run_updates(folder, llm, sync, model, folder)
    sync.close()


def separate_one(folder: Path) -> None:
    separate(folder, tensor_parallel=1)


def separate_two(folder: Path) -> None:
    separate(folder, tensor_parallel=2)


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
    wider = AutoModelForCausalLM.from_config(LlamaConfig(**(model.config.to_dict() | {"vocab_size": 400})))
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
