import pytest
import torch
from engine_cases import MODELS, copy_weights, plain_model, reference_logits, tiny_config
from transformers import MistralConfig

from hybrid.batch import make_batch, response_mask
from hybrid.engines.packing import PACKINGS, make_pieces, pack, split_micro_batches
from hybrid.engines.train_torch import OptimConfig, TorchTrainEngine

PROMPTS = [[15, 16, 17, 18]] * 3 + [[19, 20, 21, 22, 23, 24, 25]] * 2 + [[11], [15, 16, 17, 18]]
RESPONSES = [[30, 31, 32], [33], [34, 35, 36, 37, 38], [40, 41], [], [50, 51, 52, 53], [60, 61, 62]]


def batch(prompts=PROMPTS, responses=RESPONSES):
    return make_batch(
        prompts=prompts,
        responses=responses,
        log_probs=[[0.0] * len(response) for response in responses],
        group_ids=list(range(len(prompts))),
        truncated=[False] * len(prompts),
        version=0,
    )


def engine(name="llama", *, config=None, **options):
    torch.manual_seed(0)
    return TorchTrainEngine(config or tiny_config(name), optim=OptimConfig(lr=1e-3), **options)


def gradients(train, samples, weights, temperature=1.0):
    """Gradients of a weighted sum of log-probs and entropies over the batch, as `update` sums them."""
    found = {}
    hooks = [
        parameter.register_hook(lambda grad, name=name: found.update({name: found.get(name, 0) + grad}))
        for name, parameter in train._model.named_parameters()
    ]
    samples = samples.clone()
    samples["weights"] = weights

    def loss(log_probs, entropy, micro_batch, totals):
        mask = response_mask(micro_batch)
        each = micro_batch["weights"] * (log_probs + 0.3 * entropy)
        return torch.where(mask, each, 0.0).sum() / totals.num_tokens, {}

    metrics = train.update(samples, loss, temperature=temperature)
    for hook in hooks:
        hook.remove()
    return found, metrics


def worst_relative_difference(first, second):
    assert first.keys() == second.keys()
    return max(
        float((first[name] - second[name]).abs().max() / second[name].abs().max().clamp(min=1e-3)) for name in first
    )


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_entropies_equal_those_of_each_sequence_alone(name, packing):
    train = engine(name, packing=packing)
    model = plain_model(train.config, train.tensors())
    scored = train.log_probs(batch(), temperature=0.7)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        if response:
            log_probs = torch.log_softmax(reference_logits(model, prompt, response) / 0.7, dim=-1)
            expected = log_probs.gather(1, torch.tensor(response)[:, None])[:, 0]
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            torch.testing.assert_close(scored["log_probs"][row, : len(response)], expected, rtol=0, atol=2e-5)
            torch.testing.assert_close(scored["entropy"][row, : len(response)], entropy, rtol=0, atol=2e-5)
        assert scored["log_probs"][row, len(response) :].abs().sum() == 0


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_for_every_packing_and_micro_batch_split(name):
    weights = torch.randn(len(PROMPTS), 5, generator=torch.Generator().manual_seed(1))
    expected, first = gradients(engine(name, packing="padded", micro_batch_size=1), batch(), weights)
    assert first["num_micro_batches"] == len(PROMPTS)
    for packing in PACKINGS:
        for limits in ({}, {"micro_batch_size": 3}, {"max_tokens_per_micro_batch": 12}, {"micro_batch_size": 1}):
            found, metrics = gradients(engine(name, packing=packing, **limits), batch(), weights)
            assert worst_relative_difference(found, expected) < 2e-5, (packing, limits)
            assert metrics["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_transformers_on_plain_sequences(name):
    weights = torch.randn(len(PROMPTS), 5, generator=torch.Generator().manual_seed(1))
    train = engine(name)
    model = plain_model(train.config, train.tensors())
    found, _ = gradients(train, batch(), weights, temperature=0.7)
    total = 0
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.7
        log_probs = torch.log_softmax(logits, dim=-1)
        chosen = log_probs.gather(1, torch.tensor(response, dtype=torch.int64)[:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        total = total + (weights[row, : len(response)] * (chosen + 0.3 * entropy)).sum()
    (total / sum(map(len, RESPONSES))).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert worst_relative_difference(found, expected) < 2e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_sample_alone_equals_the_sample_in_a_batch(name):
    train = engine(name)
    together = train.log_probs(batch(), temperature=1.0)["log_probs"]
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        if response:
            alone = train.log_probs(batch([prompt], [response]), temperature=1.0)["log_probs"]
            torch.testing.assert_close(alone[0], together[row, : len(response)], rtol=0, atol=2e-5)


def test_a_shared_prefix_is_laid_out_once():
    pieces = make_pieces(batch(), "shared_prefix")
    assert [piece.samples for piece in pieces] == [(0, 1, 2, 6), (3, 4), (5,)]
    assert [piece.num_tokens for piece in pieces] == [4 + 3 + 1 + 5 + 3, 7 + 2, 1 + 4]
    packed = pack(batch(), "shared_prefix")
    assert packed.input_ids.shape == (2, 16)
    assert packed.input_ids[0].tolist() == [15, 16, 17, 18, 30, 31, 32, 33, 34, 35, 36, 37, 38, 60, 61, 62]
    assert packed.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 4, 5, 6, 7, 8, 4, 5, 6]
    assert packed.input_ids[1, :14].tolist() == [19, 20, 21, 22, 23, 24, 25, 40, 41, 11, 50, 51, 52, 53]
    assert packed.position_ids[1, :14].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4]
    assert packed.predictors.tolist()[:9] == [3, 4, 5, 3, 3, 8, 9, 10, 11]
    assert packed.targets.tolist() == [30, 31, 32, 33, 34, 35, 36, 37, 38, 60, 61, 62, 40, 41, 50, 51, 52, 53]
    mask = packed.attention_mask[:, 0]
    assert mask[0, 6].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert mask[0, 7].nonzero().flatten().tolist() == [0, 1, 2, 3, 7]
    assert mask[0, 15].nonzero().flatten().tolist() == [0, 1, 2, 3, 13, 14, 15]
    assert mask[1, 12].nonzero().flatten().tolist() == [9, 10, 11, 12]
    assert bool(mask.any(-1).all())


def test_eight_samples_of_a_prompt_take_a_third_of_the_tokens():
    groups = batch([[1] * 45] * 8 + [[2] * 45] * 8, [[3] * 12] * 16)
    assert pack(groups, "shared_prefix").input_ids.numel() == 2 * 141
    assert pack(groups, "separate").input_ids.numel() == 16 * 57


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("max_tokens", "max_samples"), [(None, None), (12, None), (None, 2), (14, 3), (1, 1)])
def test_micro_batches_cover_every_row_once_within_the_limits(packing, max_tokens, max_samples):
    samples = batch()
    parts = split_micro_batches(samples, packing, max_tokens=max_tokens, max_samples=max_samples)
    assert sorted(row for part in parts for row in part) == list(range(len(PROMPTS)))
    for part in parts:
        prompts = (
            {tuple(PROMPTS[row]) for row in part} if packing == "shared_prefix" else [PROMPTS[row] for row in part]
        )
        num_tokens = sum(map(len, prompts)) + sum(len(RESPONSES[row]) for row in part)
        assert max_samples is None or len(part) <= max_samples
        assert max_tokens is None or num_tokens <= max_tokens or len(part) == 1


def test_empty_responses_alone_give_no_gradient_and_no_nan():
    train = engine()
    before = {name: tensor.clone() for name, tensor in train.tensors().items()}
    metrics = train.update(batch([[9], [8]], [[], []]), lambda lp, *_: (lp.sum(), {"x": lp.sum()}), temperature=1.0)
    assert metrics["grad_norm"] == 0.0 and metrics["x"] == 0.0 and metrics["update_skipped"] == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in train.tensors().items())


def test_an_attention_window_that_packing_would_widen_is_refused():
    config = MistralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        initializer_range=0.25,
    )
    packed, padded = engine(config=config), engine(config=config, packing="padded")
    copy_weights(padded.tensors(), packed.tensors())
    short = batch([[9, 10, 11]] * 2, [[12, 13], [14, 15, 16]])
    torch.testing.assert_close(
        packed.log_probs(short, temperature=1.0)["log_probs"],
        padded.log_probs(short, temperature=1.0)["log_probs"],
        rtol=0,
        atol=2e-5,
    )
    with pytest.raises(ValueError, match=r'12 tokens passes the model\'s attention window of 8.*"padded"'):
        packed.log_probs(batch([[9] * 7], [[10] * 5]), temperature=1.0)
    long = padded.log_probs(batch([list(range(9, 16))], [[20, 21, 22, 23, 24]]), temperature=1.0)["log_probs"]
    logits = reference_logits(plain_model(config, padded.tensors()), list(range(9, 16)), [20, 21, 22, 23, 24])
    expected = torch.log_softmax(logits, -1).gather(1, torch.arange(20, 25)[:, None])[:, 0]
    torch.testing.assert_close(long[0], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_eager_attention_sees_the_same_mask(name):
    config = tiny_config(name, attn_implementation="eager")
    eager, sdpa = engine(config=config), engine(name)
    assert eager.config._attn_implementation == "eager" and sdpa.config._attn_implementation == "sdpa"
    first, second = (train.log_probs(batch(), temperature=1.0)["log_probs"] for train in (eager, sdpa))
    torch.testing.assert_close(first, second, rtol=0, atol=2e-5)
