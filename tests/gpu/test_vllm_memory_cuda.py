"""A real vLLM engine with CUDA graphs whose memory comes from the arena: cycles, hand-over to a real training step."""

import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_VLLM = importlib.util.find_spec("vllm")
if not torch.cuda.is_available() or _VLLM is None or _VLLM.origin is None:
    pytest.skip("needs a GPU and vLLM", allow_module_level=True)

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING"
)
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

from reshard.errors import OutOfMemory, StateError  # noqa: E402
from reshard.vllm.memory import EngineMemory, engine_memory  # noqa: E402
from reshard.vllm.options import MemoryOptions  # noqa: E402

pytestmark = pytest.mark.gpu

MIB, GIB = 1 << 20, 1 << 30
HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCABULARY = 896, 6, 14, 2, 4864, 151936
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
UTILIZATION = 0.4


class Engine:
    """The engine under test, its memory, and one set of weights by checkpoint names."""

    def __init__(self, folder: Path, **options) -> None:
        from vllm import LLM, SamplingParams

        (folder / "config.json").write_text(json.dumps(CONFIG))
        self.llm = LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            gpu_memory_utilization=UTILIZATION,
            max_model_len=1024,
            max_num_seqs=16,
            seed=0,
            **options,
        )
        self.params = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True, logprobs=0)
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.model = self.worker.model_runner.get_model()

    @property
    def num_blocks(self) -> int:
        return self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks

    def generate(self) -> list[tuple[list[int], list[float]]]:
        """Greedy tokens and their log-probs."""
        prompts = [{"prompt_token_ids": [(7 * i + k) % 1000 + 3 for k in range(40 + 90 * i)]} for i in range(4)]
        outputs = [o.outputs[0] for o in self.llm.generate(prompts, self.params, use_tqdm=False)]
        return [
            (list(o.token_ids), [step[t].logprob for t, step in zip(o.token_ids, o.logprobs, strict=True)])
            for o in outputs
        ]


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Random weights on the GPU by checkpoint names."""
    generator = torch.Generator("cuda").manual_seed(seed)
    size = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        layer = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (size, HIDDEN),
            "self_attn.v_proj": (size, HIDDEN),
        }
        shapes |= {f"model.layers.{i}.{n}.weight": s for n, s in layer.items()}
        shapes |= {f"model.layers.{i}.{n}.bias": s[:1] for n, s in layer.items()}
        shapes |= {
            f"model.layers.{i}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"model.layers.{i}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"model.layers.{i}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"model.layers.{i}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"model.layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"model.layers.{i}.post_attention_layernorm.weight": (HIDDEN,),
        }
    return {
        name: (torch.randn(shape, device="cuda", generator=generator) * (0.1 if len(shape) > 1 else 1)).bfloat16()
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Engine]:
    engine = Engine(
        tmp_path_factory.mktemp("model"),
        enable_prefix_caching=True,
        additional_config={"sleep_mode_backend": "reshard", "reshard": {"mappings": "drop"}},
    )
    engine.model.load_weights(weights(1).items())
    yield engine


@pytest.fixture(scope="module")
def memory(engine) -> EngineMemory:
    found = engine_memory()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def expected(engine) -> list[tuple[list[int], list[float]]]:
    engine.llm.reset_prefix_cache()
    return engine.generate()


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def send(engine: Engine) -> None:
    """New weights, loaded as a trainer in this process that knows nothing of reshard would."""
    for name, tensor in weights(1).items():
        engine.model.load_weights([(name, tensor)])


def test_the_setting_alone_chooses_worker_and_memory(engine, memory):
    assert type(engine.worker).__name__ == "ArenaWorker"
    assert all(memory._lies_in("weights", p) for p in engine.model.parameters())
    assert memory._kv and all(memory._lies_in("kv_cache", cache) for cache in memory._kv)
    assert not engine.llm.llm_engine.vllm_config.model_config.enforce_eager


def test_fifty_cycles_change_neither_tokens_nor_memory_nor_addresses(engine, memory, expected):
    held_before = torch.arange(100_000, device="cuda").remainder(251).byte()
    with memory.use("weights"):
        held = held_before.clone()  # as a plain object of the model would hold it: no parameter, no buffer
    buffers = [buffer.clone() for buffer in engine.model.buffers()]
    addresses = [t.data_ptr() for t in (*engine.model.parameters(), *engine.model.buffers(), *memory._kv)]
    big = sum(region.num_bytes for region in memory.arena.regions("kv_cache"))
    free: list[int] = []
    for cycle in range(50):
        level = 1 + cycle % 2
        awake = free_bytes()
        engine.llm.sleep(level)
        gained = free_bytes() - awake
        assert gained >= big + (memory_of(engine.model) if level == 2 else 0) - 64 * MIB, (gained, level)
        if level == 2:
            with pytest.raises(StateError, match="would generate without weights"):
                engine.llm.wake_up()
            engine.llm.wake_up(["weights"])
            send(engine)
            engine.llm.wake_up(["kv_cache"])
        else:
            engine.llm.wake_up()
        if cycle < 6 or cycle % 10 == 9:
            assert engine.generate() == expected, f"cycle {cycle}"
        free.append(free_bytes())
    assert max(free[2:]) - min(free[2:]) <= 4 * MIB, "memory is not flat"
    assert addresses == [t.data_ptr() for t in (*engine.model.parameters(), *engine.model.buffers(), *memory._kv)]
    assert torch.equal(held, held_before)
    assert all(torch.equal(a, b) for a, b in zip(buffers, engine.model.buffers(), strict=True))


def memory_of(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def test_a_kv_cache_full_of_nans_changes_nothing(engine, memory, expected):
    """Why a KV cache that comes back need not be zeroed: the attention backend reads only what was written."""
    engine.llm.reset_prefix_cache()
    for cache in memory._kv:
        cache.fill_(float("nan"))
    assert engine.generate() == expected
    assert not memory._zero_kv


def test_waking_with_too_little_memory_fails_cleanly_and_can_be_repeated(engine, memory, expected):
    engine.llm.sleep(1)
    hog = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(free_bytes() // GIB - 1)]
    with pytest.raises(OutOfMemory):
        engine.llm.wake_up()
    assert engine.llm.llm_engine.is_sleeping() and memory.state.name == "SUSPENDED level 1"
    del hog
    torch.cuda.empty_cache()
    engine.llm.wake_up()
    assert engine.generate() == expected


class Trainer:
    """A few layers whose activations need gigabytes."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(12))).cuda()
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-3)
        self.inputs = torch.randn(1 << 16, 2048, device="cuda")

    def step(self) -> float:
        loss = self.layers(self.inputs).pow(2).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def test_a_trainer_uses_what_the_engine_gives_up_and_returns_it(engine, memory, expected):
    with torch.autograd.set_multithreading_enabled(False):
        reference = Trainer()
        losses = [reference.step() for _ in range(6)]
    del reference
    gc.collect()
    engine.llm.sleep(1)
    pool = memory.trainer_pool()
    got: list[float] = []
    with pool.use():
        trainer = Trainer()
        got.append(trainer.step())
    num_creates, slept = [], 1
    for level in (1, 1, 2, 2, 2):
        if slept == 2:
            engine.llm.wake_up(["weights"])
            send(engine)
        engine.llm.wake_up()
        assert pool.released_regions(), "idle segments gave their memory to the KV cache"
        assert engine.generate() == expected
        with pytest.raises(StateError, match="resume"), pool.use():
            pass
        engine.llm.sleep(level)
        slept = level
        with pool.use():
            got.append(trainer.step())
        num_creates.append(memory.arena.stats.num_creates)
    assert got == losses
    assert num_creates[0] == num_creates[1] and num_creates[3] == num_creates[4], "chunks are not made again"
    engine.llm.wake_up(["weights"])
    send(engine)
    engine.llm.wake_up()
    assert engine.generate() == expected
    del trainer
    gc.collect()


def test_vllm_itself_gets_no_more_kv_blocks_of_the_same_budget(engine, memory, tmp_path):
    """Runs last: a stock engine needs the device to itself."""
    ours = engine.num_blocks
    engine.llm.sleep(2)
    memory.trainer_pool().suspend()
    memory.arena.trim()
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=240, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ours >= int(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_by_name_or_work(variable):
    code = (
        "import torch\nfrom reshard.errors import StateError\nfrom reshard.vllm.memory import EngineMemory\n"
        "from reshard.vllm.options import MemoryOptions\n"
        "try:\n  m = EngineMemory(0, MemoryOptions())\n  with m.use('kv_cache'):\n"
        "    t = torch.zeros(64 << 20, dtype=torch.uint8, device='cuda')\n"
        "  print('works' if m._lies_in('kv_cache', t) else 'missed')\n"
        "except StateError as error:\n  print('refused' if 'other options may stay' in str(error) else error)\n"
    )
    environment = {**os.environ, variable: "expandable_segments:True,max_split_size_mb:512"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() in ("refused", "works"), done.stderr[-2000:]


def test_one_engine_a_process(memory):
    with pytest.raises(StateError, match="lives in this process already"):
        EngineMemory(0, MemoryOptions())


if __name__ == "__main__":
    print(Engine(Path(sys.argv[1])).num_blocks)
