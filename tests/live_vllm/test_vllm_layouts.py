"""Layouts learnt from vLLM's own model classes: element by element what its loader does, for every rank."""

import json
from dataclasses import replace

import pytest
import torch
from vllm_cases import CONFIGS, Engine, check_rank

from reshard import DType, Layout, Mesh, ModelSpec, Rules, TensorSpec, make_plan
from reshard.errors import LayoutError, StateError
from reshard.vllm.checkpoint import checkpoint_specs
from reshard.vllm.planning import learn_layouts, parallel_rank

# What the first and the last of two stages leave out besides layers: a tied head has its own copy of the embedding,
# and vLLM's Qwen3-MoE has all of these on every stage.
OUTSIDE_LAYERS = {
    "qwen2": ({"model.norm.weight"}, set()),
    "qwen3_moe": (set(), set()),
    "deepseek_v3": ({"model.norm.weight", "lm_head.weight"}, {"model.embed_tokens.weight"}),
}
SPARSE = ("qwen3_moe", "deepseek_v2", "deepseek_v3")


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """An engine of one rank per model, with the model's folder and its checkpoint."""
    found = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config))
        found[name] = Engine(folder, checkpoint_specs(config, dtype=torch.float32))
    return found


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_parallel_rank_is_learnt_exactly(engines, name, tp):
    """8 query heads and 2 key/value heads (replicated from tp=4 on), 300 tokens padded to 320, a dense and a sparse
    layer.
    """
    engine = replace(engines[name], tp=tp)
    for rank in range(tp):
        learnt = check_rank(engine, rank)
        assert (learnt.unread, learnt.unwritten, dict(learnt.opaque)) == ((), (), {})


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 8}, {"tp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("name", SPARSE)
def test_every_expert_parallel_rank_is_learnt_exactly(engines, name, sizes):
    engine = replace(engines[name], ep=True, **sizes)
    parts = engine.tp * engine.dp
    for rank in range(parts):
        learnt = check_rank(engine, rank)
        own = range(rank * 8 // parts, (rank + 1) * 8 // parts)
        others = {
            f"model.layers.1.mlp.experts.{expert}.{leaf}_proj.weight"
            for expert in set(range(8)) - set(own)
            for leaf in ("gate", "up", "down")
        }
        assert set(learnt.unread) == others, "exactly the experts of other ranks are left out"
        assert (learnt.unwritten, dict(learnt.opaque)) == ((), {})


def test_experts_that_do_not_divide_are_dealt_out_as_vllm_does(tmp_path):
    config = {**CONFIGS["qwen3_moe"], "num_experts": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = Engine(tmp_path, checkpoint_specs(config, dtype=torch.float32), tp=4, ep=True)
    own = [6 - len(check_rank(engine, rank).unread) // 3 for rank in range(4)]
    assert own == [2, 2, 1, 1]


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_every_pipeline_stage_is_learnt_exactly(tmp_path, name):
    config = {**CONFIGS[name], "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = Engine(tmp_path, checkpoint_specs(config, dtype=torch.float32), tp=2, pp=2)
    unread = [set(check_rank(engine, rank).unread) for rank in range(4)]
    assert unread[0] == unread[1] and unread[2] == unread[3]
    assert {name.split(".")[2] for name in unread[0] if ".layers." in name} == {"2", "3"}
    assert {name.split(".")[2] for name in unread[2] if ".layers." in name} == {"0", "1"}
    first, last = ({name for name in unread[rank] if ".layers." not in name} for rank in (0, 2))
    assert (first, last) == OUTSIDE_LAYERS[name]


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("qwen2", {"lm_head.weight": (300, 64)}),
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}),
        (
            "deepseek_v3",
            {"model.layers.2.eh_proj.weight": (64, 128), "model.layers.2.self_attn.o_proj.weight": (64, 128)},
        ),
    ],
    ids=("a tied head", "frequencies", "a prediction layer"),
)
def test_what_an_engine_does_not_use_is_named(engines, name, extra):
    """Tensors that published checkpoints carry besides: a redundant tied head, frequencies, a prediction layer."""
    more = [TensorSpec(tensor, shape, DType.FLOAT32) for tensor, shape in extra.items()]
    engine = replace(engines[name], checkpoint=(*engines[name].checkpoint, *more))
    assert check_rank(engine, 0).unread == tuple(extra)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_arithmetic_gives_what_the_loaders_do(name, tp):
    learnt = learn_layouts(CONFIGS[name], tp=tp)
    model = ModelSpec.from_config(CONFIGS[name], dtype=DType.BFLOAT16)
    analytic = Layout.from_parallel(model, Mesh({"tp": tp}), rules=Rules(style="vllm"))
    assert [set(learnt.holdings(rank)) for rank in range(tp)] == [set(analytic.holdings(rank)) for rank in range(tp)]


@pytest.mark.parametrize("name", SPARSE)
def test_arithmetic_gives_what_the_loaders_do_with_expert_parallelism(name):
    model = ModelSpec.from_config(CONFIGS[name], dtype=DType.BFLOAT16)
    for sizes, mesh in (({"tp": 4}, Mesh({"tp": 4})), ({"tp": 2, "dp": 2}, Mesh({"dp": 2, "tp": 2}))):
        learnt = learn_layouts(CONFIGS[name], ep=True, **sizes)
        rules = Rules(style="vllm", whole_shared_experts="dp" in sizes)
        analytic = Layout.from_parallel(model, mesh, rules=rules, expert_mesh=Mesh({"ep": 4}))
        assert [set(learnt.holdings(rank)) for rank in range(4)] == [set(analytic.holdings(rank)) for rank in range(4)]


def test_a_plan_from_a_trainer_into_the_learnt_layout_moves_the_floor():
    train = Layout.from_parallel(ModelSpec.from_config(CONFIGS["qwen3"]), Mesh({"dp": 2, "tp": 2}))
    plan = make_plan(train, learn_layouts(CONFIGS["qwen3"], tp=4))
    assert all(plan.received_bytes(rank) == plan.certificate.floor_bytes(rank) for rank in range(4))


def test_mismatched_configs_and_processes_with_groups_are_refused(engines):
    larger = {**CONFIGS["qwen3"], "intermediate_size": 192}
    with pytest.raises(LayoutError, match=r"the engine uses only a part of 6 tensors, first .*down_proj"):
        learn_layouts(CONFIGS["qwen3"], tp=2, checkpoint=checkpoint_specs(larger))
    with (
        engines["qwen3"].rank(0) as config,
        pytest.raises(StateError, match="in a process of their own"),
        parallel_rank(config, rank=0),
    ):
        pass
    with engines["qwen3"].rank(0):
        assert torch.distributed.is_initialized()
    assert not torch.distributed.is_initialized(), "each rank's state is gone afterwards"
