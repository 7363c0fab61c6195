import math

import pytest
import torch
from tensordict import TensorDict

from algos.config import ActorConfig, PolicyLossConfig
from algos.policy_loss import PolicyLoss
from algos.rollout_correction import Importance
from hybrid.batch import loss_mask, make_batch, select
from hybrid.totals import Totals

LENGTHS = [3, 1, 2, 4]


@pytest.fixture
def batch() -> TensorDict:
    made = make_batch(
        prompts=[[1, 2]] * 4,
        responses=[list(range(5, 5 + length)) for length in LENGTHS],
        log_probs=[[-1.5] * length for length in LENGTHS],
        group_ids=[0, 0, 1, 1],
        truncated=[False] * 4,
        version=1,
    )
    torch.manual_seed(0)
    made["advantages"] = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].expand(4, 4).contiguous()
    made["old_log_probs"] = -1.5 + 0.3 * torch.randn(4, 4)
    made["ref_log_probs"] = -1.5 + 0.3 * torch.randn(4, 4)
    made["ref_known"] = torch.tensor([True, False, False, True])
    return made


def log_probs_of(batch: TensorDict) -> torch.Tensor:
    torch.manual_seed(1)
    return (-1.5 + 0.3 * torch.randn(4, 4)).requires_grad_()


def config(loss_mode: str = "vanilla", **keys: object) -> ActorConfig:
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "loss_scale_factor": 4.0}
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode), **{**clip, **keys})


def value_and_gradient(
    loss: PolicyLoss, batch: TensorDict, splits: list[list[int]]
) -> tuple[dict[str, float], torch.Tensor]:
    """Sum losses and metrics over micro-batches with the whole batch's totals."""
    log_probs, totals, found = log_probs_of(batch), Totals.of(loss_mask(batch)), {}
    for rows in splits:
        part = select(batch, rows)
        width = part["response_ids"].shape[1]
        share, metrics = loss(log_probs[rows, :width], torch.full((len(rows), width), 0.7), part, totals)
        share.backward()
        for name, value in metrics.items():
            found[name] = found.get(name, 0.0) + float(value)
    return found, log_probs.grad


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo", "gpg"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_loss_metrics_and_gradient_do_not_depend_on_micro_batches(
    batch: TensorDict, mode: str, aggregation: str, on_policy: bool
) -> None:
    keys = {"loss_agg_mode": aggregation, "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
    loss = PolicyLoss(actor=config(mode, **keys), on_policy=on_policy, num_ref_tokens=7)
    whole, gradient = value_and_gradient(loss, batch, [[0, 1, 2, 3]])
    parts, split_gradient = value_and_gradient(loss, batch, [[3, 0], [1], [2]])
    assert parts == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(split_gradient, gradient)
    assert float(gradient.abs().sum()) > 0


def test_on_policy_the_ratio_is_one_and_the_gradient_is_the_advantage(batch: TensorDict) -> None:
    metrics, gradient = value_and_gradient(PolicyLoss(actor=config(), on_policy=True), batch, [[0, 1, 2, 3]])
    mask = loss_mask(batch)
    torch.testing.assert_close(gradient, torch.where(mask, -batch["advantages"] / 10, 0.0))
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["entropy/mean"] == pytest.approx(0.7)
    assert metrics["kl/old"] > 0
    assert "kl/mean" not in metrics


def test_unscored_samples_change_neither_loss_nor_gradient_of_the_others(batch: TensorDict) -> None:
    keys = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
    loss = PolicyLoss(actor=config(**keys), on_policy=False)
    batch["loss_mask"] = loss_mask(batch) & torch.tensor([True, True, True, False])[:, None]
    with_it, gradient = value_and_gradient(loss, batch, [[0, 1, 2, 3]])
    without = select(batch, [0, 1, 2])
    total = Totals.of(loss_mask(without))
    log_probs = log_probs_of(batch)
    share, metrics = loss(log_probs[:3, :3], torch.full((3, 3), 0.7), without, total)
    share.backward()
    torch.testing.assert_close(gradient, log_probs.grad)
    assert float(metrics["actor/loss"]) == pytest.approx(with_it["actor/loss"], abs=1e-6)


def test_kl_to_the_reference_is_the_token_mean_over_the_samples_that_it_scored(batch: TensorDict) -> None:
    loss = PolicyLoss(actor=config(), on_policy=True, num_ref_tokens=7)
    metrics, _ = value_and_gradient(loss, batch, [[0, 1], [2, 3]])
    policy, reference = log_probs_of(batch).detach(), batch["ref_log_probs"]
    x = torch.cat([(policy - reference)[0, :3], (policy - reference)[3, :4]]).double()
    assert metrics["kl/mean"] == pytest.approx(float((torch.exp(-x) + x - 1).mean()), rel=1e-4)


def test_entropy_bonus_and_kl_loss_enter_with_their_weights(batch: TensorDict) -> None:
    keys = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k1", "entropy_coeff": 0.25}
    metrics, _ = value_and_gradient(PolicyLoss(actor=config(**keys), on_policy=True), batch, [[0, 1, 2, 3]])
    mask = loss_mask(batch)
    k1 = float((log_probs_of(batch).detach() - batch["ref_log_probs"])[mask].mean())
    assert metrics["actor/kl_loss"] == pytest.approx(k1, abs=1e-6)
    assert metrics["actor/loss"] == pytest.approx(metrics["actor/pg_loss"] - 0.25 * 0.7 + 0.5 * k1, abs=1e-6)


@pytest.mark.parametrize(
    ("level", "weights"), [("token", [0.5, 2.0, 1.25]), ("sequence", [1.25, 1.25, 1.25])], ids=["token", "sequence"]
)
@pytest.mark.parametrize("mode", ["vanilla", "cispo", "gpg"])
def test_importance_weights_correct_for_the_gap_between_trainer_and_generation(
    batch: TensorDict, mode: str, level: str, weights: list[float]
) -> None:
    ratios = torch.tensor([0.5, 2.0, 1.25]).log()
    batch["rollout_log_probs"] = log_probs_of(batch).detach()
    batch["rollout_log_probs"][0, :3] -= ratios
    importance = Importance(level=level, limit=4.0)
    loss = PolicyLoss(actor=config(mode), on_policy=True, importance=importance)
    metrics, gradient = value_and_gradient(loss, batch, [[0, 2], [1, 3]])
    torch.testing.assert_close(gradient[0, :3], -torch.tensor(weights) / 10)
    torch.testing.assert_close(gradient[3], torch.full((4,), 0.05))
    assert metrics["actor/rollout_is_mean"] == pytest.approx((sum(weights) + 7) / 10)


def test_importance_weights_are_cut_at_their_limit(batch: TensorDict) -> None:
    batch["rollout_log_probs"] = log_probs_of(batch).detach() - 5.0
    loss = PolicyLoss(actor=config(), on_policy=True, importance=Importance(level="token", limit=2.0))
    _, gradient = value_and_gradient(loss, batch, [[0, 1, 2, 3]])
    torch.testing.assert_close(gradient[0, :3], torch.full((3,), -2.0 / 10))


def test_dual_clip_bounds_the_loss_of_a_token_that_became_far_likelier(batch: TensorDict) -> None:
    batch["advantages"] = torch.full((4, 4), -1.0)
    batch["old_log_probs"] = log_probs_of(batch).detach() - math.log(100.0)
    metrics, gradient = value_and_gradient(PolicyLoss(actor=config(), on_policy=False), batch, [[0, 1, 2, 3]])
    assert metrics["actor/loss"] == pytest.approx(3.0)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1.0)
    assert float(gradient.abs().sum()) == 0.0
