"""Sleeping and waking of real vLLM engines, each scenario in a process of its own: ``python THIS NAME FOLDER``.

The model's large matrices are above 1 MiB, so sleep level 2 does lose them; memory that changes hands is poisoned.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from vllm_scenarios import expect, keep_weights_in_place, start_engine

PROMPT = [[5, 17, 29, 3, 44] * 60, list(range(30, 60))]
MIB = 1 << 20


def make_large_model(folder: Path) -> None:
    """A Llama with a few matrices above 1 MiB in fp32."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def start(folder: Path, *, settings: dict | None = None, **options):
    """An engine that sleeps by reshard, its memory, and its greedy tokens as a function."""
    from vllm import SamplingParams

    from reshard.vllm.memory import engine_memory
    from reshard.vllm.plugin import register

    register()
    keep_weights_in_place()
    extra = {"sleep_mode_backend": "reshard", "reshard": {"poison": True, "mappings": "drop"} | (settings or {})}
    options = {"max_model_len": 512, "block_size": 32, "weight_transfer_config": None} | options
    llm = start_engine(folder, additional_config=extra, enable_prefix_caching=True, **options)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)

    def generate() -> tuple[list[list[int]], int]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPT], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs], sum(o.num_cached_tokens or 0 for o in outputs)

    return llm, engine_memory(), generate


def model_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def addresses(llm, memory) -> list[int]:
    return [t.data_ptr() for t in (*model_of(llm).parameters(), *model_of(llm).buffers(), *memory._kv)]


def cycles(folder: Path) -> None:
    """Tokens, addresses, buffers and foreign tensors after sleeping at either level; what was cached before is gone."""
    llm, memory, generate = start(folder)
    held = memory._pools["weights"].allocate(100_000)  # as a plain object of the model would hold it
    held.copy_(torch.arange(100_000).remainder(251))
    tokens, cached = generate()
    assert cached == 0 and generate() == (tokens, 288), "the prefix cache serves the same prompts"
    before, buffers = addresses(llm, memory), [b.clone() for b in model_of(llm).buffers()]
    assert buffers and memory.arena.stats.free_bytes == 0
    for level in (1, 2, 1, 2):
        llm.sleep(level)
        assert memory.state.name == f"SUSPENDED level {level}" and llm.llm_engine.is_sleeping()
        kept = memory.arena.stats.created_bytes
        assert kept == (0 if level == 2 else sum(r.num_bytes for r in memory.arena.regions("weights"))), kept
        llm.wake_up(["weights"])
        assert all(torch.equal(a, b) for a, b in zip(model_of(llm).buffers(), buffers, strict=True))
        if level == 2:
            assert memory.state.name == "AWAITING_WEIGHTS"
            lost = dict(model_of(llm).named_parameters())["lm_head.weight"]
            assert bool((lost.view(torch.uint8) == 0xA5).all()), "the weights were handed over"
            llm.collective_rpc("reload_weights")
        llm.wake_up(["kv_cache"])
        assert memory.state.name == "RUNNING" and addresses(llm, memory) == before
        assert generate() == (tokens, 0), f"after level {level}"
        assert torch.equal(held, torch.arange(100_000).remainder(251).byte())


def arrivals(folder: Path) -> None:
    """After level 2 nothing runs until a whole set of weights is there, by whatever way it comes."""
    from safetensors.torch import load_file

    from reshard.errors import StateError
    from reshard.vllm import LLMClient, WeightSync

    llm, memory, generate = start(folder, weight_transfer_config={"backend": "reshard"})
    tokens, _ = generate()
    checkpoint = load_file(folder / "model.safetensors")
    sync = WeightSync.connect(LLMClient(llm), checkpoint)
    large = [n for n, t in checkpoint.items() if t.nbytes > MIB]

    def load_one_by_one() -> None:
        for name, tensor in checkpoint.items():
            assert memory.state.name == "AWAITING_WEIGHTS" or name not in large
            model_of(llm).load_weights([(name, tensor)])

    for arrive in (load_one_by_one, sync.push, lambda: llm.collective_rpc("reload_weights"), sync.push):
        llm.sleep(2)
        for call in (sync.push, lambda: llm.collective_rpc("reload_weights")):
            expect(StateError, "the weights have no memory: the engine is SUSPENDED level 2", call)
        expect(StateError, "can't wake yet: the engine is SUSPENDED level 2", llm.wake_up)
        expect(StateError, r"next: call wake_up(tags=['weights'])", lambda: llm.wake_up(["kv_cache"]))
        llm.wake_up(["weights"])
        expect(StateError, "can't wake yet: the engine is AWAITING_WEIGHTS", lambda: llm.wake_up(["kv_cache"]))
        run = lambda: llm.collective_rpc("execute_model", args=(None,))  # noqa: E731
        expect(StateError, "can't generate: it is AWAITING_WEIGHTS (", run)
        assert llm.llm_engine.is_sleeping()
        arrive()
        assert memory.state.name == "WEIGHTS_READY"
        llm.wake_up()
        assert generate()[0] == tokens
    sync.close()


def memory_changes_hands(folder: Path) -> None:
    """With a trainer the chunks stay in the arena; without enough memory waking fails and can be repeated."""
    from reshard.errors import OutOfMemory, StateError

    llm, memory, generate = start(folder, settings={"budget_bytes": 1200 * MIB, "mappings": "keep"})
    arena, (tokens, _) = memory.arena, generate()
    trainer = arena.reserve("trainer.0", 900 * MIB, group="trainer")
    for cycle in range(3):
        num_creates = arena.stats.num_creates
        llm.sleep(1)
        arena.back("trainer")
        trainer.tensor().fill_(cycle)
        expect(OutOfMemory, "release a region or raise the budget", llm.wake_up)
        assert llm.llm_engine.is_sleeping() and memory.state.name == "SUSPENDED level 1"
        assert bool((trainer.tensor() == cycle).all()), "a wake that fails takes nothing"
        arena.release("trainer")
        llm.wake_up()
        assert generate()[0] == tokens
        assert arena.stats.num_creates == num_creates or cycle == 0, "chunks are not created again"
    arena.free(trainer)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    llm.sleep(1)
    expect(StateError, "can't sleep: it is SUSPENDED level 1 already; next: call wake_up()", lambda: worker.sleep(1))
    assert arena.stats.free_bytes == 0, "with no trainer the device gets the memory"
    for tag in ("kv_cache", "weights"):
        llm.wake_up([tag])
    assert generate()[0] == tokens
    expect(ValueError, "expected tags of ['weights', 'kv_cache'], got ['nothing']", lambda: worker.wake_up(["nothing"]))
    expect(StateError, "only the KV cache can be given up alone", lambda: worker.discard(("weights",)))
    llm.reset_prefix_cache()
    worker.discard(("kv_cache",))
    assert memory.state.name == "WEIGHTS_READY"
    worker.wake_up()
    assert generate()[0] == tokens
    again = lambda: type(memory)(-1, memory.options)  # noqa: E731
    expect(StateError, "lives in this process already", again)


def offloaded(folder: Path) -> None:
    """Level 1 can move the weights to host memory; the backend's class drives the same memory."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    llm, memory, generate = start(folder, settings={"level1_weights": "offload"})
    tokens, _ = generate()
    llm.sleep(1)
    assert memory.arena.stats.created_bytes == 0
    llm.wake_up()
    assert generate()[0] == tokens
    backend = SleepModeBackendFactory.create_backend(llm.llm_engine.vllm_config.model_config)
    assert type(backend).__name__ == "ReshardSleepBackend" and backend.state() == "RUNNING"
    llm.reset_prefix_cache()  # as vLLM does at sleep
    backend.suspend(1)
    assert backend.state() == "SUSPENDED" and memory.arena.stats.created_bytes == 0
    backend.resume()
    assert generate()[0] == tokens


def untouched(folder: Path) -> None:
    """Engines without the setting have vLLM's own worker and run while ours, in the same process, has no memory."""
    from vllm import SamplingParams
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    from reshard.errors import StateError
    from reshard.vllm.memory import engine_memory
    from reshard.vllm.plugin import register

    register()
    keep_weights_in_place()
    backend = SleepModeBackendFactory.get_backend_class("reshard")()
    expect(StateError, "start it with enable_sleep_mode=True", backend.suspend)
    assert engine_memory() is None
    llm, memory, generate = start(folder)
    tokens, _ = generate()
    llm.sleep(2)
    assert memory.arena.stats.created_bytes == 0
    stock = start_engine(folder, weight_transfer_config=None, max_model_len=512, block_size=32)
    worker = stock.llm_engine.model_executor.driver_worker.worker
    assert type(worker).__module__ == "vllm.v1.worker.cpu_worker" and engine_memory() is memory
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = stock.generate([{"prompt_token_ids": p} for p in PROMPT], params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == tokens


SCENARIOS: dict[str, Callable[[Path], None]] = {
    f.__name__: f for f in (cycles, arrivals, memory_changes_hands, offloaded, untouched)
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]))
    (Path(sys.argv[2]) / f"{sys.argv[1]}.done").touch()
