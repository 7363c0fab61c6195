import pytest
import torch
from transformers import LlamaConfig

from algos.weights import WeightPublisher
from hybrid.engines.rollout_torch import TorchRolloutEngine
from hybrid.engines.train_torch import OptimConfig, TorchTrainEngine
from reshard.errors import LayoutError, PlanError

CONFIG = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def label(tensors: dict[str, torch.Tensor], first: int) -> None:
    """Every element gets a value of its own within its tensor, exact in bf16."""
    for offset, tensor in enumerate(tensors.values()):
        numbers = torch.arange(tensor.numel()) + first + 31 * offset
        tensor.copy_((numbers % 251 - 125).view(tensor.shape).float() / 64)


@pytest.mark.parametrize("tied", [True, False])
def test_two_updates_arrive_in_place_element_for_element(tied: bool) -> None:
    config = LlamaConfig(**CONFIG, **HEADS, tie_word_embeddings=tied)
    train = TorchTrainEngine(config, optim=OptimConfig(lr=1e-3))
    rollout = TorchRolloutEngine(config)
    places = {name: tensor.data_ptr() for name, tensor in rollout.tensors().items()}
    weights = WeightPublisher(train.tensors(), rollout.tensors())
    for version, first in ((1, 0), (2, 100)):
        label(train.tensors(), first)
        weights.publish(version)
        assert weights.version == version
        for name, tensor in train.tensors().items():
            assert torch.equal(rollout.tensors()[name], tensor.bfloat16()), name
        assert weights.verify() == sum(tensor.numel() * 2 for tensor in rollout.tensors().values())
        weights.begin_training()
    assert {name: tensor.data_ptr() for name, tensor in rollout.tensors().items()} == places
    assert ("lm_head.weight" in places) != tied


def test_publishing_the_same_version_again_moves_nothing() -> None:
    source, destination = {"w": torch.zeros(4)}, {"w": torch.zeros(4, dtype=torch.bfloat16)}
    weights = WeightPublisher(source, destination)
    weights.publish(3)
    source["w"].fill_(1.0)
    weights.publish(3)
    assert float(destination["w"].sum()) == 0.0
    weights.publish(4)
    assert float(destination["w"].sum()) == 4.0
    assert weights.stats.num_transitions == 2


def test_sides_that_hold_different_models_are_refused() -> None:
    destination = {"w": torch.zeros(4), "extra": torch.zeros(2)}
    with pytest.raises((LayoutError, PlanError), match="extra"):
        WeightPublisher({"w": torch.zeros(4)}, destination)
    with pytest.raises((LayoutError, PlanError), match="w"):
        WeightPublisher({"w": torch.zeros(5)}, {"w": torch.zeros(4)})
