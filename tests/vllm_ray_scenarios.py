"""The rollout engine whose vLLM lives in a Ray actor: ``python vllm_ray_scenarios.py NAME FOLDER``."""

import json
import sys
from pathlib import Path
from unittest import mock

import ray
import torch
from transformers import AutoModelForCausalLM
from vllm_scenarios import NUM_TOKENS, PROMPTS, expect, expect_trainer, train

from hybrid.engines.rollout_vllm import VllmOptions, VllmRolloutEngine
from hybrid.engines.sampling import SamplingParams
from hybrid.engines.vllm_ray import RayVllmHost
from hybrid.errors import BackendUnavailable, ResourceError
from reshard.errors import StateError, TransportError
from reshard.vllm.ray_client import RayClient

LONG_PROMPT = [1 + idx % 200 for idx in range(100)]
"""Three blocks of the KV cache: what the prefix cache keeps of it would show after a push that does not forget it."""


def ray_actor(folder: Path) -> None:
    """Two updates; wrong trainers, wrong settings and a killed actor are named."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    odd = lambda **kwargs: RayVllmHost({}, name="odd", num_gpus=0, **kwargs)  # noqa: E731
    expect(ResourceError, "lacks CPU (asked 60, has 2)", lambda: odd(num_cpus=60))
    words = "vLLM did not start in Ray actor 'odd': reshard.errors.StateError: VLLM_ENABLE_V1_MULTIPROCESSING=1 is set"
    expect(BackendUnavailable, words, lambda: odd(num_cpus=1, options={"runtime_env": {"env_vars": settings}}))
    options = VllmOptions(
        placement="ray",
        max_model_len=128,
        actor={"name": "rollout-7"},
        extra={"kv_cache_memory_bytes": 64 << 20, "block_size": 32},
    )
    engine = VllmRolloutEngine(folder, dtype=torch.float32, device="cpu", options=options)
    follow_the_trainer(folder, engine)
    ray.shutdown()


def follow_the_trainer(folder: Path, engine: VllmRolloutEngine) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    params = SamplingParams(n=1, max_new_tokens=NUM_TOKENS, greedy=True, stop_token_ids=(), seed=1)
    expect(StateError, "has no weights yet", lambda: engine.generate(PROMPTS, params))
    named = dict(model.named_parameters())
    lacking = {n: t for n, t in named.items() if n != "model.layers.1.mlp.up_proj.weight"}
    expect(TransportError, "1 missing (model.layers.1.mlp.up_proj.weight)", lambda: engine.connect(lacking))
    sync, seen = engine.connect(model), []
    assert sync.stats.transport == "peer"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for update in (1, 2):
        train(model, optimizer, update)
        sync.push(version=10 * update)
        engine.version = sync.version
        batch = engine.generate([*PROMPTS, LONG_PROMPT], params)
        assert set(batch["version"].tolist()) == {10 * update}
        tokens, log_probs = batch["response_ids"].tolist(), batch["rollout_log_probs"].tolist()
        assert all(len(row) == NUM_TOKENS for row in tokens) and tokens not in seen
        expect_trainer(model, tokens[:-1], log_probs[:-1])
        with mock.patch("vllm_scenarios.PROMPTS", [LONG_PROMPT]):
            expect_trainer(model, tokens[-1:], log_probs[-1:])
        seen.append(tokens)
        model.save_pretrained(folder / f"update-{update}")
        sync.begin_training()
    (folder / "tokens.json").write_text(json.dumps([tokens[:-1] for tokens in seen]))
    killed_in_a_push(engine, sync, params)


def killed_in_a_push(engine: VllmRolloutEngine, sync, params: SamplingParams) -> None:
    """The actor dies when its engine is open and this rank is sending."""
    update_weights = RayClient.update_weights

    def kill_and_update(client: RayClient, update_info: dict) -> None:
        ray.kill(ray.get_actor("rollout-7"))
        update_weights(client, update_info)

    gone = "Ray actor 'rollout-7', which holds the engine, is gone ({} was asked of it): start another engine"
    with mock.patch.object(RayClient, "update_weights", kill_and_update):
        expect(TransportError, gone.format("update_weights"), lambda: sync.push(version=30))
    assert sync.version == 20
    expect(TransportError, gone.format("generate"), lambda: engine.generate(PROMPTS, params))
    engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]))
    Path(sys.argv[2], f"{sys.argv[1]}.done").touch()
