import itertools
import logging

import numpy as np
import pytest
import torch
from engine_cases import (
    MODELS,
    PROMPTS,
    STOPS,
    VOCAB,
    copy_weights,
    plain_model,
    reference_logits,
    responses_of,
    tiny_config,
)
from transformers import GPT2Config

from hybrid.batch import response_mask, validate
from hybrid.engines.rollout_torch import SamplingParams, TorchRolloutEngine, step_seed
from hybrid.engines.sampling import sample_tokens, uniforms
from hybrid.engines.train_torch import TorchTrainEngine


def engine(name="llama", *, dtype=torch.float32, seed=0, config=None, **options):
    torch.manual_seed(seed)
    return TorchRolloutEngine(config or tiny_config(name), dtype=dtype, **options)


def params(**changes):
    defaults = {"n": 1, "max_new_tokens": 12, "stop_token_ids": STOPS, "seed": 7}
    return SamplingParams(**{**defaults, **changes})


def all_log_probs(rollout, batch, temperature=1.0):
    train = TorchTrainEngine(rollout.config, optim=None)
    copy_weights(train.tensors(), rollout.tensors())
    return train.log_probs(batch, temperature=temperature)["log_probs"]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_transformers_generate_token_for_token(name):
    rollout = engine(name)
    batch = rollout.generate(PROMPTS, params(greedy=True, max_new_tokens=20, stop_token_ids=(2, 3)))
    model = plain_model(rollout.config, rollout.tensors())
    for prompt, response in zip(PROMPTS, responses_of(batch), strict=True):
        ids = torch.tensor([prompt])
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
def test_each_token_is_the_one_its_random_number_picks(name):
    """The sampled ids come back bit for bit, and are what a plain forward pass and the row's own stream say."""
    rollout = engine(name)
    batch = rollout.generate(PROMPTS, params(n=4, temperature=0.8))
    model = plain_model(rollout.config, rollout.tensors())
    rows = [prompt for prompt in PROMPTS for _ in range(4)]
    assert len(set(batch["response_len"].tolist())) > 3
    for row, (prompt, response) in enumerate(zip(rows, responses_of(batch), strict=True)):
        draws = np.random.Generator(np.random.Philox(key=[7, row])).random(12)
        probabilities = torch.softmax(reference_logits(model, prompt, response).double() / 0.8, dim=-1)
        expected = [int(torch.searchsorted(p.cumsum(0), draws[t], right=True)) for t, p in enumerate(probabilities)]
        assert response == expected


@pytest.mark.parametrize("name", MODELS)
def test_a_row_alone_equals_the_row_in_a_ragged_batch(name):
    """Positions follow the mask: with learned positions (gpt2) a shift by the padding would show."""
    rollout = engine(name)
    together = rollout.generate(PROMPTS, params(n=2))
    for i, prompt in enumerate(PROMPTS):
        alone = rollout.generate([prompt], params(n=2), first_row=2 * i)
        rows = slice(2 * i, 2 * i + 2)
        width = alone["response_ids"].shape[1]
        assert responses_of(alone) == responses_of(together)[rows]
        torch.testing.assert_close(
            alone["rollout_log_probs"], together["rollout_log_probs"][rows, :width], rtol=0, atol=2e-5
        )
        assert alone["group_id"].tolist() == [i, i]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_those_of_the_train_engine_at_the_same_temperature(temperature, dtype, monkeypatch):
    monkeypatch.setattr("hybrid.engines.rollout_torch.has_native_bf16", lambda: False)
    rollout = engine(dtype=dtype)
    batch = rollout.generate(PROMPTS, params(n=8, temperature=temperature))
    ratio = torch.exp(all_log_probs(rollout, batch, temperature) - batch["rollout_log_probs"])[response_mask(batch)]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=2e-4)
    if temperature != 1.0:
        wrong = torch.exp(all_log_probs(rollout, batch, 1.0) - batch["rollout_log_probs"])[response_mask(batch)]
        assert (wrong - 1).abs().max() > 0.1


def test_top_p_and_top_k_limit_the_tokens_but_not_the_log_probs(caplog):
    rollout = engine("qwen2")
    with caplog.at_level(logging.WARNING):
        batch = rollout.generate(PROMPTS, params(n=8, top_p=0.5, stop_token_ids=()))
        rollout.generate(PROMPTS, params(top_k=2))
    assert [record.message for record in caplog.records if "understate" in record.message] != []
    assert len(caplog.records) == 1
    model = plain_model(rollout.config, rollout.tensors())
    rows = [prompt for prompt in PROMPTS for _ in range(8)]
    num_not_best = 0
    for row, (prompt, response) in enumerate(zip(rows, responses_of(batch), strict=True)):
        log_probs = torch.log_softmax(reference_logits(model, prompt, response), dim=-1)
        for t, token in enumerate(response):
            mass_above = log_probs[t][log_probs[t] > log_probs[t, token]].exp().sum()
            num_not_best += bool(mass_above > 0)
            assert mass_above < 0.5
            assert abs(float(batch["rollout_log_probs"][row, t] - log_probs[t, token])) < 2e-5
    assert num_not_best > 10


def test_sampling_follows_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")]).repeat(20_000, 1)
    draws = uniforms(3, range(20_000), 1)[:, 0]
    cases = {
        "all": (params(), torch.softmax(logits[0], dim=0)),
        "top_k": (params(top_k=2), torch.softmax(torch.tensor([2.0, 1.0] + [float("-inf")] * 3), dim=0)),
        "top_p": (params(top_p=0.7), torch.softmax(torch.tensor([2.0, 1.0] + [float("-inf")] * 3), dim=0)),
        "cold": (params(temperature=0.5), torch.softmax(logits[0] / 0.5, dim=0)),
    }
    for name, (how, expected) in cases.items():
        tokens, log_probs = sample_tokens(logits, draws, how)
        share = torch.bincount(tokens, minlength=5) / len(tokens)
        assert (share - expected).abs().max() < 0.012, name
        full = torch.log_softmax(logits[0] / how.temperature, dim=0)
        torch.testing.assert_close(log_probs, full[tokens], rtol=0, atol=1e-6)


def test_the_ends_of_the_unit_interval_never_pick_an_impossible_token():
    logits = torch.full((2, 700), float("-inf"))
    logits[:, [300, 301, 555]] = torch.tensor([0.0, 1.0, 0.5])
    tokens, _ = sample_tokens(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), params())
    assert tokens.tolist() == [300, 555]


def test_samples_of_a_prompt_differ_and_repeat_with_the_seed():
    rollout = engine()
    how = params(n=8, stop_token_ids=())
    first, again = (rollout.generate([PROMPTS[0]], how) for _ in range(2))
    assert len({tuple(row) for row in responses_of(first)}) == 8
    assert responses_of(first) == responses_of(again)
    assert torch.equal(first["rollout_log_probs"], again["rollout_log_probs"])
    other = rollout.generate([PROMPTS[0]], params(n=8, stop_token_ids=(), seed=8))
    assert not set(map(tuple, responses_of(other))) & set(map(tuple, responses_of(first)))


def test_two_workers_draw_what_one_would():
    """n = 8 of one prompt, four on each of two engines: eight different responses, the same as on one engine."""
    rollout = engine()
    whole = responses_of(rollout.generate([PROMPTS[0]], params(n=8)))
    halves = [rollout.generate([PROMPTS[0]], params(n=4), first_row=first) for first in (0, 4)]
    assert responses_of(halves[0]) + responses_of(halves[1]) == whole


def test_the_global_random_state_is_neither_read_nor_changed():
    rollout = engine()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = rollout.generate(PROMPTS, params(n=2))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert responses_of(rollout.generate(PROMPTS, params(n=2))) == responses_of(first)


def test_step_seeds_differ_by_base_step_and_replica():
    seeds = {step_seed(base, step, replica) for base in range(4) for step in range(50) for replica in range(3)}
    assert len(seeds) == 600
    assert step_seed(1, 2, 3) == step_seed(1, 2, 3)


def test_any_stop_id_ends_a_response_and_is_part_of_it():
    rollout = engine()
    batch = rollout.generate(PROMPTS, params(n=16, max_new_tokens=30))
    last = [row[-1] for row in responses_of(batch)]
    assert len(set(last) & set(STOPS)) > 2
    for row, response in enumerate(responses_of(batch)):
        assert not set(response[:-1]) & set(STOPS)
        assert bool(batch["truncated"][row]) == (response[-1] not in STOPS)
        assert not bool(batch["truncated"][row]) or len(response) == 30


def test_a_stop_id_that_pads_is_still_trained_and_may_stand_in_a_prompt():
    prompt = [11, STOPS[0], 12, STOPS[0]]
    as_pad = engine(pad_token_id=STOPS[0]).generate([prompt, PROMPTS[1]], params(n=8))
    other = engine(pad_token_id=50).generate([prompt, PROMPTS[1]], params(n=8))
    assert responses_of(as_pad) == responses_of(other)
    assert torch.equal(response_mask(as_pad), response_mask(other))
    ended = [row for row, response in enumerate(responses_of(as_pad)) if response[-1] == STOPS[0]]
    assert ended
    for row in ended:
        mask = response_mask(as_pad)[row].int().tolist()
        length = int(as_pad["response_len"][row])
        assert mask == [1] * length + [0] * (len(mask) - length)
    assert (as_pad["rollout_log_probs"] - other["rollout_log_probs"]).abs().max() == 0


def test_each_distinct_prompt_is_prefilled_once_and_finished_rows_leave_the_batch():
    rollout = engine()
    shapes = []
    rollout._model.register_forward_pre_hook(
        lambda _module, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    batch = rollout.generate([*PROMPTS, PROMPTS[0]], params(n=6, max_new_tokens=30))
    assert shapes[0] == (3, 7)
    rows = [shape[0] for shape in shapes[1:]]
    live = [int((batch["response_len"] > step + 1).sum()) for step in range(len(rows))]
    assert rows[0] <= 24 and rows[-1] < 12
    assert all(now <= before for before, now in itertools.pairwise(rows))
    assert all(alive <= width < alive / 0.75 + 1 for alive, width in zip(live, rows, strict=True))


def test_rows_in_turns_equal_rows_at_once():
    rollout = engine()
    in_turns = engine(max_batch_rows=5)
    once, turns = (one.generate(PROMPTS, params(n=4)) for one in (rollout, in_turns))
    assert responses_of(once) == responses_of(turns)
    torch.testing.assert_close(once["rollout_log_probs"], turns["rollout_log_probs"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_response_ends_at_the_models_last_position(name):
    rollout = engine(name)
    long, short = list(range(10, 70))[:60], [11, 12]
    batch = rollout.generate([long, short], params(max_new_tokens=10, stop_token_ids=()))
    assert batch["response_len"].tolist() == [4, 10]
    assert batch["truncated"].tolist() == [True, True]
    with pytest.raises(ValueError, match=r"Prompt 0 has 64 tokens, which leaves no room .* 64 positions"):
        rollout.generate([[9] * 64], params())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_the_live_weights_by_checkpoint_name(name, dtype, monkeypatch):
    monkeypatch.setattr("hybrid.engines.rollout_torch.has_native_bf16", lambda: False)
    rollout, donor = engine(name, dtype=dtype), engine(name, dtype=dtype, seed=1)
    tensors = rollout.tensors()
    is_tied = rollout.config.tie_word_embeddings
    assert ("lm_head.weight" in tensors) == (not is_tied)
    assert not any("inv_freq" in tensor for tensor in tensors)
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    before = rollout.generate(PROMPTS, params(n=4))
    copy_weights(tensors, donor.tensors())
    rollout.version = 5
    after, cold = rollout.generate(PROMPTS, params(n=4)), donor.generate(PROMPTS, params(n=4))
    assert responses_of(after) != responses_of(before)
    assert responses_of(after) == responses_of(cold)
    assert torch.equal(after["rollout_log_probs"], cold["rollout_log_probs"])
    assert set(after["version"].tolist()) == {5} and set(before["version"].tolist()) == {0}
    assert all(
        tensor.data_ptr() == rollout.tensors()[tensor_name].data_ptr() for tensor_name, tensor in tensors.items()
    )


@pytest.mark.parametrize("name", MODELS)
def test_widened_bf16_equals_fp32_with_rounded_weights(name, monkeypatch):
    monkeypatch.setattr("hybrid.engines.rollout_torch.has_native_bf16", lambda: False)
    monkeypatch.setattr("hybrid.engines.widen.CHUNK_BYTES", 4 * 32 * 7)
    narrow, wide = engine(name, dtype=torch.bfloat16), engine(name)
    copy_weights(wide.tensors(), narrow.tensors())
    first, second = (one.generate(PROMPTS, params(n=4)) for one in (narrow, wide))
    assert responses_of(first) == responses_of(second)
    torch.testing.assert_close(first["rollout_log_probs"], second["rollout_log_probs"], rtol=0, atol=2e-5)
    assert {tensor.dtype for tensor in narrow.tensors().values()} == {torch.bfloat16}


def test_a_model_that_counts_is_followed_without_a_shift():
    """next = token + 1 with certainty: log-probs are about 0, and would be very negative one place off."""
    config = GPT2Config(vocab_size=24, n_embd=24, n_layer=1, n_head=2, n_positions=32, tie_word_embeddings=False)
    rollout = engine(config=config)
    tensors = rollout.tensors()
    with torch.no_grad():
        for name, tensor in tensors.items():
            if not name.endswith("ln_f.weight"):
                tensor.zero_()
        tensors["transformer.wte.weight"].copy_(torch.eye(24))
        tensors["lm_head.weight"].copy_(30 * torch.eye(24).roll(1, dims=0))
    batch = rollout.generate([[3, 9], [5]], params(max_new_tokens=6, stop_token_ids=(13,)))
    assert responses_of(batch) == [[10, 11, 12, 13], [6, 7, 8, 9, 10, 11]]
    assert batch["rollout_log_probs"].abs().max() < 1e-5
    assert all_log_probs(rollout, batch).abs().max() < 1e-5
    shifted = batch.clone()
    shifted["response_ids"] = shifted["response_ids"].roll(1, dims=1)
    assert all_log_probs(rollout, shifted)[:, 0].max() < -20


def test_the_batch_is_valid_and_grouped():
    batch = engine().generate(PROMPTS, params(n=3))
    assert validate(batch) is batch
    assert batch["group_id"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert batch["response_ids"].shape[1] == int(batch["response_len"].max())


def test_bad_input_is_named():
    rollout = engine()
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        rollout.generate([[9], []], params())
    with pytest.raises(ValueError, match=rf"ids below {VOCAB}, but prompt 0 holds 500"):
        rollout.generate([[9, 500]], params())
    with pytest.raises(ValueError, match="at least one prompt"):
        rollout.generate([], params())
    with pytest.raises(ValueError, match=r"multiple of n = 4, but got 3"):
        rollout.generate([[9]], params(n=4), first_row=3)
    with pytest.raises(FileNotFoundError, match=r"no-such-folder.*config\.json"):
        TorchRolloutEngine("no-such-folder")
    with torch.no_grad():
        rollout.tensors()["model.norm.weight"].fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="weights version 0"):
        rollout.generate([[9]], params())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "n >= 1"),
        ({"temperature": 0.0}, "set greedy"),
        ({"top_p": 0.0}, "0 < top_p <= 1"),
        ({"top_k": -1}, "top_k >= 0"),
        ({"seed": -1}, "seed between"),
    ],
)
def test_sampling_params_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        params(**changes)
