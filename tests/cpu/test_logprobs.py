"""Log-probs and entropy: values, gradients, chunking, temperature and impossible entries."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid.logprobs import entropy_from_logits, linear_token_log_probs, token_log_probs

ONE_ROW_BYTES = 1  # every chunk then holds one row


def naive(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(targets), distribution.entropy()


def sample(rows: int = 7, vocab: int = 11, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(vocab, (rows,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_values_and_gradients_equal_autograd_on_the_whole_softmax(temperature: float) -> None:
    logits, targets = sample()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    log_probs, entropy = token_log_probs(ours, targets, temperature=temperature)
    expected_log_probs, expected_entropy = naive(theirs, targets, temperature)
    torch.testing.assert_close(log_probs, expected_log_probs)
    torch.testing.assert_close(entropy, expected_entropy)
    weights = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    (weights * log_probs + weights.flip(0) * entropy).sum().backward()
    (weights * expected_log_probs + weights.flip(0) * expected_entropy).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("use", ["log_probs", "entropy", "both"])
def test_gradients_equal_finite_differences(use: str) -> None:
    logits, targets = sample(3, 5)

    def outputs(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        log_probs, entropy = token_log_probs(z, targets, temperature=0.7, max_chunk_bytes=ONE_ROW_BYTES)
        assert entropy is not None
        return {"log_probs": (log_probs,), "entropy": (entropy,), "both": (log_probs, entropy)}[use]

    assert torch.autograd.gradcheck(outputs, (logits.requires_grad_(),))


def test_fused_head_gradients_equal_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([5, 0, 3])

    def outputs(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(linear_token_log_probs(h, w, targets, temperature=0.7, max_chunk_bytes=ONE_ROW_BYTES))

    assert torch.autograd.gradcheck(outputs, (hidden, weight))


def test_fused_head_equals_logits_path_and_takes_a_frozen_side() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 3, 4, generator=generator)
    weight = torch.randn(6, 4, generator=generator, requires_grad=True)
    targets = torch.randint(6, (2, 3), generator=generator)
    fused = linear_token_log_probs(hidden, weight, targets, max_chunk_bytes=ONE_ROW_BYTES)
    plain = token_log_probs(hidden @ weight.T, targets)
    torch.testing.assert_close(fused, plain)
    (expected,) = torch.autograd.grad(plain.log_probs.sum(), weight)
    (actual,) = torch.autograd.grad(fused.log_probs.sum(), weight)
    torch.testing.assert_close(actual, expected)
    frozen = linear_token_log_probs(hidden.requires_grad_(), weight.detach(), targets)
    (grad_hidden,) = torch.autograd.grad(frozen.log_probs.sum(), hidden)
    (expected_hidden,) = torch.autograd.grad(token_log_probs(hidden @ weight.detach().T, targets)[0].sum(), hidden)
    torch.testing.assert_close(grad_hidden, expected_hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_chunking_gives_the_same_bits(dtype: torch.dtype) -> None:
    logits, targets = sample(33, 257, dtype)
    results = []
    for max_chunk_bytes in (ONE_ROW_BYTES, 4 * 257 * 10, 2**30):
        leaf = logits.clone().requires_grad_()
        log_probs, entropy = token_log_probs(leaf, targets, temperature=0.9, max_chunk_bytes=max_chunk_bytes)
        assert entropy is not None
        (log_probs.sum() + 0.1 * entropy.sum()).backward()
        results.append((log_probs.detach(), entropy.detach(), leaf.grad))
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)


def test_statistics_are_fp32_whatever_the_logits() -> None:
    logits, targets = sample(5, 1000, torch.bfloat16)
    log_probs, entropy = token_log_probs(logits, targets)
    assert log_probs.dtype == torch.float32
    assert entropy is not None
    expected, expected_entropy = naive(logits.double(), targets, 1.0)
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=0)


def test_g19_entropy_with_a_forbidden_entry_is_ln_2_with_finite_gradient() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([1]))
    assert entropy is not None
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6)
    (1e9 * entropy.sum() + log_probs.sum()).backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2] == 0


def test_g19_entropy_of_fp16_extremes_is_zero_with_finite_gradient() -> None:
    logits = torch.tensor([[65504.0, -65504.0]], dtype=torch.float16, requires_grad=True)
    entropy = entropy_from_logits(logits)
    assert entropy.tolist() == [0.0]
    entropy.sum().backward()
    assert logits.grad.tolist() == [[0.0, 0.0]]


def test_a_forbidden_target_has_log_prob_minus_infinity_and_a_finite_gradient() -> None:
    logits = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    log_probs, _ = token_log_probs(logits, torch.tensor([1]))
    assert log_probs.tolist() == [-math.inf]
    log_probs.sum().backward()
    assert logits.grad.tolist() == [[-1.0, 1.0]]


def test_h1_temperature_is_applied_so_that_the_ratio_to_the_sampler_is_one() -> None:
    logits, _ = sample(4000, 20, torch.float32)
    sampler = torch.log_softmax(logits / 0.6, dim=-1)
    tokens = torch.multinomial(sampler.exp(), 1, generator=torch.Generator().manual_seed(3)).squeeze(-1)
    sampled = sampler.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    right = token_log_probs(logits, tokens, temperature=0.6).log_probs
    assert (right - sampled).exp().sub(1).abs().max() < 1e-5
    forgotten = token_log_probs(logits, tokens).log_probs
    assert (forgotten - sampled).exp().sub(1).abs().mean() > 0.1


def test_h2_truncated_sampling_shifts_every_log_ratio_by_the_log_of_the_kept_mass() -> None:
    probabilities = torch.tensor([[0.6, 0.3, 0.1]])
    log_prob = token_log_probs(probabilities.log(), torch.tensor([0])).log_probs
    over_support = token_log_probs(torch.tensor([[0.6, 0.3, 0.0]]).log(), torch.tensor([0])).log_probs
    assert (log_prob - over_support).item() == pytest.approx(-0.10536, abs=1e-5)


def test_h10_targets_are_the_next_tokens() -> None:
    vocab = 7
    tokens = torch.arange(20).remainder(vocab).unsqueeze(0)
    logits = 30.0 * torch.nn.functional.one_hot((tokens + 1) % vocab, vocab).float()
    right = token_log_probs(logits[:, :-1], tokens[:, 1:]).log_probs
    shifted = token_log_probs(logits[:, :-1], tokens[:, :-1]).log_probs
    assert right.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert shifted.mean() < -25


def test_h12_gradient_is_onehot_minus_softmax_on_all_entries() -> None:
    logits = torch.tensor([[0.3, -1.0, 0.5, 2.0, 0.1, -0.4]], requires_grad=True)
    token_log_probs(logits, torch.tensor([4])).log_probs.sum().backward()
    expected = torch.nn.functional.one_hot(torch.tensor([4]), 6) - torch.softmax(logits.detach(), dim=-1)
    torch.testing.assert_close(logits.grad, expected)


def test_h13_a_row_scores_the_same_bits_alone_and_in_a_batch() -> None:
    logits, targets = sample(8, 501, torch.float32)
    together = token_log_probs(logits, targets).log_probs
    alone = torch.cat([token_log_probs(logits[i : i + 1], targets[i : i + 1]).log_probs for i in range(8)])
    assert torch.equal(together, alone)


def test_a14_zero_pad_columns_would_change_the_log_prob_and_forbidden_ones_do_not() -> None:
    logits, targets = sample(4, 10, torch.float32)
    real = token_log_probs(logits, targets)
    forbidden = token_log_probs(torch.nn.functional.pad(logits, (0, 6), value=-math.inf), targets)
    zeros = token_log_probs(torch.nn.functional.pad(logits, (0, 6)), targets)
    torch.testing.assert_close(forbidden, real)
    assert (zeros.log_probs - real.log_probs).max() < -1e-3


def test_consume_logits_writes_the_gradient_into_their_memory() -> None:
    hidden = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    head = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(6)
    expected = torch.autograd.grad(token_log_probs(hidden @ head, targets).log_probs.sum(), hidden)[0]
    logits = hidden @ head
    before = logits.detach().clone()
    log_probs = token_log_probs(logits, targets, consume_logits=True, max_chunk_bytes=ONE_ROW_BYTES).log_probs
    torch.testing.assert_close(torch.autograd.grad(log_probs.sum(), hidden)[0], expected)
    assert not torch.equal(logits.detach(), before)


def test_logits_that_were_consumed_refuse_a_second_backward() -> None:
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    log_probs = token_log_probs(logits * 1.0, torch.tensor([0, 1]), consume_logits=True).log_probs
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


class LargestTemporary(TorchDispatchMode):
    """Sees the largest fp32 tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@pytest.mark.parametrize("fused", [False, True])
def test_no_fp32_temporary_is_larger_than_the_chunk_forward_or_backward(fused: bool) -> None:
    rows, vocab, width, rows_per_chunk = 64, 1000, 8, 4
    hidden = torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.arange(rows)
    limit = rows_per_chunk * vocab * 4
    with LargestTemporary() as seen:
        if fused:
            result = linear_token_log_probs(hidden, weight, targets, max_chunk_bytes=limit)
        else:
            result = token_log_probs(hidden @ weight.T, targets, max_chunk_bytes=limit)
        assert result.entropy is not None
        (result.log_probs.sum() + result.entropy.sum()).backward()
    largest_allowed = max(
        rows_per_chunk * vocab, vocab * width if fused else 0
    )  # fused sums the head's gradient in fp32
    assert 0 < seen.num_elements <= largest_allowed


def test_no_positions_at_all() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.zeros(0, dtype=torch.int64))
    assert log_probs.shape == (0,)
    assert entropy is not None
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad.shape == (0, 5)


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"one distribution per target, got \(2,\) of them for targets \(3,\)"):
        token_log_probs(torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64))
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature must be above 0"):
            token_log_probs(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), temperature=temperature)
