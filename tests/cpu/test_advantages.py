"""Advantages: known values, groups without spread, masks, and every estimator against a slow oracle."""

import math
import statistics
from collections.abc import Callable

import pytest
import torch

from algos.advantages import (
    AdvantageInputs,
    AdvantageOptions,
    Advantages,
    advantage_estimators,
    compute_advantages,
    discounted_returns,
    gae_advantages,
    gpg_advantages,
    grpo_advantages,
    grpo_passk_advantages,
    opo_advantages,
    register_advantage,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
    token_rewards_from_scores,
)
from algos.groups import group_stats

GROUP_FUNCTIONS = [
    grpo_advantages,
    rloo_advantages,
    opo_advantages,
    gpg_advantages,
    grpo_passk_advantages,
    reinforce_plus_plus_baseline_advantages,
]
GROUP_NAMES = ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"]


def full(num_samples: int, width: int = 2) -> torch.Tensor:
    return torch.ones(num_samples, width, dtype=torch.bool)


def one_group(num_samples: int) -> torch.Tensor:
    return torch.zeros(num_samples, dtype=torch.int64)


def first(advantages: torch.Tensor) -> list[float]:
    return advantages[:, 0].tolist()


def approx(values: list[float], abs: float = 1e-4) -> object:
    return pytest.approx(values, abs=abs)


def test_known_group_statistics_with_a_singleton() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0])
    stats = group_stats(scores, group_id=torch.tensor([0, 1, 0]), mask=full(3))
    assert stats.mean.tolist() == [2.0, 2.0, 2.0]
    assert stats.std.tolist() == [pytest.approx(math.sqrt(2)), 0.0, pytest.approx(math.sqrt(2))]
    assert stats.has_spread.tolist() == [True, False, True]


@pytest.mark.parametrize("function", GROUP_FUNCTIONS)
def test_g1_a_group_of_one_has_advantage_zero(function: Callable[..., torch.Tensor]) -> None:
    advantages = function(torch.tensor([5.0]), group_id=one_group(1), mask=full(1))
    assert advantages.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("function", GROUP_FUNCTIONS)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 7.0])
def test_g1_a_group_of_equal_scores_has_advantage_exactly_zero(
    function: Callable[..., torch.Tensor], value: float
) -> None:
    scores = torch.full((7,), value)
    assert function(scores, group_id=one_group(7), mask=full(7)).abs().max() == 0


def test_g3_leave_one_out_with_std_keeps_the_winner_unscaled() -> None:
    scores = torch.tensor([1, 0, 0, 0])
    advantages = rloo_advantages(scores, group_id=one_group(4), mask=full(4), norm_by_std=True)
    loser = (-1 / 3) / 0.57735
    assert first(advantages) == approx([1.0, loser, loser, loser])


def test_g3_with_two_samples_there_is_no_std_to_divide_by() -> None:
    advantages = rloo_advantages(torch.tensor([1.0, 0.0]), group_id=one_group(2), mask=full(2), norm_by_std=True)
    assert first(advantages) == [1.0, -1.0]


def test_g3_leave_one_out_std_equals_the_definition() -> None:
    scores = torch.tensor([0.3, 2.0, -1.0, 0.5, 0.3])
    advantages = rloo_advantages(scores, group_id=one_group(5), mask=full(5), norm_by_std=True)
    values = scores.tolist()
    expected = []
    for index, value in enumerate(values):
        others = values[:index] + values[index + 1 :]
        expected.append((value - statistics.mean(others)) / statistics.stdev(others))
    assert first(advantages) == approx(expected)


def test_g5_bf16_scores_are_compared_in_high_precision() -> None:
    scores = torch.tensor([1, 1, 1, 1.0078125], dtype=torch.bfloat16)
    advantages = grpo_advantages(scores, group_id=one_group(4), mask=full(4))
    assert advantages.dtype == torch.float32
    assert first(advantages) == approx([-0.5, -0.5, -0.5, 1.5], abs=1e-3)


@pytest.mark.parametrize("name", GROUP_NAMES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16])
def test_g5_integer_and_low_precision_scores_equal_fp32_scores(name: str, dtype: torch.dtype) -> None:
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    group_id = torch.tensor([0, 0, 0, 1, 1, 1])
    results = [
        compute_advantages(name, AdvantageInputs(mask=full(6), group_id=group_id, scores=s), AdvantageOptions())
        for s in (scores, scores.to(dtype))
    ]
    assert torch.equal(results[0].advantages, results[1].advantages)


def test_g6_an_unscored_sample_is_left_out_of_its_group() -> None:
    scores = torch.tensor([1.0, 0.0, 1.0, math.nan])
    scored = torch.tensor([True, True, True, False])
    advantages = grpo_advantages(scores, group_id=one_group(4), mask=full(4), scored=scored)
    assert first(advantages) == approx([0.577, -1.155, 0.577, 0.0], abs=1e-3)


def test_g6_with_one_scored_sample_left_the_group_is_zero_not_nan() -> None:
    scores = torch.tensor([1.0, math.nan, math.nan])
    scored = torch.tensor([True, False, False])
    for function in GROUP_FUNCTIONS:
        advantages = function(scores, group_id=one_group(3), mask=full(3), scored=scored)
        assert advantages.tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("name", sorted({*GROUP_NAMES, "reinforce_plus_plus", "remax", "gae"}))
def test_g6_every_estimator_gives_siblings_what_they_get_without_the_unscored(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    scored = torch.tensor([True, True, False, True, True, True])
    inputs = {
        "mask": mask,
        "group_id": torch.tensor([4, 4, 4, 9, 9, 9]),
        "scores": torch.tensor([1.0, 0.25, math.nan, 0.0, 1.0, 0.5]),
        "values": torch.randn(6, 3, generator=generator),
        "baseline_scores": torch.tensor([0.5, 0.5, math.nan, 0.25, 0.25, 0.25]),
    }
    options = AdvantageOptions(gamma=0.9, lam=0.8)
    whole = compute_advantages(name, AdvantageInputs(**inputs, scored=scored), options)
    kept = compute_advantages(name, AdvantageInputs(**{key: v[scored] for key, v in inputs.items()}), options)
    torch.testing.assert_close(whole.advantages[scored], kept.advantages)
    assert whole.advantages[~scored].abs().sum() == 0


def test_g8_an_empty_response_is_left_out_and_its_peer_is_not_judged_by_it() -> None:
    mask = torch.tensor([[0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    scores = torch.tensor([10.0, 0.0])
    for function in GROUP_FUNCTIONS:
        assert function(scores, group_id=one_group(2), mask=mask).tolist() == [[0.0] * 3] * 2
    assert token_rewards_from_scores(scores, mask).tolist() == [[0.0] * 3] * 2


def test_g10_the_value_of_a_padded_slot_does_not_reach_gae() -> None:
    mask = torch.tensor([[True, True, False]])
    advantages, _ = gae_advantages(
        torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 100.0]]), mask, gamma=1.0, lam=0.95, whiten=False
    )
    assert advantages[0].tolist() == approx([0.95, 1.0, 0.0])


def test_g12_estimators_survive_batches_with_no_and_with_one_valid_token() -> None:
    for num_valid in (0, 1):
        mask = torch.zeros(2, 3, dtype=torch.bool)
        mask[0, :num_valid] = True
        inputs = AdvantageInputs(
            mask=mask,
            group_id=one_group(2),
            scores=torch.tensor([3.0, 1.0]),
            values=torch.zeros(2, 3),
            baseline_scores=torch.zeros(2),
        )
        for name in advantage_estimators():
            result = compute_advantages(name, inputs, AdvantageOptions())
            assert torch.isfinite(result.advantages).all(), name
            if num_valid == 0:
                assert result.advantages.abs().sum() == 0
    kept = compute_advantages("reinforce_plus_plus", inputs, AdvantageOptions())
    assert kept.advantages[0, 0] == 3.0


def test_g20_rloo_centred_and_normalised_are_three_different_things() -> None:
    scores = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
    arguments = {"group_id": one_group(8), "mask": full(8)}
    rloo = first(rloo_advantages(scores, **arguments))
    centred = first(grpo_advantages(scores, **arguments, norm_by_std=False))
    normalised = first(grpo_advantages(scores, **arguments))
    assert (rloo[0], rloo[-1]) == approx((0.7143, -0.4286))
    assert (centred[0], centred[-1]) == approx((0.625, -0.375))
    assert (normalised[0], normalised[-1]) == approx((1.2076, -0.7246))


@pytest.mark.parametrize(("num_samples", "num_groups"), [(64, 5), (128, 8), (512, 10)])
def test_grpo_and_rloo_equal_a_loop_over_the_groups(num_samples: int, num_groups: int) -> None:
    generator = torch.Generator().manual_seed(num_samples)
    scores = torch.randn(num_samples, generator=generator)
    group_id = torch.randint(num_groups, (num_samples,), generator=generator)
    expected_grpo, expected_rloo = torch.zeros(num_samples), torch.zeros(num_samples)
    for group in group_id.unique():
        rows = torch.nonzero(group_id == group).flatten().tolist()
        values = [scores[row].item() for row in rows]
        for row, value in zip(rows, values, strict=True):
            if len(rows) == 1:
                continue
            mean, num = statistics.fmean(values), len(values)
            expected_grpo[row] = (value - mean) / (statistics.stdev(values) + 1e-6)
            expected_rloo[row] = value - (mean * num - value) / (num - 1)
    mask = full(num_samples)
    for function, expected in ((grpo_advantages, expected_grpo), (rloo_advantages, expected_rloo)):
        actual = function(scores, group_id=group_id, mask=mask)[:, 0]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_scores_of_low_variance_are_told_apart() -> None:
    scores = torch.tensor([1.0, 1.00001, 2.0, 2.00001], dtype=torch.float64)
    group_id = torch.tensor([0, 0, 1, 1])
    advantages = grpo_advantages(scores, group_id=group_id, mask=full(4))
    std = 1e-5 / math.sqrt(2)
    assert first(advantages) == approx([-5e-6 / (std + 1e-6), 5e-6 / (std + 1e-6)] * 2, abs=1e-3)
    assert first(rloo_advantages(scores, group_id=group_id, mask=full(4))) == approx([-1e-5, 1e-5] * 2, abs=1e-9)


def test_groups_need_not_be_adjacent_and_padding_gets_nothing() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    scores, group_id = torch.tensor([0.0, 5.0, 1.0, 9.0]), torch.tensor([7, -3, 7, -3])
    advantages = grpo_advantages(scores, group_id=group_id, mask=mask, norm_by_std=False)
    assert advantages.tolist() == [[-0.5, -0.5, 0.0], [-2.0, 0.0, 0.0], [0.5, 0.5, 0.5], [2.0, 2.0, 0.0]]


def test_opo_baseline_is_weighted_by_length() -> None:
    mask = torch.arange(4).unsqueeze(0) < torch.tensor([[1], [3]])
    advantages = opo_advantages(torch.tensor([1.0, 0.0]), group_id=one_group(2), mask=mask)
    assert first(advantages) == approx([0.75, -0.25])


def test_gpg_scales_by_the_share_of_nonzero_rewards() -> None:
    advantages = gpg_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), group_id=one_group(4), mask=full(4), f_norm=2.0)
    assert first(advantages) == approx([4 * 0.75 / 2, -4 * 0.25 / 2, -4 * 0.25 / 2, -4 * 0.25 / 2])


def test_passk_pays_only_the_single_best() -> None:
    scores = torch.tensor([1.0, 0.0, 0.5, 0.0])
    arguments = {"group_id": one_group(4), "mask": full(4)}
    assert first(grpo_passk_advantages(scores, **arguments, norm_by_std=False)) == [0.5, 0.0, 0.0, 0.0]
    std = statistics.stdev(scores.tolist())
    assert first(grpo_passk_advantages(scores, **arguments)) == approx([0.5 / std, 0.0, 0.0, 0.0])
    tie = grpo_passk_advantages(torch.tensor([1.0, 1.0, 0.0, 0.0]), **arguments)
    assert first(tie) == [0.0] * 4


def test_known_value_returns_step_over_observations_without_discount() -> None:
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 2.0]])
    mask = torch.tensor([[1, 1, 0, 0, 1]], dtype=torch.bool)
    assert discounted_returns(rewards, mask, gamma=0.5).tolist() == [[0.5, 1.0, 0.0, 0.0, 2.0]]


def test_known_value_gae_ignores_values_and_rewards_of_masked_tokens() -> None:
    rewards = torch.tensor([[0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]], dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, 11, generator=generator)
    other = torch.where(mask, values, torch.full_like(values, math.nan))
    runs = [gae_advantages(rewards, v, mask, gamma=0.9, lam=0.8) for v in (values, other)]
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1][mask], runs[1][1][mask])
    dense = gae_advantages(rewards[:, mask[0]], values[:, mask[0]], full(1, 5), gamma=0.9, lam=0.8)
    torch.testing.assert_close(runs[0][0][mask], dense[0][0])


def test_gae_with_lambda_one_is_return_minus_value_and_returns_are_not_whitened() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, -0.3, 0.4]])
    advantages, returns = gae_advantages(rewards, values, full(1, 3), gamma=0.5, lam=1.0)
    expected = discounted_returns(rewards, full(1, 3), gamma=0.5)
    torch.testing.assert_close(returns, expected)
    raw = expected - values
    torch.testing.assert_close(advantages, (raw - raw.mean()) / raw.std())


def test_reinforce_plus_plus_whitens_over_valid_tokens() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    rewards = token_rewards_from_scores(torch.tensor([1.0, 3.0]), mask)
    advantages, returns = reinforce_plus_plus_advantages(rewards, mask)
    assert returns.tolist() == [[1.0, 1.0, 0.0], [3.0, 3.0, 3.0]]
    kept = returns[mask]
    torch.testing.assert_close(advantages[mask], (kept - kept.mean()) / kept.std())
    assert advantages[~mask].tolist() == [0.0]


def test_remax_subtracts_the_greedy_score() -> None:
    inputs = AdvantageInputs(
        mask=torch.tensor([[True, True, False]]),
        group_id=one_group(1),
        token_rewards=torch.tensor([[-0.1, 1.0, 5.0]]),
        baseline_scores=torch.tensor([0.25]),
    )
    result = compute_advantages("remax", inputs, AdvantageOptions())
    torch.testing.assert_close(result.advantages, torch.tensor([[0.65, 0.75, 0.0]]))


def test_a_score_stands_on_the_last_valid_token() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    rewards = token_rewards_from_scores(torch.tensor([1, 2, 3]), mask)
    assert rewards.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
    unscored = token_rewards_from_scores(torch.tensor([1.0, math.nan, 3.0]), mask, scored=torch.tensor([1, 0, 1]) > 0)
    assert unscored[1].tolist() == [0.0, 0.0, 0.0]


def test_token_rewards_are_summed_over_valid_tokens_for_group_estimators() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    rewards = torch.tensor([[0.5, 0.5, 9.0], [0.0, math.nan, 9.0]])
    inputs = AdvantageInputs(mask=mask, group_id=one_group(2), token_rewards=rewards)
    result = compute_advantages("rloo", inputs, AdvantageOptions())
    assert result.advantages.tolist() == [[1.0, 1.0, 0.0], [-1.0, 0.0, 0.0]]


def test_dr_grpo_is_the_flag() -> None:
    inputs = AdvantageInputs(mask=full(2), group_id=one_group(2), scores=torch.tensor([1.0, 0.0]))
    result = compute_advantages("grpo", inputs, AdvantageOptions(norm_by_std=False))
    assert first(result.advantages) == [0.5, -0.5]


def test_registry_has_the_names_and_takes_new_ones() -> None:
    assert {*GROUP_NAMES, "reinforce_plus_plus", "remax", "gae"} <= set(advantage_estimators())

    @register_advantage("test_only_zero")
    def zero(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
        return Advantages(torch.zeros(inputs.mask.shape), torch.zeros(inputs.mask.shape))

    inputs = AdvantageInputs(mask=full(1), group_id=one_group(1), scores=torch.ones(1))
    assert compute_advantages("test_only_zero", inputs, AdvantageOptions()).advantages.sum() == 0
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        register_advantage("grpo")(zero)


def test_errors_say_what_to_do() -> None:
    scores, mask = torch.tensor([1.0, math.inf]), full(2)
    with pytest.raises(
        ValueError, match=r"scores must be finite, got \[inf\] in rows \[1\]; mark such samples unscored"
    ):
        grpo_advantages(scores, group_id=one_group(2), mask=mask)
    with pytest.raises(ValueError, match=r"expected scores \[B\], group_id \[B\] and mask \[B, R\], got \(3,\)"):
        grpo_advantages(torch.ones(3), group_id=one_group(2), mask=mask)
    inputs = AdvantageInputs(mask=mask, group_id=one_group(2), scores=torch.ones(2))
    with pytest.raises(ValueError, match="unknown advantage estimator 'grp'; use one of gae, gpg, grpo"):
        compute_advantages("grp", inputs, AdvantageOptions())
    for name, lack in (("gae", "values"), ("remax", "baseline_scores")):
        with pytest.raises(ValueError, match=f"{name} needs {lack}"):
            compute_advantages(name, inputs, AdvantageOptions())
    with pytest.raises(ValueError, match="exactly one of scores"):
        AdvantageInputs(mask=mask, group_id=one_group(2))
