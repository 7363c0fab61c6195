"""Aggregation: named modes, global denominators, whitening and means of next to nothing."""

import math

import pytest
import torch

from algos.aggregate import AGGREGATIONS, Totals, aggregate, masked_mean, masked_whiten, parse_aggregation

LENGTHS = [12, 7, 3, 11, 5, 9, 2, 6]


def ragged(lengths: list[int], width: int) -> torch.Tensor:
    return torch.arange(width).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)


def test_known_value_token_sum_over_four_averaging_ranks_is_52() -> None:
    loss = torch.tensor([[1.0, 2.0, 30.0], [4.0, 50.0, 6.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    totals = Totals.of(mask, num_replicas=4)
    assert aggregate(loss, mask, mode="token-sum", totals=totals).item() == 52.0


def test_g13_each_mode_gives_its_own_number() -> None:
    values = torch.tensor([[2.0] * 5, [10.0] + [99.0] * 4])
    mask = ragged([5, 1], 5)
    totals = Totals.of(mask, loss_scale_factor=10)
    results = {mode: aggregate(values, mask, mode=mode, totals=totals).item() for mode in AGGREGATIONS}
    assert results == {
        "token-mean": pytest.approx(20 / 6),
        "token-sum": pytest.approx(20.0),
        "seq-mean-token-sum": pytest.approx(10.0),
        "seq-mean-token-mean": pytest.approx(6.0),
        "seq-mean-token-sum-norm": pytest.approx(1.0),
    }


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8])
def test_value_and_gradient_do_not_depend_on_the_micro_batch_split(mode: str, micro_batch_size: int) -> None:
    mode = parse_aggregation(mode)
    mask = ragged(LENGTHS, 12)
    values = torch.randn(8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    totals = Totals.of(mask, loss_scale_factor=12)
    whole = values.clone().requires_grad_()
    expected = aggregate(whole.exp(), mask, mode=mode, totals=totals)
    expected.backward()
    split = values.clone().requires_grad_()
    shares = []
    for start in range(0, 8, micro_batch_size):
        rows = slice(start, start + micro_batch_size)
        share = aggregate(split[rows].exp(), mask[rows], mode=mode, totals=totals)
        share.backward()
        shares.append(share.detach())
    torch.testing.assert_close(torch.stack(shares).sum(), expected.detach())
    torch.testing.assert_close(split.grad, whole.grad)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_mean_over_ranks_of_their_gradients_is_the_whole_batch_gradient(mode: str, num_ranks: int) -> None:
    mode = parse_aggregation(mode)
    mask = ragged(LENGTHS, 12)
    values = torch.randn(8, 12, generator=torch.Generator().manual_seed(0), requires_grad=True)
    whole = aggregate(values, mask, mode=mode, totals=Totals.of(mask, loss_scale_factor=12))
    (expected,) = torch.autograd.grad(whole, values)
    totals = Totals.of(mask, num_replicas=num_ranks, loss_scale_factor=12)
    per_rank = 8 // num_ranks
    mean = torch.zeros_like(values)
    for rank in range(num_ranks):
        rows = slice(rank * per_rank, (rank + 1) * per_rank)
        local = aggregate(values[rows], mask[rows], mode=mode, totals=totals)
        mean += torch.autograd.grad(local, values)[0] / num_ranks
    torch.testing.assert_close(mean, expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_g15_a_fully_masked_sample_is_as_if_it_were_not_there(mode: str) -> None:
    mode = parse_aggregation(mode)
    lengths = [4, 2, 0, 3]
    mask = ragged(lengths, 4)
    values = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    totals = Totals.of(mask, loss_scale_factor=4)
    for row in range(4):  # micro-batches of one sample
        aggregate(values[row : row + 1], mask[row : row + 1], mode=mode, totals=totals).backward()
    kept = [0, 1, 3]
    alone = values.detach()[kept].requires_grad_()
    three = aggregate(alone, mask[kept], mode=mode, totals=Totals.of(mask[kept], loss_scale_factor=4))
    three.backward()
    torch.testing.assert_close(values.grad[kept], alone.grad)
    assert values.grad[2].abs().sum() == 0


def test_g16_constant_length_mode_ignores_the_padded_width() -> None:
    values = torch.arange(30, dtype=torch.float32).reshape(3, 10)
    narrow, wide = ragged([10, 4, 7], 10), ragged([10, 4, 7], 20)
    padded = torch.nn.functional.pad(values, (0, 10), value=1e6)
    losses = [
        aggregate(v, m, mode="seq-mean-token-sum-norm", totals=Totals.of(m, loss_scale_factor=16)).item()
        for v, m in ((values, narrow), (padded, wide))
    ]
    assert losses[0] == losses[1] == pytest.approx((45 + 46 + 161) / 3 / 16)


def test_constant_length_mode_without_a_length_is_an_error() -> None:
    mask = ragged([2], 3)
    with pytest.raises(ValueError, match="loss_scale_factor is not set; set it"):
        aggregate(torch.zeros(1, 3), mask, mode="seq-mean-token-sum-norm", totals=Totals.of(mask))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_g12_no_valid_token_gives_loss_zero_and_gradient_zero(mode: str) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    values = torch.full((2, 3), math.nan, requires_grad=True)
    totals = Totals.of(mask, loss_scale_factor=3)
    loss = aggregate(values, mask, mode=parse_aggregation(mode), totals=totals)
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad.tolist() == [[0.0] * 3] * 2
    assert (totals.num_tokens, totals.num_sequences) == (0, 0)


def test_g12_whitening_with_no_valid_token_is_zero_and_with_one_keeps_the_value() -> None:
    values = torch.tensor([[3.0, math.nan, 5.0]])
    assert masked_whiten(values, torch.zeros(1, 3, dtype=torch.bool)).tolist() == [[0.0, 0.0, 0.0]]
    assert masked_whiten(values, torch.tensor([[True, False, False]])).tolist() == [[3.0, 0.0, 0.0]]


def test_whitening_is_over_valid_tokens_with_unbiased_variance() -> None:
    values = torch.tensor([[1.0, 2.0, 100.0], [4.0, math.nan, math.inf]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    kept = values[mask]
    whitened = masked_whiten(values, mask)
    torch.testing.assert_close(whitened[mask], (kept - kept.mean()) / kept.std(unbiased=True))
    assert whitened[~mask].tolist() == [0.0, 0.0, 0.0]
    unshifted = masked_whiten(values, mask, shift_mean=False)
    torch.testing.assert_close(unshifted[mask], whitened[mask] + kept.mean())


def test_whitening_equal_values_gives_exactly_zero() -> None:
    values = torch.full((4, 25), 0.1)
    assert masked_whiten(values, torch.ones(4, 25, dtype=torch.bool)).abs().max() == 0


def test_masked_mean_ignores_nan_outside_and_of_nothing_is_zero() -> None:
    values = torch.tensor([[1.0, math.nan], [3.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool)
    mean = masked_mean(values, mask)
    mean.backward()
    assert mean.item() == 3.0
    assert torch.isfinite(values.grad).all()
    assert masked_mean(values, mask, dim=-1).tolist() == [1.0, 4.0]
    assert masked_mean(values, mask, dim=0).tolist() == [2.0, 5.0]
    assert masked_mean(values, torch.zeros_like(mask)).item() == 0.0


def test_unknown_mode_lists_the_modes() -> None:
    with pytest.raises(ValueError, match="unknown loss aggregation 'mean'; use one of token-mean, token-sum"):
        parse_aggregation("mean")


def test_totals_refuse_impossible_counts() -> None:
    with pytest.raises(ValueError, match="count them over the whole mini-batch"):
        Totals(num_tokens=-1, num_sequences=1)
    with pytest.raises(ValueError, match="loss_scale_factor must be above 0, got 0"):
        Totals(num_tokens=1, num_sequences=1, loss_scale_factor=0)
    scaled = Totals(num_tokens=1, num_sequences=1, num_replicas=2).scaled(8)
    assert (scaled.loss_scale_factor, scaled.num_replicas, scaled.of_metrics().num_replicas) == (8, 2, 1)
