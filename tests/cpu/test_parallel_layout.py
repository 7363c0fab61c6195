"""Layouts by arithmetic: Megatron's and vLLM's fused storages, labelled, against values known from elsewhere."""

import numpy as np
import pytest

from reshard import DType, Layout, Mesh, ModelSpec, Region, Rules, TensorSpec, make_plan
from reshard.errors import LayoutError
from reshard.parallel_cuts import padded_vocab
from reshard.parallel_layout import stage_of_layers
from reshard.plan_oracle import byte_offsets, check_plan, elements
from reshard.spec import ModelTensor, bundled_names

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 10,
    "dtype": "float32",
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "moe_intermediate_size": 4,
    "attention_bias": True,
}
# Published numbers of parameters, multi-token prediction left out.
PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma3-1b": 999_885_952,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
}


def rows_in_storage(layout: Layout, rank: int, storage: str) -> dict[int, tuple[str, int]]:
    """Row of a storage -> (tensor, its row), from the addresses alone; rows are as wide as the tensors."""
    found = {}
    for holding in layout.holdings(rank):
        if holding.address.storage == storage:
            shape = layout.specs[holding.region.name].shape
            width = int(np.prod(shape[1:])) * holding.address.dtype.itemsize
            flat = elements(holding.region, shape) * holding.address.dtype.itemsize
            for element, offset in zip(
                flat.tolist(), byte_offsets(holding.region, holding.address).tolist(), strict=True
            ):
                found[offset // width] = (holding.region.name.split(".")[-2], element // width)
    return found


def attention(heads: int, kv_heads: int, head_dim: int, hidden: int = 1) -> ModelSpec:
    config = LLAMA | {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "num_hidden_layers": 1,
    }
    model = ModelSpec.from_config(config)
    kept = tuple(t for t in model.tensors if t.cut in ("query", "key", "value"))
    return ModelSpec("attention", "made up", 1, heads, kv_heads, 1, kept, {})


def test_megatron_interleaves_queries_keys_and_values_by_group():
    """Four query heads, two key/value heads of two rows: q0 q1 k0 v0 q2 q3 k1 v1."""
    layout = Layout.from_parallel(attention(4, 2, 2), Mesh({"tp": 1}), rules=Rules(style="megatron"))
    fused = rows_in_storage(layout, 0, "model.layers.0.self_attn.linear_qkv.weight")
    heads = [(name[0], row // 2) for _, (name, row) in sorted(fused.items())]
    assert heads[::2] == [("q", 0), ("q", 1), ("k", 0), ("v", 0), ("q", 2), ("q", 3), ("k", 1), ("v", 1)]
    halves = Layout.from_parallel(attention(4, 2, 2), Mesh({"tp": 2}), rules=Rules(style="megatron"))
    second = rows_in_storage(halves, 1, "model.layers.0.self_attn.linear_qkv.weight")
    assert [second[row] for row in range(8)] == [fused[row] for row in range(8, 16)]
    check_plan(make_plan(halves, Layout.from_parallel(attention(4, 2, 2), Mesh({"tp": 1}))))


def test_megatron_cuts_through_heads_when_there_are_fewer_groups_than_ranks():
    """64 query heads and 2 key/value heads over 8 ranks: 8.5 heads each, four heads are cut in half."""
    model = attention(64, 2, 2)
    layout = Layout.from_parallel(model, Mesh({"tp": 8}), rules=Rules(style="megatron"))
    owned = [rows_in_storage(layout, rank, "model.layers.0.self_attn.linear_qkv.weight") for rank in range(8)]
    assert [len(rows) for rows in owned] == [17] * 8
    with_kv = {
        rank: {(name, row // 2) for name, row in rows.values() if name != "q_proj"} for rank, rows in enumerate(owned)
    }
    assert {rank: kv for rank, kv in with_kv.items() if kv} == {
        3: {("k_proj", 0), ("v_proj", 0)},
        7: {("k_proj", 1), ("v_proj", 1)},
    }
    holders: dict[int, set[int]] = {}
    for rank, rows in enumerate(owned):
        for name, row in rows.values():
            if name == "q_proj":
                holders.setdefault(row // 2, set()).add(rank)
    assert [head for head, ranks in sorted(holders.items()) if len(ranks) == 2] == [8, 25, 40, 57]
    for gen_tp in (1, 8):
        engine = Layout.from_parallel(model, Mesh({"tp": gen_tp}), rules=Rules(style="vllm"))
        check_plan(make_plan(layout, engine))


def test_vllm_replicates_key_value_heads_and_concatenates_per_rank():
    layout = Layout.from_parallel(attention(8, 2, 1), Mesh({"tp": 4}), rules=Rules(style="vllm"))
    storage = "model.layers.0.self_attn.qkv_proj.weight"
    fused = [rows_in_storage(layout, rank, storage) for rank in range(4)]
    assert [fused[1][row] for row in range(4)] == [("q_proj", 2), ("q_proj", 3), ("k_proj", 0), ("v_proj", 0)]
    assert [fused[rank][2][1] for rank in range(4)] == [0, 0, 1, 1]
    with pytest.raises(LayoutError, match="8 query and 2 key/value heads don't divide among axis tp=3"):
        Layout.from_parallel(attention(8, 2, 1), Mesh({"tp": 3}), rules=Rules(style="vllm"))


def test_k_norm_of_whole_heads_follows_the_head_map():
    """A norm with an entry per head dim and key/value head: 8 heads over 16 ranks, replica r holds head r * 8 // 16."""
    tensor = ModelTensor(TensorSpec("l.0.a.k_norm.weight", (8 * 4,), DType.FLOAT32), "key", layer=0, head_dim=4)
    model = ModelSpec("norm", "made up", 1, 16, 8, 1, (tensor,), {})
    layout = Layout.from_parallel(model, Mesh({"tp": 16}), rules=Rules(style="vllm"))
    held = {h.rank: h.region for h in layout.holders(tensor.spec.name)}
    assert {rank: region.start[0] // 4 for rank, region in held.items()} == {rank: rank * 8 // 16 for rank in range(16)}
    assert {region.numel for region in held.values()} == {4}


@pytest.mark.parametrize(
    ("vocab", "sizes"),
    [
        (151936, (151936, 152064, 152064, 152576)),
        (32001, (32128, 32256, 32256, 32768)),
        (50257, (50304, 50432, 50688, 51200)),
    ],
)
def test_megatron_pads_the_vocabulary(vocab, sizes):
    for tp, size in zip((1, 2, 4, 8), sizes, strict=True):
        assert padded_vocab(vocab, 128 * tp) == size


def test_padding_rows_are_nobodys_and_the_engine_gets_the_configured_vocabulary():
    model = ModelSpec.from_config(LLAMA | {"vocab_size": 300})
    train = Layout.from_parallel(model, Mesh({"tp": 2}), rules=Rules(style="megatron"))
    spans = [(h.region.start[0], h.region.stop[0]) for h in train.holders("lm_head.weight")]
    assert spans == [(0, 256), (256, 300)]
    engine = Layout.from_parallel(model, Mesh({"tp": 2}), rules=Rules(style="vllm"))
    assert [h.region.stop[0] for h in engine.holders("lm_head.weight")] == [160, 300]
    check_plan(make_plan(train, engine))


def test_uneven_and_virtual_stages_keep_global_layer_numbers():
    assert stage_of_layers(48, 2, Rules(stages=[25, 23])) == [0] * 25 + [1] * 23
    assert stage_of_layers(8, 2, Rules(virtual=2)) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert stage_of_layers(7, 2, Rules()) == [0] * 4 + [1] * 3
    with pytest.raises(LayoutError, match=r"stages=\[3, 3\] describes 2 chunks of 6 layers: expected .* 2 chunks of 7"):
        stage_of_layers(7, 2, Rules(stages=[3, 3]))
    model = ModelSpec.from_config(LLAMA | {"num_hidden_layers": 5, "tie_word_embeddings": True, "vocab_size": 300})
    train = Layout.from_parallel(model, Mesh({"pp": 2, "tp": 2}), rules=Rules(style="megatron", stages=[3, 2]))
    layers = {h.region.name.split(".")[2] for h in train.holdings(0) if ".layers." in h.region.name}
    assert layers == {"0", "1", "2"}
    assert {h.rank for h in train.holders("model.embed_tokens.weight")} == {0, 1, 2, 3}, (
        "a tied head lives on the last stage"
    )
    check_plan(make_plan(train, Layout.from_parallel(model, Mesh({"tp": 2}), rules=Rules(style="vllm"))))


def test_experts_are_dealt_out_by_global_number():
    """Eight experts, EP 4: local expert 1 of EP rank 3 is expert 7; the engine has tensor parallelism and no EP."""
    model = ModelSpec.from_config(MOE)
    train = Layout.from_parallel(model, Mesh({"ep": 4}), rules=Rules(style="megatron"))
    engine = Layout.from_parallel(model, Mesh({"tp": 2}), rules=Rules(style="vllm"))
    held = {h.rank for h in train.holders("model.layers.0.mlp.experts.7.up_proj.weight")}
    assert held == {3}
    (storage,) = {h.address.storage for h in train.holders("model.layers.0.mlp.experts.7.up_proj.weight")}
    assert storage == "model.layers.0.mlp.experts.1.linear_fc1.weight"
    offsets = [
        h.address.offset_bytes
        for e in range(8)
        for h in engine.holders(f"model.layers.0.mlp.experts.{e}.up_proj.weight")
    ]
    assert offsets[::2] == [4 * (e * 2 * 2 * 4 + 2 * 4) for e in range(8)], "w13 stacks gate and up of each expert"
    check_plan(make_plan(train, engine))
    check_plan(make_plan(engine, train))


def test_separate_expert_mesh_over_the_same_ranks():
    model = ModelSpec.from_config(MOE)
    mesh, experts = Mesh({"pp": 2, "dp": 2, "tp": 2}), Mesh({"pp": 2, "ep": 4})
    train = Layout.from_parallel(model, mesh, rules=Rules(style="megatron"), expert_mesh=experts)
    assert {h.rank for h in train.holders("model.layers.1.mlp.experts.0.up_proj.weight")} == {4}
    check_plan(make_plan(train, Layout.from_parallel(model, Mesh({"tp": 4}), rules=Rules(style="vllm"))))
    with pytest.raises(LayoutError, match=r"experts per layer, 8, does not divide among axis ep=3; .* do: 1, 2, 4, 8"):
        Layout.from_parallel(model, Mesh({"ep": 3}))
    with pytest.raises(
        LayoutError, match=r"have different ranks: left over are \[4, 5, 6, 7\], which only the mesh has"
    ):
        Layout.from_parallel(model, mesh, expert_mesh=Mesh({"pp": 2, "ep": 2}))
    with pytest.raises(LayoutError, match=r"puts ranks \[1, 3, 4, 6\] on other stages"):
        Layout.from_parallel(model, mesh, expert_mesh=Mesh({"ep": 4, "pp": 2}))


def test_fsdp_cuts_ceil_chunks_of_every_shard():
    model = ModelSpec.from_config(LLAMA | {"intermediate_size": 10})
    layout = Layout.from_parallel(model, Mesh({"dp": 3, "tp": 2}), rules=Rules(fsdp="dp"))
    spans = {h.rank: (h.region.start[0], h.region.stop[0]) for h in layout.holders("model.layers.0.mlp.up_proj.weight")}
    assert spans == {0: (0, 2), 2: (2, 4), 4: (4, 5), 1: (5, 7), 3: (7, 9), 5: (9, 10)}
    check_plan(make_plan(layout, Layout.from_parallel(model, Mesh({"tp": 2}), rules=Rules(style="vllm"))))
    with pytest.raises(LayoutError, match=r"fsdp='fsdp' is not an axis of mesh \(dp=2\)"):
        Layout.from_parallel(model, Mesh({"dp": 2}), rules=Rules(fsdp="fsdp"))


def test_indivisible_sizes_name_tensor_dim_size_and_axis():
    message = r"layers\.0\.mlp\.gate_proj\.weight: dim 0 of size 8 does not divide among axis tp=3; .*: 1, 2, 4, 8"
    model = ModelSpec.from_config(LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 9})
    with pytest.raises(LayoutError, match=message):
        Layout.from_parallel(model, Mesh({"tp": 3}))


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_bundled_specs_have_the_published_number_of_parameters(name):
    assert ModelSpec.load(name).num_parameters == PARAMETERS[name]


@pytest.mark.parametrize(("name", "millions"), [("1b", 698), ("4b", 3209), ("12b", 10759), ("27b", 25600)])
def test_gemma_has_the_reports_number_of_parameters_besides_the_embedding(name, millions):
    """Gemma 3 report (arXiv:2503.19786), table 1."""
    model = ModelSpec.load(f"gemma3-{name}")
    rest = sum(tensor.spec.numel for tensor in model.tensors if "embed_tokens" not in tensor.spec.name)
    assert round(rest / 1e6) == millions
    assert dict(model.ties) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_config_may_nest_its_text_model_and_leave_out_defaults():
    fields = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "model_type": "gemma3_text"}
    nested = ModelSpec.from_config({"model_type": "gemma3", "text_config": fields, "torch_dtype": "bfloat16"})
    assert nested.tensors == ModelSpec.load("gemma3-4b").tensors


def test_every_bundled_spec_says_where_its_numbers_are_from():
    assert len(bundled_names()) >= 32
    for name in bundled_names():
        if not name.startswith(("kimi", "qwen3-2", "qwen3-30", "deep")):
            assert "Hugging Face" in ModelSpec.load(name).origin


def test_unknown_models_and_fields_are_named(tmp_path):
    with pytest.raises(
        LayoutError,
        match=r"no model 'gpt-5': give the path of a config\.json, or one of deepseek-v2-lite, deepseek-v2, deep",
    ):
        ModelSpec.load("gpt-5")
    with pytest.raises(LayoutError, match="model_type 'mamba' is not among"):
        ModelSpec.from_config({"model_type": "mamba"})
    with pytest.raises(LayoutError, match="model config lacks 'vocab_size', which llama models have"):
        ModelSpec.from_config({key: value for key, value in LLAMA.items() if key != "vocab_size"})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LayoutError, match="is not JSON"):
        ModelSpec.load(str(tmp_path))


def test_regions_never_leave_the_tensor():
    for name in ("qwen2.5-0.5b", "mixtral-8x7b"):
        model = ModelSpec.load(name)
        layout = Layout.from_parallel(model, Mesh({"tp": 2}), rules=Rules(style="vllm"))
        for holding in layout.holdings(1):
            assert Region.whole(holding.region.name, layout.specs[holding.region.name].shape).contains(holding.region)
