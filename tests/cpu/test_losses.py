"""Losses: formulas against independent ones, gradients, masks, and invariance to the micro-batch split."""

import math
from collections.abc import Callable

import pytest
import torch

from algos.aggregate import AGGREGATIONS, Totals, parse_aggregation
from algos.losses import cispo_loss, gpg_loss, gspo_loss, metric_share, ppo_clip_loss, value_loss

LENGTHS = [12, 7, 3, 11, 5, 9, 2, 6]


def ragged(lengths: list[int], width: int) -> torch.Tensor:
    return torch.arange(width).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)


def one_token(ratio: float, advantage: float, **options: object) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient with respect to the log-prob, and metrics for a single token."""
    log_probs = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, metrics = ppo_clip_loss(
        log_probs, torch.tensor([[-1.0]]), torch.tensor([[advantage]]), mask, totals=Totals.of(mask), **options
    )
    loss.backward()
    return loss.item(), log_probs.grad.item(), {key: value.item() for key, value in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "bounded"),
    [
        (1.1, 1.0, -1.1, -1.1, 0, 0),  # inside the range
        (1.5, 1.0, -1.28, 0.0, 1, 0),  # gain beyond the upper clip
        (0.5, 1.0, -0.5, -0.5, 0, 0),  # the pessimistic branch keeps its gradient
        (0.9, -1.0, 0.9, 0.9, 0, 0),
        (0.5, -1.0, 0.8, 0.0, 1, 0),  # gain beyond the lower clip
        (2.0, -1.0, 2.0, 2.0, 0, 0),
        (4.0, -1.0, 3.0, 0.0, 0, 1),  # bounded by the dual clip
    ],
)
def test_ppo_clip_regions(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: float, bounded: float
) -> None:
    value, slope, metrics = one_token(ratio, advantage, clip_low=0.2, clip_high=0.28, clip_dual=3.0)
    assert value == pytest.approx(loss, rel=1e-5)
    assert slope == pytest.approx(gradient, rel=1e-5)
    assert (metrics["pg_clipfrac"], metrics["pg_clipfrac_lower"]) == (clipped, bounded)
    assert metrics["ppo_kl"] == pytest.approx(-math.log(ratio), rel=1e-5)


def test_without_the_dual_clip_the_loss_is_unbounded() -> None:
    assert one_token(4.0, -1.0, clip_dual=None)[:2] == (pytest.approx(4.0), pytest.approx(4.0))
    with pytest.raises(ValueError, match="clip_dual must be above 1, got 1"):
        one_token(1.0, 1.0, clip_dual=1.0)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    mask = ragged([3, 2], 3)
    log_probs = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -3.0, -9.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]])
    totals = Totals.of(mask)
    loss, _ = ppo_clip_loss(log_probs, log_probs.detach(), advantages, mask, totals=totals)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, torch.where(mask, -advantages / 5, 0.0))
    plain, _ = gpg_loss(log_probs, advantages, mask, totals=totals)
    torch.testing.assert_close(torch.autograd.grad(plain, log_probs)[0], gradient)
    cispo, _ = cispo_loss(log_probs, log_probs.detach(), advantages, mask, totals=totals)
    torch.testing.assert_close(torch.autograd.grad(cispo, log_probs)[0], gradient)


@pytest.mark.parametrize("log_ratio", [-1e4, -30.0, 30.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_huge_log_ratios_stay_finite(log_ratio: float, advantage: float) -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    totals = Totals.of(mask)
    for function in (ppo_clip_loss, gspo_loss, cispo_loss):
        log_probs = torch.tensor([[log_ratio]], requires_grad=True)
        loss, metrics = function(log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]), mask, totals=totals)
        loss.backward()
        assert math.isfinite(loss.item())
        assert torch.isfinite(log_probs.grad).all()
        assert all(torch.isfinite(value) for value in metrics.values())


def test_gspo_value_and_gradient_equal_the_sequence_objective() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = ragged([4, 2, 3], 4)
    old = -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    new = (old + 0.02 * torch.randn(3, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    clip_low, clip_high = 0.004, 0.005
    loss, metrics = gspo_loss(
        new,
        old,
        advantages.unsqueeze(-1).expand(3, 4),
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        totals=Totals.of(mask),
    )
    lengths = mask.sum(-1)
    ratio = torch.exp(((new - old) * mask).sum(-1) / lengths)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    expected = torch.maximum(-ratio * advantages, -clipped * advantages).mean()
    is_clipped = (-clipped * advantages > -ratio * advantages).detach()
    assert 0 < is_clipped.sum() < 3
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, new)
    (wanted,) = torch.autograd.grad(expected, new)
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)
    assert metrics["pg_clipfrac"].item() == pytest.approx((lengths * is_clipped).sum().item() / 9)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    log_probs = (old + torch.tensor([[0.1, 1.0, -1.0]])).requires_grad_()
    loss, metrics = cispo_loss(log_probs, old, torch.ones(1, 3), mask, totals=Totals.of(mask))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, -torch.tensor([[math.exp(0.1), 1.2, 0.8]]) / 3)
    assert metrics["pg_clipfrac"].item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("sentinel", [1.0, math.nan, math.inf, -math.inf])
def test_h9_masked_slots_have_no_effect_whatever_stands_there(sentinel: float) -> None:
    mask = torch.tensor([[1, 1, 0, 0]], dtype=torch.bool)
    totals = Totals.of(mask)

    def spoil(values: list[float], filler: float) -> torch.Tensor:
        return torch.tensor([[*values, filler, filler]])

    for function in (ppo_clip_loss, gspo_loss, cispo_loss):
        results = []
        for filler in (0.0, sentinel):
            log_probs = spoil([-1.0, -2.0], filler).requires_grad_()
            loss, metrics = function(
                log_probs,
                spoil([-1.1, -1.9], -filler),
                spoil([1.0, -1.0], filler),
                mask,
                totals=totals,
                weights=spoil([1.0, 0.5], filler),
            )
            loss.backward()
            entropy = metric_share(spoil([0.4, 0.2], filler), mask, totals)
            results.append((loss.item(), log_probs.grad.tolist(), entropy.item(), sorted(metrics.items())))
        assert results[0] == results[1]
        assert results[0][2] == pytest.approx(0.3)


def losses() -> dict[str, Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    def gpg(
        log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, **rest: object
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return gpg_loss(log_probs, advantages, mask, **rest)

    return {"vanilla": ppo_clip_loss, "cispo": cispo_loss, "gpg": gpg, "value": value_loss}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", ["vanilla", "cispo", "gpg", "value", "gspo"])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_loss_gradient_and_metrics_do_not_depend_on_the_micro_batch_split(
    mode: str, name: str, micro_batch_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = ragged(LENGTHS, 12)
    new, old, target = (torch.randn(8, 12, generator=generator, dtype=torch.float64) for _ in range(3))
    totals = Totals.of(mask, loss_scale_factor=12)
    options = {} if name == "gspo" else {"aggregate": parse_aggregation(mode)}
    function = gspo_loss if name == "gspo" else losses()[name]

    def run(size: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        leaf = new.clone().requires_grad_()
        total, sums = torch.zeros((), dtype=torch.float64), {}
        for start in range(0, 8, size):
            rows = slice(start, start + size)
            loss, metrics = function(leaf[rows], old[rows], target[rows], mask[rows], totals=totals, **options)
            loss.backward()
            total = total + loss.detach()
            for key, value in metrics.items():
                sums[key] = sums.get(key, 0.0) + value.item()
        return total, leaf.grad, sums

    whole, split = run(8), run(micro_batch_size)
    torch.testing.assert_close(split[0], whole[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(split[1], whole[1], atol=1e-7, rtol=1e-5)
    assert split[2] == pytest.approx(whole[2], abs=1e-6)


def test_value_loss_formula_and_clipped_gradient() -> None:
    mask = torch.tensor([[1, 1, 1, 0]], dtype=torch.bool)
    values = torch.tensor([[1.0, 2.0, 0.2, math.nan]], requires_grad=True)
    old = torch.tensor([[0.8, 0.0, 0.0, math.nan]])
    returns = torch.tensor([[3.0, 0.4, 1.0, math.nan]])
    loss, metrics = value_loss(values, old, returns, mask, clip_range=0.5, totals=Totals.of(mask))
    loss.backward()
    # Token 1: (2 - 0.4)^2 beats (0.5 - 0.4)^2; token 0 and 2 are inside the range.
    assert loss.item() == pytest.approx(0.5 * (4.0 + 2.56 + 0.64) / 3)
    assert values.grad[0].tolist() == pytest.approx([-2.0 / 3, 1.6 / 3, -0.8 / 3, 0.0])
    assert metrics["vf_clipfrac"].item() == 0.0
    assert metrics["vpred_mean"].item() == pytest.approx(3.2 / 3)


def test_value_loss_takes_the_clipped_error_where_it_is_larger() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    values = torch.tensor([[2.0]], requires_grad=True)
    loss, metrics = value_loss(values, torch.zeros(1, 1), torch.tensor([[2.0]]), mask, totals=Totals.of(mask))
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 1.5**2)
    assert values.grad.item() == 0.0
    assert metrics["vf_clipfrac"].item() == 1.0


def test_weights_multiply_the_loss_and_pass_no_gradient() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    log_probs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    weights = torch.tensor([[2.0, 0.0]], requires_grad=True)
    loss, _ = ppo_clip_loss(
        log_probs, log_probs.detach(), torch.ones(1, 2), mask, totals=Totals.of(mask), weights=weights
    )
    loss.backward()
    assert log_probs.grad.tolist() == [[-1.0, 0.0]]
    assert weights.grad is None


def test_advantages_and_old_log_probs_pass_no_gradient() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    leaves = [torch.full((1, 2), value, requires_grad=True) for value in (-1.0, -1.1, 0.5)]
    for function in (ppo_clip_loss, gspo_loss, cispo_loss):
        loss, _ = function(*leaves, mask, totals=Totals.of(mask))
        loss.backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None
    assert leaves[2].grad is None
