"""Learning beside a live engine: it goes on as before, parameters are where the layout says, and what is not is named.

On a CPU vLLM packs the weights of float32 projections for its own library and drops them: those are opaque here.
"""

import json

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm_cases import CONFIGS, check_storages, first_labels, labelled

from reshard.oracle import quantize_reference
from reshard.vllm.checkpoint import checkpoint_specs
from reshard.vllm.layout import learn_layout

CONFIG = {**CONFIGS["qwen3_moe"], "head_dim": 32}
EXPERTS = "model.layers.1.mlp.experts.routed_experts"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=128,
        enforce_eager=True,
        dtype="float32",
        gpu_memory_utilization=0.1,
    )
    yield llm.llm_engine
    del llm
    cleanup_dist_env_and_memory()


@pytest.fixture
def live(engine):
    return engine.model_executor.driver_worker.worker.model_runner.model


@pytest.fixture(scope="module")
def specs():
    return checkpoint_specs(CONFIG, dtype=torch.float32)


def tokens(engine) -> list[int]:
    engine.add_request("probe", {"prompt_token_ids": [5, 6, 7, 8]}, SamplingParams(max_tokens=8, temperature=0))
    outputs = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return list(outputs[0].outputs[0].token_ids)


def registries(engine) -> tuple[object, ...]:
    """What building a model changes in a process, by identity."""
    compilation = engine.vllm_config.compilation_config
    return (
        {name: id(layer) for name, layer in compilation.static_forward_context.items()},
        list(compilation.static_all_moe_layers),
        {key: id(rope) for key, rope in rotary_embedding._ROPE_DICT.items()},
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )


def test_a_live_engine_goes_on_as_before(engine, live, specs):
    before, said, weights = registries(engine), tokens(engine), {n: p.clone() for n, p in live.named_parameters()}
    learnt = learn_layout(engine.vllm_config, specs, rank=0, live=live)
    assert (learnt.unread, learnt.unwritten, learnt.derived) == ((), (), ())
    assert all("_proj" in name or "gate" in name or name == "lm_head.weight" for name in learnt.opaque)
    assert registries(engine) == before
    assert all(torch.equal(p, weights[n]) for n, p in live.named_parameters())
    assert tokens(engine) == said


def test_live_parameters_are_where_the_layout_says(engine, live, specs):
    learnt = learn_layout(engine.vllm_config, specs, rank=0, live=live)
    packed = {source for name in learnt.opaque for source in learnt.sources[name]}
    live.load_weights(item for item in labelled(specs) if item[0] not in packed)
    kept = {name: p for name, p in live.named_parameters() if name not in learnt.opaque}
    assert {"model.embed_tokens.weight", f"{EXPERTS}.w13_weight", f"{EXPERTS}.w2_weight"} <= set(kept)
    check_storages(learnt, 0, kept, first_labels(specs))


def test_parameters_that_the_engine_replaced_are_opaque_by_name(engine, live, specs, monkeypatch):
    norm = live.get_submodule("model.layers.0.self_attn.q_norm")
    monkeypatch.setitem(norm._parameters, "weight", torch.nn.Parameter(norm.weight.to(torch.bfloat16)[::2], False))
    monkeypatch.delitem(live.get_submodule("model.norm")._parameters, "weight")
    learnt = learn_layout(engine.vllm_config, specs, rank=0, live=live)
    assert learnt.opaque["model.layers.0.self_attn.q_norm.weight"] == (
        "the engine changed it after loading: float32[32] with strides (1,) from element 0 became bfloat16[16] with "
        "strides (2,) from element 0"
    )
    assert learnt.opaque["model.norm.weight"] == "the engine dropped it after loading"
    assert not {"model.layers.0.self_attn.q_norm.weight", "model.norm.weight"} & set(learnt.layout.specs)
    assert learnt.sources["model.norm.weight"] == ("model.norm.weight",), "what its reload needs is known"


def test_elements_that_a_kernel_wants_elsewhere_are_found_out(engine, live, specs, monkeypatch):
    """The same form, but the up projection first: as some kernels for experts keep it."""
    method = live.get_submodule(EXPERTS).quant_method

    class UpFirst(type(method)):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            super().process_weights_after_loading(layer)
            layer.w13_weight.data.copy_(layer.w13_weight.data.roll(layer.w13_weight.shape[1] // 2, dims=1))

    before = live.get_submodule(EXPERTS).w13_weight.clone()
    known = set(learn_layout(engine.vllm_config, specs, rank=0, live=live).opaque)
    monkeypatch.setattr(method, "__class__", UpFirst)
    learnt = learn_layout(engine.vllm_config, specs, rank=0, live=live)
    assert set(learnt.opaque) - known == {f"{EXPERTS}.w13_weight"}
    assert "moved its elements after loading" in learnt.opaque[f"{EXPERTS}.w13_weight"]
    assert torch.equal(live.get_submodule(EXPERTS).w13_weight, before), "only a copy of the layer was tried"


def test_tensors_that_the_engine_computed_from_its_weights_are_named(engine, live, specs, monkeypatch):
    norm = live.get_submodule("model.norm")
    monkeypatch.setitem(vars(norm), "absorbed", norm.weight.data * 2)
    assert learn_layout(engine.vllm_config, specs, rank=0, live=live).derived == ("model.norm.absorbed",)


class ByRows(QuantizeMethodBase):
    """Quantises by rows after loading and keeps the weight transposed, as vLLM's methods of that kind do."""

    def create_weights(self, layer, *args, **kwargs):
        raise AssertionError("the layer is there already")

    def apply(self, layer, *args, **kwargs):
        raise AssertionError("the layer never runs")

    def process_weights_after_loading(self, layer):
        values, scale = quantize_reference(layer.weight, mode="rows", through_bf16=False)
        layer.weight = torch.nn.Parameter(values.t(), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)


def test_a_parameter_in_float8_is_described_by_a_rule_if_asked_for(engine, live, specs, monkeypatch):
    name = "model.layers.0.self_attn.qkv_proj.weight"
    module = live.get_submodule(name.removesuffix(".weight"))
    quantised = torch.zeros(64, 384, dtype=torch.float8_e4m3fn).t().contiguous().t()
    monkeypatch.setitem(module._parameters, "weight", torch.nn.Parameter(quantised, False))
    monkeypatch.setitem(module._parameters, "weight_scale", torch.nn.Parameter(torch.zeros(384, 1), False))
    monkeypatch.setattr(module, "quant_method", ByRows())
    assert name in learn_layout(engine.vllm_config, specs, rank=0, live=live).opaque
    learnt = learn_layout(engine.vllm_config, specs, rank=0, live=live, quantised=True)
    rule = learnt.quantised[name]
    assert name not in learnt.opaque and (rule.mode, rule.shape, rule.weight.strides) == ("rows", (384, 64), (64, 1))
    found = {h.region.name: h.address for h in learnt.layout.holdings(0)}
    value = found["model.layers.0.self_attn.v_proj.weight"]
    assert (value.storage, value.offset_bytes) == (rule.staged, 320 * 64 * 4), (
        "behind 8 query and 2 key heads of 32 rows"
    )
