"""Rollout correction: truncated, bounded and sequence weights, and the eleven rejection rules."""

import math
from typing import get_args

import pytest
import torch

from algos.aggregate import Totals
from algos.losses import ppo_clip_loss
from algos.rollout_correction import Bounds, Importance, Rejection, RejectionName, correct_rollout

ONES = torch.ones(1, 3, dtype=torch.bool)


def from_ratios(*ratios: float) -> tuple[torch.Tensor, torch.Tensor]:
    old = torch.tensor([[math.log(ratio) for ratio in ratios]])
    return old, torch.zeros_like(old)


def test_token_weights_are_truncated_from_above() -> None:
    correction = correct_rollout(*from_ratios(0.1, 1.5, 40.0), ONES, importance=Importance(limit=2.0))
    assert correction.weights[0].tolist() == pytest.approx([0.1, 1.5, 2.0])
    assert correction.metrics["rollout_corr/is_oob_fraction"] == pytest.approx(1 / 3)
    assert torch.equal(correction.mask, ONES)


def test_sequence_weights_are_constant_along_a_sequence_and_use_its_product() -> None:
    old, rollout = torch.tensor([[0.2, 0.3, 9.0], [-0.1, 0.4, 0.5]]), torch.zeros(2, 3)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    correction = correct_rollout(old, rollout, mask, importance=Importance(level="sequence", limit=2.0))
    first, second = math.exp(0.5), 2.0
    torch.testing.assert_close(correction.weights, torch.tensor([[first, first, 0.0], [second] * 3]))
    assert correction.metrics["rollout_corr/is_mean"] == pytest.approx((first + second) / 2)


def test_known_value_bounded_weights_are_zero_outside_and_the_mask_stays() -> None:
    importance = Importance(limit=Bounds.parse("0.5_5"))
    correction = correct_rollout(*from_ratios(0.4, 0.8, 6.0), ONES, importance=importance)
    assert correction.weights[0].tolist() == pytest.approx([0.0, 0.8, 0.0])
    assert torch.equal(correction.mask, ONES)
    metrics = correction.metrics
    assert metrics["rollout_corr/is_oob_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/is_std"] == pytest.approx(0.3771236, abs=1e-6)
    assert metrics["rollout_corr/is_eff_sample_size"] == pytest.approx(1 / 3)


def test_known_value_weights_multiply_the_policy_loss() -> None:
    old, rollout = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-0.5, -3.5, -0.8]])
    weights = correct_rollout(old, rollout, ONES, importance=Importance(limit=Bounds(0.5, 5.0))).weights
    assert weights[0].tolist() == pytest.approx([0.60653067, 0.0, 0.81873075], abs=1e-6)
    advantages = torch.tensor([[1.0, -2.0, 3.0]])
    loss, _ = ppo_clip_loss(old, old, advantages, ONES, totals=Totals.of(ONES), weights=weights)
    assert loss.item() == pytest.approx((weights * -advantages).mean().item())


def test_known_value_token_rejection_by_ratio() -> None:
    old, rollout = torch.tensor([[-1.0, 0.5]]), torch.zeros(1, 2)
    mask = torch.ones(1, 2, dtype=torch.bool)
    rule = Rejection(name="token_k1", limit=Bounds.parse("0.5_2.0"))
    correction = correct_rollout(old, rollout, mask, importance=Importance(limit=10.0), rejections=[rule])
    assert correction.mask.tolist() == [[False, True]]
    assert correction.weights[0].tolist() == pytest.approx([0.0, math.exp(0.5)])
    assert correction.metrics["rollout_corr/rs_masked_fraction"] == 0.5
    assert correction.metrics["rollout_corr/rs_seq_masked_fraction"] == 0.0


@pytest.mark.parametrize("name", get_args(RejectionName))
def test_every_rule_keeps_the_near_and_rejects_the_far(name: RejectionName) -> None:
    log_ratio = torch.tensor([[0.01, -0.02, 0.0, 50.0], [0.9, 0.8, 0.05, 50.0]])
    mask = torch.tensor([[1, 1, 1, 0]] * 2, dtype=torch.bool)
    limit = Bounds(0.7, 1.4) if name.endswith("_k1") else 0.1
    correction = correct_rollout(log_ratio, torch.zeros(2, 4), mask, rejections=[Rejection(name=name, limit=limit)])
    far = [False, False, True, False] if name.startswith("token") else [False] * 4
    assert correction.mask.tolist() == [[True, True, True, False], far]
    assert correction.weights is None


def test_rules_are_joined_by_and() -> None:
    old = torch.tensor([[0.0, 1.0, -1.0]])
    rules = [Rejection(name="token_k1", limit=Bounds(0.0, 2.0)), Rejection(name="token_k1", limit=Bounds(0.5, 99.0))]
    assert correct_rollout(old, torch.zeros(1, 3), ONES, rejections=rules).mask.tolist() == [[True, False, False]]


def test_normalised_weights_have_mean_one_over_their_units() -> None:
    old, rollout = from_ratios(0.5, 1.0, 1.5)
    tokens = correct_rollout(old, rollout, ONES, importance=Importance(normalize=True))
    assert tokens.weights.mean().item() == pytest.approx(1.0)
    none_left = correct_rollout(old, rollout, ONES, importance=Importance(limit=Bounds(8, 9), normalize=True))
    assert none_left.weights.tolist() == [[0.0] * 3]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extremes_masks_and_nothing_at_all_stay_finite(level: str) -> None:
    old = torch.tensor([[1e6, -1e6, math.nan]], requires_grad=True)
    for mask in (torch.tensor([[1, 1, 0]], dtype=torch.bool), torch.zeros(1, 3, dtype=torch.bool)):
        correction = correct_rollout(
            old,
            torch.zeros(1, 3),
            mask,
            importance=Importance(level=level),
            rejections=[Rejection(name="seq_mean_k3", limit=0.1)],
        )
        assert torch.isfinite(correction.weights).all()
        assert not correction.weights.requires_grad
        assert all(math.isfinite(value) for value in correction.metrics.values())


def test_equal_log_probs_change_nothing() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -0.3]])
    rules = [Rejection(name="seq_max_k2", limit=0.0), Rejection(name="seq_sum_k1", limit=Bounds(1.0, 1.0))]
    correction = correct_rollout(log_probs, log_probs, ONES, importance=Importance(level="sequence"), rejections=rules)
    assert correction.weights.tolist() == [[1.0] * 3]
    assert torch.equal(correction.mask, ONES)
    assert correction.metrics["rollout_corr/k3_kl"] == 0.0


def test_errors_say_what_was_expected() -> None:
    assert Bounds.parse(4.0) == Bounds(0.25, 4.0)
    for text in ("a_b", "1_2_3", 0.5):
        with pytest.raises(ValueError, match=r"expected bounds like 0.5_2.0, or one number above 1"):
            Bounds.parse(text)
    with pytest.raises(ValueError, match=r"0 <= low <= high, got 2.0 and 1.0"):
        Bounds.parse("2.0_1.0")
    with pytest.raises(ValueError, match=r"rejection token_k1 needs Bounds of the ratio, got 0.1"):
        Rejection(name="token_k1", limit=0.1)
    with pytest.raises(ValueError, match="rejection seq_max_k3 needs a number, the largest divergence"):
        Rejection(name="seq_max_k3", limit=Bounds(0, 1))
