import pytest
import torch
from engine_cases import MODELS, PROMPTS, STOPS, copy_weights, plain_model, responses_of, tiny_config

from hybrid.batch import response_mask
from hybrid.engines.rollout_torch import SamplingParams, TorchRolloutEngine
from hybrid.engines.train_torch import OptimConfig, TorchTrainEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


def rollout_engine(name, *, dtype, device="cuda"):
    torch.manual_seed(0)
    return TorchRolloutEngine(tiny_config(name), dtype=dtype, device=device)


def train_engine(name, weights, *, device="cuda", **options):
    train = TorchTrainEngine(tiny_config(name), optim=OptimConfig(lr=1e-3), device=device, **options)
    copy_weights(train.tensors(), weights)
    return train


def params(**changes):
    return SamplingParams(**{"n": 4, "max_new_tokens": 12, "stop_token_ids": STOPS, "seed": 7, **changes})


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_transformers_generate_token_for_token(name):
    rollout = rollout_engine(name, dtype=torch.float32)
    batch = rollout.generate(PROMPTS, params(n=1, greedy=True, max_new_tokens=20, stop_token_ids=(2, 3)))
    model = plain_model(rollout.config, rollout.tensors()).cuda()
    for prompt, response in zip(PROMPTS, responses_of(batch), strict=True):
        ids = torch.tensor([prompt], device="cuda")
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=[2, 3],
            pad_token_id=0,
        )
        assert response == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_the_gpu_draws_what_the_cpu_draws(name):
    on_gpu = rollout_engine(name, dtype=torch.float32)
    on_cpu = rollout_engine(name, dtype=torch.float32, device="cpu")
    copy_weights(on_gpu.tensors(), on_cpu.tensors())
    first, second = (one.generate(PROMPTS, params()) for one in (on_gpu, on_cpu))
    assert responses_of(first) == responses_of(second)
    torch.testing.assert_close(first["rollout_log_probs"].cpu(), second["rollout_log_probs"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_bf16_rollout_and_fp32_training_agree_within_bf16(name):
    rollout = rollout_engine(name, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in rollout.tensors().values()} == {torch.bfloat16}
    batch = rollout.generate(PROMPTS, params(n=16, temperature=0.9))
    mask = response_mask(batch)
    for compute_dtype in (torch.float32, torch.bfloat16):
        train = train_engine(name, rollout.tensors(), compute_dtype=compute_dtype)
        scored = train.log_probs(batch, temperature=0.9)["log_probs"]
        assert scored.device == batch["rollout_log_probs"].device
        assert float((scored - batch["rollout_log_probs"])[mask].abs().mean()) < 0.05


@pytest.mark.parametrize("packing", ["shared_prefix", "separate", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_training_on_the_gpu_equals_training_on_the_cpu(name, packing):
    rollout = rollout_engine(name, dtype=torch.float32)
    batch = rollout.generate(PROMPTS, params())
    on_gpu = train_engine(name, rollout.tensors(), packing=packing, max_tokens_per_micro_batch=40)
    on_cpu = train_engine(name, rollout.tensors(), device="cpu")
    for _ in range(2):
        first, second = (one.update(batch, sum_of_log_probs, temperature=0.9) for one in (on_gpu, on_cpu))
        assert first["total"] == pytest.approx(second["total"], rel=1e-4)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-3)
    scored = [one.log_probs(batch, temperature=0.9)["log_probs"].cpu() for one in (on_gpu, on_cpu)]
    torch.testing.assert_close(scored[0], scored[1], rtol=0, atol=5e-3)


def sum_of_log_probs(log_probs, entropy, micro_batch, totals):
    loss = -(log_probs.sum() + 0.1 * entropy.sum()) / totals.num_tokens
    return loss, {"total": loss.detach()}


def test_checkpointed_layers_give_the_same_gradient():
    rollout = rollout_engine("llama", dtype=torch.float32)
    batch = rollout.generate(PROMPTS, params())
    engines = [train_engine("llama", rollout.tensors(), gradient_checkpointing=option) for option in (False, True)]
    first, second = (one.update(batch, sum_of_log_probs, temperature=1.0) for one in engines)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)
