"""FSDP by arithmetic in every style: chunks of each parameter's dim 0, against torch.chunk of the whole parameter."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from reshard import Layout, Mesh, ModelSpec, Rules, make_plan
from reshard.cli import main
from reshard.errors import LayoutError
from reshard.plan_oracle import byte_offsets, check_plan, elements
from reshard.scenario import Scenario

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 2,
    "v_head_dim": 3,
    "vocab_size": 300,
    "dtype": "float32",
}
GROUPED = {
    "model_type": "qwen3_moe",
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "num_experts": 6,
    "vocab_size": 70,
    "attention_bias": True,
    "dtype": "float32",
}
MODELS = {"latent": ModelSpec.from_config(CONFIG), "grouped": ModelSpec.from_config(GROUPED)}


def labels(layout: Layout, rank: int) -> dict[str, dict[int, tuple[str, int]]]:
    """Per storage: element offset -> (tensor, element)."""
    found: dict[str, dict[int, tuple[str, int]]] = {}
    for holding in layout.holdings(rank):
        flat = elements(holding.region, layout.specs[holding.region.name].shape).tolist()
        at = (byte_offsets(holding.region, holding.address) // holding.address.dtype.itemsize).tolist()
        storage = found.setdefault(holding.address.storage, {})
        assert not storage.keys() & set(at), f"{holding} overlaps what else lies in {holding.address.storage}"
        storage.update(zip(at, ((holding.region.name, element) for element in flat), strict=True))
    return found


def parameter_rows(model: ModelSpec, style: str, num_tp: int, storage: str, num_local: int) -> tuple[int, int]:
    """Rows of dim 0 of an engine's parameter, and elements per row, from what the engines' documents say."""
    by_name = {tensor.spec.name: tensor for tensor in model.tensors}
    heads, groups = model.num_heads, model.num_kv_heads
    if storage.endswith(("w13_weight", "w2_weight")):
        tensor = next(t for t in model.tensors if t.expert is not None)
        return num_local, tensor.spec.numel // num_tp * (2 if "w13" in storage else 1)
    if "linear_qkv" in storage or "qkv_proj" in storage:
        head_dim = next(t.head_dim for t in model.tensors if t.cut == "query")
        kv = groups / num_tp if style == "megatron" else max(groups // num_tp, 1)
        return round((heads / num_tp + 2 * kv) * head_dim), 8 if storage.endswith("weight") else 1
    if "linear_fc1" in storage or "gate_up_proj" in storage:
        routed = "experts." in storage and "shared" not in storage
        shared = [t for t in model.tensors if t.is_shared_expert and t.cut == "gate"]
        dense = [t for t in model.tensors if t.cut == "gate" and t.expert is None and not t.is_shared_expert]
        expert = [t for t in model.tensors if t.cut == "gate" and t.expert is not None]
        tensor = (shared if "shared" in storage else expert if routed else dense)[0]
        return 2 * tensor.spec.shape[0] // num_tp, tensor.spec.shape[1]
    if "fused_qkv_a_proj" in storage:
        return 6 + 5 + 2, 8
    if storage.startswith(("lm_head", "model.embed")) and style != "plain":
        multiple = 128 * num_tp if style == "megatron" else 64
        return -(-model.vocab_size // multiple) * multiple // num_tp, 8
    tensor = by_name[storage]
    rows, columns = tensor.spec.shape[0], int(np.prod(tensor.spec.shape[1:]))
    if tensor.cut == "columns":
        return rows, columns // num_tp
    return (rows if tensor.cut == "none" else rows // num_tp), columns


@pytest.mark.parametrize("num_fsdp", [2, 3, 5, 16])
@pytest.mark.parametrize("num_tp", [1, 2])
@pytest.mark.parametrize("style", ["plain", "megatron", "vllm"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_shards_are_the_chunks_of_every_parameter(name, style, num_tp, num_fsdp):
    model = MODELS[name]
    whole = Layout.from_parallel(model, Mesh({"tp": num_tp}), rules=Rules(style=style))
    mesh = Mesh({"fsdp": num_fsdp, "tp": num_tp})
    cut = Layout.from_parallel(model, mesh, rules=Rules(style=style, fsdp="fsdp"))
    num_empty = 0
    for tp_idx in range(num_tp):
        parameters = labels(whole, tp_idx)
        shards = [labels(cut, mesh.rank(fsdp=index, tp=tp_idx)) for index in range(num_fsdp)]
        for storage, own in parameters.items():
            rows, width = parameter_rows(model, style, num_tp, storage, num_local=6)
            assert max(own) < rows * width
            chunks = torch.arange(rows).chunk(num_fsdp)
            for index, shard in enumerate(shards):
                chunk = chunks[index] * width if index < len(chunks) else torch.zeros(0, dtype=torch.int64)
                first, last = (int(chunk[0]), int(chunk[-1]) + width) if len(chunk) else (0, 0)
                expected = {at - first: label for at, label in own.items() if first <= at < last}
                assert shard.get(storage, {}) == expected
                num_empty += not expected
    assert num_empty or num_fsdp < 5
    engine = Layout.from_parallel(model, Mesh({"dp": num_fsdp, "tp": num_tp}), rules=Rules(style="vllm"))
    plan = make_plan(cut, engine)
    if num_fsdp < 5:
        check_plan(plan)
        check_plan(plan.inverse())
    assert sum(plan.certificate.floor_bytes(rank) for rank in plan.scope) == int(plan.table.moved_bytes.sum())


def test_rank_order_is_not_row_order():
    """FSDP 2 x TP 2 on four rows: ranks 0..3 hold rows 0, 2, 1, 3."""
    model = ModelSpec.from_config(GROUPED | {"intermediate_size": 4})
    mesh = Mesh({"fsdp": 2, "tp": 2})
    layout = Layout.from_parallel(model, mesh, rules=Rules(fsdp="fsdp"))
    held = {h.rank: h.region.start[0] for h in layout.holders("model.layers.0.mlp.experts.0.up_proj.weight")}
    assert held == {0: 0, 1: 2, 2: 1, 3: 3}
    fused = Layout.from_parallel(model, mesh, rules=Rules(style="megatron", fsdp="fsdp"))
    names = [f"model.layers.0.mlp.experts.0.{half}_proj.weight" for half in ("gate", "up")]
    assert [{h.rank: h.region.start[0] for h in fused.holders(name)} for name in names] == [{0: 0, 1: 2}, {2: 0, 3: 2}]


def scenario(train: dict[str, int], generate: dict[str, int], **options) -> Scenario:
    return Scenario(model=MODELS["latent"], train=train, generate=generate, **options)


@pytest.mark.parametrize("style", ["plain", "megatron"])
@pytest.mark.parametrize(
    ("train", "generate"),
    [
        ({"tp": 2, "fsdp": 4, "ep": 2}, {"tp": 2}),
        ({"tp": 2, "fsdp": 3, "ep": 6, "dp": 2}, {"tp": 2, "ep": 4}),
        ({"pp": 3, "tp": 2, "fsdp": 2, "ep": 2}, {"tp": 2, "ep": 2}),
    ],
)
def test_experts_are_dealt_out_and_their_owners_cut_them(style, train, generate):
    case = scenario(train, generate, train_style=style)
    source, destination = case.layouts()
    check_plan(case.plan())
    num_pp, num_dp, ep = train.get("pp", 1), train.get("dp", 1), train["ep"]
    block = train["tp"] * train["fsdp"]
    for expert in range(6):
        name = f"model.layers.1.mlp.experts.{expert}.gate_proj.weight"
        holders = source.holders(name)
        first = {rank for rank in range(case.num_ranks) if rank % ep == expert // (6 // ep)}
        assert {h.rank for h in holders} <= first, "expert parallel index is the rank within a block"
        held = Counter(row for h in holders for row in range(h.region.start[0], h.region.stop[0]))
        assert held == dict.fromkeys(range(4), num_dp), "one copy per block, cut among its ranks"
        assert all(h.region.stop[1] == 8 for h in holders), "tensor parallelism does not cut routed experts"
    assert case.num_ranks == num_pp * num_dp * block
    assert set(destination.ranks) == set(range(case.num_ranks))


def test_the_command_line_takes_fsdp_with_experts(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    common = ["--model", str(path), "--gen", "tp=2", "--style", "megatron", "--format", "json"]
    assert main(["plan", "--train", "pp=1,tp=2,fsdp=4,ep=2", *common]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert len(fields["ranks"]) == 8
    for rank in fields["ranks"]:
        assert rank["received_bytes"] == rank["needed_bytes"] - rank["held_bytes"] > 0
    assert main(["plan", "--train", "pp=1,tp=2,fsdp=4,ep=3", *common]) == 2
    assert "ep=3 does not divide the fsdp * tp = 8 ranks that share one copy: use one of [1, 2, 4, 8]" in (
        capsys.readouterr().err
    )
    assert main(["plan", "--train", "pp=1,tp=2,dp=4,ep=3", *common]) == 2
    assert "ep=3 does not divide the 8 ranks of a stage: use one of [1, 2, 4, 8]" in capsys.readouterr().err


def test_a_config_that_does_not_divide_is_refused_in_each_style():
    model = MODELS["grouped"]
    for style, message in (
        ("plain", r"embed_tokens\.weight: dim 0 of size 70 does not divide among axis tp=4; sizes that do: 1, 2, 5, 7"),
        ("megatron", r"q_proj\.weight: dim 0 of the fused queries, keys and values, of size 30, does not .* tp=4;"),
        ("vllm", r"q_proj\.weight: dim 0 of size 18: 6 query and 2 key/value heads don't divide .* tp=4; .*: 1, 2, 6"),
    ):
        with pytest.raises(LayoutError, match=message):
            Layout.from_parallel(model, Mesh({"tp": 4}), rules=Rules(style=style))
