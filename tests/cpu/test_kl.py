"""KL estimators, the penalty in the reward, and the coefficient's controllers."""

import math
from collections.abc import Callable

import pytest
import torch

from algos.kl import (
    KL_ESTIMATORS,
    AdaptiveKL,
    FixedKL,
    kl_estimate,
    make_kl_controller,
    mean_kl,
    parse_kl_estimator,
    rewards_with_kl,
)

ALL_KINDS = [*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)]


def value_and_gradient(
    log_probs: torch.Tensor, reference: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = log_probs.clone().requires_grad_()
    value = kl_estimate(leaf, reference, kind=kind)
    value.sum().backward()
    return value.detach(), leaf.grad


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("k1", lambda x: x),
        ("abs", lambda x: x.abs()),
        ("k2", lambda x: x.square() / 2),
        ("k3", lambda x: (-x).exp() + x - 1),
        ("low_var_kl", lambda x: (-x).exp() + x - 1),
    ],
)
def test_value_and_gradient_of_each_estimator(kind: str, formula: Callable[[torch.Tensor], torch.Tensor]) -> None:
    log_ratio = torch.tensor([-2.0, -0.5, 0.3, 1.5])
    reference = torch.tensor([-1.0, -2.0, -3.0, -0.1])
    value, gradient = value_and_gradient(reference + log_ratio, reference, kind)
    leaf = log_ratio.clone().requires_grad_()
    expected = formula(leaf)
    expected.sum().backward()
    torch.testing.assert_close(value, expected.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, leaf.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("base", KL_ESTIMATORS)
def test_plus_has_the_value_of_the_base_and_the_gradient_of_k2(base: str) -> None:
    log_probs, reference = torch.tensor([-1.0, -2.0, -0.3]), torch.tensor([-1.5, -0.2, -0.4])
    value, gradient = value_and_gradient(log_probs, reference, f"{base}+")
    torch.testing.assert_close(value, value_and_gradient(log_probs, reference, base)[0])
    torch.testing.assert_close(gradient, value_and_gradient(log_probs, reference, "k2")[1])


def test_k3_mean_over_the_distribution_is_its_kl_and_plus_gives_its_gradient() -> None:
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.2, -0.5], dtype=torch.float64), dim=-1)
    log_p = torch.log_softmax(logits, dim=-1)
    exact = (log_p.exp() * (log_p - reference)).sum()
    weights = log_p.exp().detach()
    k3 = (weights * kl_estimate(log_p, reference, kind="k3")).sum()
    assert k3.item() == pytest.approx(exact.item(), abs=1e-6)
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    plus = (weights * kl_estimate(log_p, reference, kind="k3+")).sum()
    (gradient,) = torch.autograd.grad(plus, logits)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("difference", "dtype"), [(88, "float32"), (89, "float32"), (100, "float32"), (12, "float16")])
@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_g17_k3_is_clamped_before_exp(difference: float, dtype: str, kind: str) -> None:
    log_probs = torch.tensor([0.0], dtype=getattr(torch, dtype))
    value, gradient = value_and_gradient(log_probs - difference, log_probs, kind)
    assert value.tolist() == [10.0]
    assert gradient.tolist() == [0.0]


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("difference", [-1e4, -100.0, -20.0, 0.0, 20.0, 89.0, 1e4])
def test_g17_gradients_are_finite_for_every_estimator_and_size(kind: str, difference: float) -> None:
    value, gradient = value_and_gradient(torch.tensor([-1.0]) + difference, torch.tensor([-1.0]), kind)
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_masked_slots_give_zero_and_pass_no_gradient(kind: str) -> None:
    log_probs = torch.tensor([[-1.0, math.nan, -math.inf]], requires_grad=True)
    reference = torch.tensor([[-1.5, 1.0, -math.inf]])
    mask = torch.tensor([[True, False, False]])
    value = kl_estimate(log_probs, reference, kind=kind, mask=mask)
    value.sum().backward()
    assert value[0, 1:].tolist() == [0.0, 0.0]
    assert log_probs.grad[0, 1:].tolist() == [0.0, 0.0]
    assert torch.isfinite(log_probs.grad).all()


def test_small_differences_keep_their_digits() -> None:
    reference = torch.zeros(1)
    value, _ = value_and_gradient(reference + 1e-3, reference, "k3")
    assert value.item() == pytest.approx(math.exp(-1e-3) + 1e-3 - 1, rel=1e-2)


def test_unknown_estimator_lists_the_names() -> None:
    for name in ("full", "k4", "k3++"):
        with pytest.raises(
            ValueError, match=f"unknown KL estimator '{name.replace('+', '[+]')}'; use one of k1, kl, abs"
        ):
            parse_kl_estimator(name)


def test_rewards_with_kl_subtract_the_penalty_on_valid_tokens() -> None:
    scores = torch.tensor([[0.0, 1.0, 7.0]])
    kl = torch.tensor([[0.5, 0.25, math.nan]], requires_grad=True)
    rewards = rewards_with_kl(scores, kl, torch.tensor([[True, True, False]]), coefficient=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 0.975, 0.0]]))
    assert not rewards.requires_grad


def test_mean_kl_is_a_mean_of_sequence_means_without_empty_sequences() -> None:
    kl = torch.tensor([[1.0, 3.0], [6.0, 99.0], [99.0, 99.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.bool)
    assert mean_kl(kl, mask) == pytest.approx((2.0 + 6.0) / 2)


def test_adaptive_controller_follows_its_formula_and_resumes() -> None:
    controller = AdaptiveKL(init_coefficient=1e-3, target=0.1, horizon=10_000)
    controller.update(current_kl=0.11, num_samples=1000)
    assert controller.coefficient == pytest.approx(1e-3 * (1 + 0.1 * 0.1))
    before = controller.coefficient
    controller.update(current_kl=50.0, num_samples=1000)
    assert controller.coefficient == pytest.approx(before * 1.02)
    controller.update(current_kl=0.0, num_samples=1000)
    assert controller.coefficient == pytest.approx(before * 1.02 * 0.98)
    other = AdaptiveKL()
    other.load_state_dict(controller.state_dict())
    assert other.coefficient == controller.coefficient


def test_fixed_controller_stays_and_unknown_kinds_are_named() -> None:
    controller = make_kl_controller("fixed", coefficient=0.02)
    controller.update(current_kl=9.0, num_samples=10)
    assert controller == FixedKL(0.02)
    assert isinstance(make_kl_controller("adaptive"), AdaptiveKL)
    with pytest.raises(ValueError, match="unknown KL controller 'linear'; use fixed or adaptive"):
        make_kl_controller("linear")
    with pytest.raises(ValueError, match="target > 0 and horizon > 0, got 0 and 1"):
        AdaptiveKL(target=0, horizon=1)
