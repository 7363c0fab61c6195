import io
import logging
import math

import pytest
import torch
from engine_cases import MODELS, copy_weights, plain_model, reference_logits, tiny_config
from transformers import AutoModelForCausalLM

from algos.losses import ppo_clip_loss
from hybrid.batch import concatenate, loss_mask, make_batch, resize, response_mask, select
from hybrid.engines.optim import learning_rate
from hybrid.engines.train_torch import OptimConfig, TorchTrainEngine

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def engine(name="llama", *, config=None, lr=1e-2, clip_grad=1.0, optim="default", **options):
    torch.manual_seed(0)
    if optim == "default":
        optim = OptimConfig(lr=lr, clip_grad=clip_grad)
    return TorchTrainEngine(config or tiny_config(name), optim=optim, **options)


def batch(seed=0, num_groups=3, n=4):
    generator = torch.Generator().manual_seed(seed)

    def tokens(low, high):
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(8, 96, (length,), generator=generator).tolist()

    prompts = [prompt for prompt in (tokens(1, 9) for _ in range(num_groups)) for _ in range(n)]
    responses = [tokens(1, 8) for _ in prompts]
    samples = make_batch(
        prompts=prompts,
        responses=responses,
        log_probs=[[-1.0] * len(response) for response in responses],
        group_ids=[i // n for i in range(len(prompts))],
        truncated=[False] * len(prompts),
        version=0,
    )
    samples["advantages"] = torch.randn(samples["response_ids"].shape, generator=generator)
    return samples


def grpo(mode="token-mean", scale=None):
    def loss(log_probs, entropy, micro_batch, totals):
        mask = loss_mask(micro_batch)
        return ppo_clip_loss(
            log_probs,
            log_probs.detach(),
            micro_batch["advantages"],
            mask,
            aggregate=mode,
            totals=totals.scaled(scale),
        )

    return loss


def gradients(train, samples, loss):
    found = {}
    for name, parameter in train._model.named_parameters():
        parameter.register_hook(lambda grad, name=name: found.update({name: found.get(name, 0) + grad}))
    train.update(samples, loss, temperature=1.0)
    return found


def assert_close(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        scale = float(second[name].abs().max())
        assert float((tensor - second[name]).abs().max()) <= 2e-5 * max(scale, 1e-3), name


def weights_of(train):
    return {name: tensor.clone() for name, tensor in train.tensors().items()}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradients_do_not_depend_on_the_micro_batch_split(mode):
    samples = batch()
    samples["loss_mask"] = response_mask(samples)
    samples["loss_mask"][5] = False
    loss = grpo(mode, 10.0)
    expected = gradients(engine(), samples, loss)
    for options in ({"micro_batch_size": 1}, {"micro_batch_size": 5}, {"max_tokens_per_micro_batch": 25}):
        assert_close(gradients(engine(**options), samples, loss), expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_fully_masked_sample_counts_for_nothing(mode):
    samples = batch(num_groups=1, n=4)
    samples["loss_mask"] = response_mask(samples)
    samples["loss_mask"][1] = False
    three = select(samples, [0, 2, 3])
    expected = gradients(engine(), three, grpo(mode, 10.0))
    assert_close(gradients(engine(micro_batch_size=1), samples, grpo(mode, 10.0)), expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_padded_width_does_not_matter(mode):
    samples = batch()
    wide = resize(samples, prompt_width=20, response_width=20)
    assert_close(gradients(engine(), wide, grpo(mode, 10.0)), gradients(engine(), samples, grpo(mode, 10.0)))


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_before_and_during_the_update_are_bit_equal_with_dropout_in_the_config(name):
    dropout = (
        {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5} if name == "gpt2" else {"attention_dropout": 0.5}
    )
    train = engine(config=tiny_config(name, **dropout))
    samples = batch()
    samples["old"] = train.log_probs(samples, temperature=0.9)["log_probs"]
    assert torch.equal(samples["old"], train.log_probs(samples, temperature=0.9)["log_probs"])
    seen = []

    def loss(log_probs, entropy, micro_batch, totals):
        seen.append(torch.equal(log_probs.detach(), micro_batch["old"]))
        return log_probs.sum(), {}

    train.update(samples, loss, temperature=0.9)
    assert seen == [True]


@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_changes_nothing_but_memory(name):
    dropout = (
        {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5} if name == "gpt2" else {"attention_dropout": 0.5}
    )
    config = tiny_config(name, **dropout)
    plain, checkpointed = (
        engine(config=config),
        engine(config=tiny_config(name, **dropout), gradient_checkpointing=True),
    )
    calls = []
    first_layer = next(module for module in checkpointed._model.modules() if isinstance(module, torch.nn.ModuleList))[0]
    inner = next(first_layer.children())
    inner.register_forward_hook(lambda *_: calls.append(1))
    expected = gradients(plain, batch(), grpo())
    assert_close(gradients(checkpointed, batch(), grpo()), expected)
    assert len(calls) == 2


@pytest.mark.parametrize("name", MODELS)
def test_an_update_moves_log_probs_the_right_way(name):
    train, samples = engine(name, lr=3e-3), batch()
    before = train.log_probs(samples, temperature=1.0)["log_probs"]
    metrics = train.update(samples, grpo(), temperature=1.0)
    gain = ((train.log_probs(samples, temperature=1.0)["log_probs"] - before) * samples["advantages"]).sum()
    assert gain > 0
    assert metrics["lr"] == 3e-3 and metrics["grad_norm"] > 0 and metrics["update_skipped"] == 0
    assert metrics["ppo_kl"] == 0.0


def test_one_update_is_adamw_on_the_clipped_gradient():
    train, samples = engine(lr=1e-3, clip_grad=0.01), batch()
    model = plain_model(train.config, train.tensors())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(2):
        total = 0
        for row in range(len(samples)):
            prompt = samples["prompt_ids"][row, : samples["prompt_len"][row]]
            response = samples["response_ids"][row, : samples["response_len"][row]]
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            chosen = torch.log_softmax(logits, -1).gather(1, response[:, None])[:, 0]
            total = total - (chosen * samples["advantages"][row, : len(response)]).sum()
        (total / samples["response_len"].sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        metrics = train.update(samples, grpo(), temperature=1.0)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4), step
    live = train.tensors()
    for name, parameter in model.named_parameters():
        difference = (live[name] - parameter.detach()).abs()
        assert float(difference.max()) < 3e-4 and float(difference.mean()) < 1e-6, name


def test_a_non_finite_gradient_skips_the_update_and_says_so(caplog):
    train, samples = engine(), batch()
    train.update(samples, grpo(), temperature=1.0)
    before, state = weights_of(train), train.state_dict()["optimizer"]["state"][0]["exp_avg"].clone()
    with caplog.at_level(logging.WARNING):
        metrics = train.update(samples, lambda lp, *_: (lp.sum() * float("inf"), {}), temperature=1.0)
    assert metrics["update_skipped"] == 1.0 and not math.isfinite(metrics["grad_norm"])
    assert "Update 2 was skipped" in caplog.text
    assert all(torch.equal(tensor, before[name]) for name, tensor in train.tensors().items())
    assert torch.equal(state, train.state_dict()["optimizer"]["state"][0]["exp_avg"])
    assert train.update(samples, grpo(), temperature=1.0)["update_skipped"] == 0.0


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(name):
    optim = OptimConfig(lr=1e-2, lr_scheduler_type="cosine", lr_warmup_steps=2, total_training_steps=6)
    unbroken, first = engine(name, optim=optim), engine(name, optim=optim)
    for step in range(6):
        unbroken.update(batch(step), grpo(), temperature=1.0)
    for step in range(3):
        first.update(batch(step), grpo(), temperature=1.0)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    torch.manual_seed(99)
    resumed = TorchTrainEngine(tiny_config(name), optim=optim)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 6):
        resumed.update(batch(step), grpo(), temperature=1.0)
    assert resumed.num_updates == 6
    for weight, tensor in unbroken.tensors().items():
        assert torch.equal(tensor, resumed.tensors()[weight]), weight


def test_state_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"lm_head\.weight.* are on one side only"):
        engine("llama").load_state_dict(engine("qwen2").state_dict())
    with pytest.raises(ValueError, match=r"Expected model\.embed_tokens\.weight of shape \[96, 32\].*\[100, 32\]"):
        engine("llama").load_state_dict(engine(config=tiny_config("llama", vocab_size=100)).state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_folder_is_what_transformers_loads(name, tmp_path):
    train = engine(name)
    train.update(batch(), grpo(), temperature=1.0)
    train.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    again = TorchTrainEngine(tmp_path, optim=None)
    for weight, tensor in train.tensors().items():
        assert torch.equal(tensor, loaded.state_dict()[weight]), weight
        assert torch.equal(tensor, again.tensors()[weight]), weight
    ids = [10, 11, 12]
    scored = train.log_probs(
        make_batch(
            prompts=[ids],
            responses=[[20, 21]],
            log_probs=[[0.0, 0.0]],
            group_ids=[0],
            truncated=[False],
            version=0,
        ),
        temperature=1.0,
    )["log_probs"]
    logits = reference_logits(loaded, ids, [20, 21])
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor([[20], [21]]))[:, 0]
    torch.testing.assert_close(scored[0], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_live_fp32_and_tied_ones_appear_once(name):
    train = engine(name)
    tensors = train.tensors()
    assert ("lm_head.weight" in tensors) == (not train.config.tie_word_embeddings)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == len(tensors)
    before = weights_of(train)
    train.update(batch(), grpo(), temperature=1.0)
    changed = [name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])]
    assert len(changed) == len(tensors)


def test_an_update_whose_loss_raised_leaves_no_gradient_behind():
    train, fresh, samples = engine(micro_batch_size=4), engine(micro_batch_size=4), batch()
    calls = []

    def loss(log_probs, *_):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("advantages")
        return log_probs.sum(), {}

    with pytest.raises(KeyError):
        train.update(samples, loss, temperature=1.0)
    for one in (train, fresh):
        one.update(samples, grpo(), temperature=1.0)
    for name, tensor in fresh.tensors().items():
        assert torch.equal(tensor, train.tensors()[name]), name


def test_a_frozen_engine_scores_and_refuses_to_update():
    frozen, train = engine(optim=None), engine()
    samples = batch()
    first, second = (one.log_probs(samples, temperature=1.0)["log_probs"] for one in (frozen, train))
    assert torch.equal(first, second)
    with pytest.raises(ValueError, match="optim=None and can't update"):
        frozen.update(samples, grpo(), temperature=1.0)


def test_bf16_computing_keeps_fp32_weights_and_stays_close():
    exact, rough = engine(), engine(compute_dtype=torch.bfloat16)
    copy_weights(rough.tensors(), exact.tensors())
    samples = batch()
    first, second = (one.log_probs(samples, temperature=1.0)["log_probs"] for one in (exact, rough))
    assert second.dtype == torch.float32
    assert 0 < float((first - second).abs().mean()) < 0.1
    rough.update(samples, grpo(), temperature=1.0)
    assert {tensor.dtype for tensor in rough.tensors().values()} == {torch.float32}


def test_metrics_are_sums_of_shares():
    samples = concatenate([batch(0), batch(1)])

    def loss(log_probs, entropy, micro_batch, totals):
        share = response_mask(micro_batch).sum() / totals.num_tokens
        return log_probs.sum() * 0, {"whole": share, "sequences": torch.tensor(len(micro_batch) / totals.num_sequences)}

    metrics = engine(micro_batch_size=5).update(samples, loss, temperature=1.0)
    assert metrics["whole"] == pytest.approx(1.0) and metrics["sequences"] == pytest.approx(1.0)
    assert metrics["num_micro_batches"] == 6.0


def test_learning_rate_by_schedule():
    def rates(**changes):
        config = OptimConfig(lr=2.0, total_training_steps=10, **changes)
        return [learning_rate(config, i) for i in range(12)]

    assert rates() == [2.0] * 12
    assert rates(lr_warmup_steps=4)[:5] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert rates(lr_warmup_steps_ratio=0.4) == rates(lr_warmup_steps=4)
    assert rates(lr_scheduler_type="linear", min_lr_ratio=0.5)[::5] == [2.0, 1.5, 1.0]
    cosine = rates(lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.1)
    assert cosine[:3] == [0.0, 1.0, 2.0]
    assert cosine[6] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert cosine[10] == cosine[11] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_scheduler_type": "wavy"}, "constant, linear, cosine"),
        ({"lr_scheduler_type": "cosine"}, "needs total_training_steps"),
        ({"lr_warmup_steps_ratio": 0.1}, "needs total_training_steps"),
        ({"clip_grad": 0.0}, "clip_grad > 0"),
    ],
)
def test_an_optimizer_that_can_not_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": "tight"}, "shared_prefix, separate, padded"),
        ({"micro_batch_size": 0}, "micro_batch_size >= 1"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch >= 1"),
    ],
)
def test_an_engine_that_can_not_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        engine(**options)
