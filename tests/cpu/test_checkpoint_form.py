"""Trained tensors that hold several of a checkpoint's: exact boxes, whole and in shards; and names without wrappers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from reshard import Address, Holding, Layout, Region, TensorSpec
from reshard.checkpoint_form import checkpoint_form
from reshard.errors import LayoutError
from reshard.names import canonical_name, canonical_names
from reshard.torch_layout import dtype_of
from reshard.verify import box_view

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, moe_intermediate_size=24, num_experts=6, vocab_size=60
    ),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, vocab_size=60),
}


def labelled(config):
    """A model whose elements all differ within a tensor, and its tensors as a checkpoint has them."""
    model = AutoModelForCausalLM.from_config(config)
    for offset, parameter in enumerate(model.parameters()):
        numbers = torch.arange(parameter.numel()).reshape(parameter.shape)
        parameter.data.copy_(numbers + 0.25 * offset)
    return model, revert_weight_conversion(model, model.state_dict())


def check(layout: Layout, tensors: dict[int, dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> int:
    """Every holding shows its box of the checkpoint's tensor; returns the number of elements that were compared."""
    compared = 0
    for rank in layout.ranks:
        for held in layout.holdings(rank):
            box = tuple(slice(a, b) for a, b in zip(held.region.start, held.region.stop, strict=True))
            seen = box_view(tensors[rank][held.address.storage], held.address, held.region.shape)
            assert torch.equal(seen, expected[held.region.name][box]), held
            compared += seen.numel()
    return compared


@pytest.mark.parametrize("kind", CONFIGS)
def test_stacked_experts_are_the_checkpoints_tensors_where_they_lie(kind):
    model, expected = labelled(CONFIGS[kind])
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    layout = checkpoint_form(model).apply(Layout.from_tensors(tensors, rank=0))
    assert layout.specs.keys() == expected.keys()
    assert check(layout, {0: tensors}, expected) == sum(t.numel() for t in expected.values())


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_of_stacked_experts_on_any_dim_and_uneven(dim):
    model, expected = labelled(CONFIGS["qwen3_moe"])
    form, ranks = checkpoint_form(model), 4
    specs, holdings, tensors = {}, [], {rank: {} for rank in range(ranks)}
    for name, parameter in model.named_parameters():
        specs[name] = TensorSpec(name, tuple(parameter.shape), dtype_of(parameter.dtype))
        cut = min(dim, parameter.dim() - 1)
        begin = 0
        for rank, part in enumerate(parameter.detach().chunk(ranks, cut)):
            part = part.clone(memory_format=torch.contiguous_format)
            start = [0] * parameter.dim()
            start[cut] = begin
            stop = [low + size for low, size in zip(start, part.shape, strict=True)]
            begin = stop[cut]
            tensors[rank][name] = part
            address = Address(name, 0, tuple(part.stride()), dtype_of(part.dtype))
            holdings.append(Holding(rank, Region(name, tuple(start), tuple(stop)), address))
    layout = form.apply(Layout.from_holdings(specs.values(), holdings, ranks=range(ranks)))
    assert check(layout, tensors, expected) == sum(t.numel() for t in expected.values())


def test_a_model_that_is_trained_as_it_is_saved_has_no_form_and_strange_tensors_are_named():
    assert checkpoint_form(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, vocab_size=60))) is None
    assert checkpoint_form(torch.nn.Linear(2, 2)) is None
    form = checkpoint_form(AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"]))
    with pytest.raises(LayoutError, match=r"none of the model's \(extra\)"):
        form.apply(Layout.from_tensors({"extra": torch.zeros(3)}, rank=0))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("module._orig_mod.model.norm.weight", "model.norm.weight"),
        (
            "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
        ),
        ("base_model.model.model.layers.1.q_proj.base_layer.weight", "model.layers.1.q_proj.weight"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("model.my_module.weight", "model.my_module.weight"),
    ],
)
def test_wrappers_leave_names(given, expected):
    assert canonical_name(given) == expected


def test_clashing_names_and_adapters_are_refused_and_replaced_originals_left_out():
    with pytest.raises(LayoutError, match="are both 'w'"):
        canonical_names(["module.w", "w"])
    with pytest.raises(LayoutError, match="1 adapter tensors are not merged"):
        canonical_names(["q.base_layer.weight", "q.lora_A.default.weight"])
    names = ["lm_head.original_module.weight", "lm_head.modules_to_save.default.weight"]
    assert canonical_names(names) == {names[1]: "lm_head.weight"}
