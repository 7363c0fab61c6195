"""vLLM inside `hybrid` and `algos`, each scenario in a process of its own: ``python THIS NAME FOLDER``."""

import json
import os
import sys
from pathlib import Path

import torch
from vllm_scenarios import PROMPTS, expect


def rollout_engine(folder: Path) -> None:
    """The rollout engine of `hybrid`: weights first, seeds, stop ids, limits, log-probs at temperature, versions."""
    from hybrid.engines.rollout_vllm import VllmOptions, VllmRolloutEngine
    from hybrid.engines.sampling import SamplingParams
    from hybrid.engines.train_torch import TorchTrainEngine
    from reshard.errors import StateError

    extra = {"kv_cache_memory_bytes": 64 << 20}
    options = VllmOptions(max_model_len=40, extra=extra)
    engine = VllmRolloutEngine(folder, dtype=torch.float32, device="cpu", options=options)
    train_engine = TorchTrainEngine(folder, optim=None, compute_dtype=torch.float32)
    params = SamplingParams(n=4, max_new_tokens=12, temperature=0.7, stop_token_ids=(11, 12), seed=9)
    expect(StateError, "no weights yet", lambda: engine.generate(PROMPTS, params))
    sync = engine.connect(train_engine.tensors())
    sync.push(version=3)
    engine.version = 3
    batch = engine.generate(PROMPTS, params)
    assert batch["group_id"].tolist() == [0] * 4 + [1] * 4 + [2] * 4 and set(batch["version"].tolist()) == {3}
    scored = train_engine.log_probs(batch, temperature=0.7)
    torch.testing.assert_close(batch["rollout_log_probs"], scored["log_probs"], rtol=1e-3, atol=1e-3)
    lengths, ids = batch["response_len"].tolist(), batch["response_ids"]
    for row, length in enumerate(lengths):
        last, stopped = int(ids[row, length - 1]), not bool(batch["truncated"][row])
        assert (last in (11, 12)) == stopped and not set(ids[row, : length - 1].tolist()) & {11, 12}
        assert stopped or length == 12
    texts = [tuple(ids[row, :length].tolist()) for row, length in enumerate(lengths)]
    assert all(len(set(texts[first : first + 4])) == 4 for first in (0, 4, 8)), "samples of a prompt are alike"
    again = engine.generate(PROMPTS, params)
    assert torch.equal(again["response_ids"], ids), "the same seed gave other texts"
    part = engine.generate(PROMPTS[1:], params, first_row=4)
    width = part["response_ids"].shape[1]
    assert torch.equal(part["response_ids"], ids[4:, :width]) and part["group_id"].tolist() == [1] * 4 + [2] * 4
    other = engine.generate(PROMPTS, SamplingParams(n=4, max_new_tokens=12, stop_token_ids=(), seed=10))
    assert bool(other["truncated"].all()) and not torch.equal(other["response_ids"], ids)
    near_limit = engine.generate([list(range(3, 41))], SamplingParams(n=1, max_new_tokens=9, stop_token_ids=(), seed=1))
    assert near_limit["response_len"].tolist() == [2] and near_limit["truncated"].tolist() == [True]
    expect(ValueError, "prompt 1 is empty", lambda: engine.generate([[1], []], params))
    expect(ValueError, "holds 300", lambda: engine.generate([[300]], params))
    expect(ValueError, "no room for a response", lambda: engine.generate([list(range(40))], params))
    with engine.training_memory():
        pass
    engine.close()


def grpo(folder: Path) -> None:
    """The whole loop with vLLM: log-probs of both engines agree at every step, and the policy moves."""
    from algos.grpo import train as train_grpo
    from algos.metrics import read_rows

    prompts = [{"prompt": f"say {idx}", "reward_model": {"ground_truth": str(idx)}} for idx in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    result = train_grpo(
        {
            "model.path": str(folder / "model"),
            "data.train_files": str(folder / "prompts.jsonl"),
            "data.train_batch_size": 4,
            "data.max_prompt_length": 64,
            "data.max_response_length": 8,
            "reward.function": f"{__file__}:share_of_letters",
            "rollout.name": "vllm",
            "rollout.n": 4,
            "rollout.dtype": "float32",
            "algorithm.rollout_correction.rollout_is": "token",
            "actor.optim.lr": 1e-2,
            "trainer.total_training_steps": 4,
            "trainer.output_dir": str(folder / "run"),
            "trainer.logger": [],
            "trainer.device": "cpu",
            "trainer.seed": 3,
        }
    )
    rows = read_rows(folder / "run" / "metrics.jsonl")
    assert len(rows) == 4 and result.model_folder is not None
    for row in rows:
        assert abs(row["actor/rollout_is_mean"] - 1) < 1e-3, row
    assert len({row["reward/mean"] for row in rows}) > 1


def share_of_letters(data_source: str, solution_str: str, ground_truth: object, extra_info: dict | None) -> float:
    return sum(char.isascii() and char.isalpha() for char in solution_str) / max(len(solution_str), 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    globals()[sys.argv[1]](Path(sys.argv[2]))
    Path(sys.argv[2], f"{sys.argv[1]}.done").touch()
