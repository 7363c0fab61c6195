"""vLLM's rules by arithmetic: latent attention, experts by rank, shared experts, stages, padding; labelled."""

import pytest

from reshard import Layout, Mesh, ModelSpec, Rules, make_plan
from reshard.errors import LayoutError
from reshard.parallel_layout import stage_of_layers
from reshard.plan_oracle import check_plan

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 4,
    "intermediate_size": 8,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 7,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 2,
    "v_head_dim": 3,
    "vocab_size": 300,
    "dtype": "float32",
}
VLLM = Rules(style="vllm")


def at(layout: Layout, name: str) -> dict[int, tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
    """Per rank: storage, byte offset, start and stop of the one box of a tensor that it holds."""
    holders = layout.holders(name)
    assert len({h.rank for h in holders}) == len(holders)
    return {h.rank: (h.address.storage, h.address.offset_bytes, h.region.start, h.region.stop) for h in holders}


def test_both_down_projections_of_latent_attention_share_one_replicated_parameter():
    layout = Layout.from_parallel(ModelSpec.from_config(CONFIG), Mesh({"tp": 2}), rules=VLLM)
    prefix = "model.layers.0.self_attn"
    fused = f"{prefix}.fused_qkv_a_proj.weight"
    assert at(layout, f"{prefix}.q_a_proj.weight") == dict.fromkeys(range(2), (fused, 0, (0, 0), (6, 4)))
    expected = dict.fromkeys(range(2), (fused, 6 * 4 * 4, (0, 0), (7, 4)))
    assert at(layout, f"{prefix}.kv_a_proj_with_mqa.weight") == expected
    assert at(layout, f"{prefix}.q_b_proj.weight")[1] == (f"{prefix}.q_b_proj.weight", 0, (8, 0), (16, 6))
    assert at(layout, f"{prefix}.kv_b_proj.weight")[1][2:] == ((10, 0), (20, 5)), "two heads of 2 + 3 rows"


def test_without_a_query_latent_nothing_is_fused():
    model = ModelSpec.from_config(CONFIG | {"model_type": "deepseek_v2", "q_lora_rank": None})
    layout = Layout.from_parallel(model, Mesh({"tp": 2}), rules=VLLM)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert at(layout, name) == dict.fromkeys(range(2), (name, 0, (0, 0), (7, 4)))
    assert not any("gate.e_score" in name for name in layout.specs)


def test_latent_attention_is_cut_by_whole_heads():
    message = r"q_b_proj\.weight: dim 0 of size 16, 4 heads of 4 rows, does not divide .* tp=8; sizes that do: 1, 2, 4$"
    for style in ("vllm", "megatron"):
        with pytest.raises(LayoutError, match=message):
            Layout.from_parallel(
                ModelSpec.from_config(CONFIG | {"vocab_size": 1024}), Mesh({"tp": 8}), rules=Rules(style=style)
            )


def test_expert_parallel_ranks_may_have_unlike_numbers_of_experts():
    """Seven experts over four ranks: 2, 2, 2 and 1, numbered from 0 in each stack of whole experts."""
    model = ModelSpec.from_config(CONFIG)
    layout = Layout.from_parallel(model, Mesh({"tp": 4}), rules=VLLM, expert_mesh=Mesh({"ep": 4}))
    block = "model.layers.1.mlp"
    size = 4 * 4 * 4
    for expert in range(7):
        place = {expert // 2: (f"{block}.experts.routed_experts.w13_weight", expert % 2 * 2 * size, (0, 0), (4, 4))}
        assert at(layout, f"{block}.experts.{expert}.gate_proj.weight") == place
        assert at(layout, f"{block}.experts.{expert}.up_proj.weight")[expert // 2][1] == (expert % 2 * 2 + 1) * size
        down = at(layout, f"{block}.experts.{expert}.down_proj.weight")
        assert down == {expert // 2: (f"{block}.experts.routed_experts.w2_weight", expert % 2 * size, (0, 0), (4, 4))}
    with pytest.raises(LayoutError, match=r"number of experts per layer, 7, does not divide among axis ep=4; .*: 1, 7"):
        Layout.from_parallel(model, Mesh({"tp": 4}), rules=Rules(style="megatron"), expert_mesh=Mesh({"ep": 4}))


@pytest.mark.parametrize("whole", [False, True])
def test_shared_experts_stay_beside_the_routed_ones(whole):
    """64 routed experts and a shared one, tp 4 and ep 4: the shared one has a parameter of its own, cut or whole."""
    fields = CONFIG | {"n_routed_experts": 64, "n_shared_experts": 1, "intermediate_size": 16}
    model = ModelSpec.from_config(fields)
    mesh, experts = Mesh({"tp": 4}), Mesh({"ep": 4})
    rules = Rules(style="vllm", whole_shared_experts=whole)
    engine = Layout.from_parallel(model, mesh, rules=rules, expert_mesh=experts)
    block = "model.layers.1.mlp"
    storage = f"{block}.shared_experts.gate_up_proj.weight"
    rows = 4 if whole else 1
    spans = [(0, 4)] * 4 if whole else [(rank, rank + 1) for rank in range(4)]
    up = at(engine, f"{block}.shared_experts.up_proj.weight")
    assert up == {r: (storage, rows * 4 * 4, (a, 0), (b, 4)) for r, (a, b) in enumerate(spans)}
    down = at(engine, f"{block}.shared_experts.down_proj.weight")
    assert [(start[1], stop[1]) for _, _, start, stop in down.values()] == spans
    stacks = [h for h in engine.holdings(3) if h.address.storage.endswith(".w13_weight")]
    assert {h.region.name.split(".")[5] for h in stacks} == {str(expert) for expert in range(48, 64)}
    assert max(h.address.offset_bytes for h in stacks) == (16 * 2 - 1) * 4 * 4 * 4, "no room for a shared expert in it"
    check_plan(make_plan(Layout.from_parallel(model, Mesh({"ep": 4}), rules=Rules(style="megatron")), engine))


def test_left_over_layers_go_to_the_last_stages_but_one():
    counts = {pp: [stage_of_layers(30, pp, VLLM).count(stage) for stage in range(pp)] for pp in (2, 4, 7)}
    assert counts == {2: [15, 15], 4: [7, 8, 8, 7], 7: [4, 4, 4, 4, 5, 5, 4]}
    assert stage_of_layers(7, 2, VLLM) == [0] * 4 + [1] * 3
    assert stage_of_layers(7, 4, VLLM) == [0, 0, 1, 1, 2, 2, 3]
    assert stage_of_layers(3, 2, Rules(style="vllm", stages=[1, 2])) == [0, 1, 1]


def test_a_padded_vocabulary_must_divide():
    model = ModelSpec.from_config(CONFIG | {"num_attention_heads": 3, "num_key_value_heads": 3})
    with pytest.raises(LayoutError, match=r"embed_tokens\.weight: dim 0 of size 300, padded to 320, does not .* tp=3;"):
        Layout.from_parallel(model, Mesh({"tp": 3}), rules=VLLM)


def test_expert_cuts_over_several_engines_are_said_by_the_expert_mesh():
    """vLLM's own data parallelism without expert parallelism cuts each expert over all its ranks."""
    model = ModelSpec.from_config(CONFIG)
    mesh = Mesh({"dp": 2, "tp": 2})
    layout = Layout.from_parallel(model, mesh, rules=VLLM, expert_mesh=Mesh({"tp": 4}))
    gate = at(layout, "model.layers.1.mlp.experts.6.gate_proj.weight")
    assert [(start[0], stop[0]) for _, _, start, stop in gate.values()] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    check_plan(make_plan(Layout.from_parallel(model, mesh), layout))
