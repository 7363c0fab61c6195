"""Layouts learnt from hand-written loaders: fused, padded, replicated, converted, and what hides its source."""

import pytest
import torch
from torch import nn

from reshard import DType, Layout, Mesh, ModelSpec, Rules, TensorSpec, make_plan
from reshard.errors import LayoutError
from reshard.loader_layout import trace_loader
from reshard.plan_oracle import byte_offsets, check_plan, elements

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, VOCAB, EXPERTS = 8, 2, 4, 16, 12, 70, 4
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "moe_intermediate_size": MLP,
    "num_experts": EXPERTS,
    "mlp_only_layers": [0],
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "dtype": "float32",
}


class Engine(nn.Module):
    """A rank of a tensor parallel engine that names and fuses its parameters as vLLM does."""

    def __init__(self, tp_rank: int, tp: int, device: str) -> None:
        super().__init__()
        self.tp_rank, self.tp = tp_rank, tp
        q, kv = HEADS // tp * HEAD_DIM, max(KV_HEADS // tp, 1) * HEAD_DIM
        self.vocab_rows = 128 // tp
        shapes = {
            "model.embed_tokens.weight": (self.vocab_rows, HIDDEN),
            "lm_head.weight": (self.vocab_rows, HIDDEN),
            "model.norm.weight": (HIDDEN,),
        }
        for layer in range(2):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.self_attn.qkv_proj.weight": (q + 2 * kv, HIDDEN),
                f"{prefix}.self_attn.o_proj.weight": (HIDDEN, q),
                f"{prefix}.self_attn.q_norm.weight": (HEAD_DIM,),
                f"{prefix}.self_attn.k_norm.weight": (HEAD_DIM,),
                f"{prefix}.input_layernorm.weight": (HIDDEN,),
                f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            }
        shapes |= {
            "model.layers.0.mlp.gate_up_proj.weight": (2 * MLP // tp, HIDDEN),
            "model.layers.0.mlp.down_proj.weight": (HIDDEN, MLP // tp),
            "model.layers.1.mlp.gate.weight": (EXPERTS, HIDDEN),
            "model.layers.1.mlp.experts.routed_experts.w13_weight": (EXPERTS, 2 * MLP // tp, HIDDEN),
            "model.layers.1.mlp.experts.routed_experts.w2_weight": (EXPERTS, HIDDEN, MLP // tp),
        }
        self.weights = {name: torch.full(shape, -1.0, device=device) for name, shape in shapes.items()}

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.load_one(name, tensor)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        leaf, stem = name.split(".")[-2], ".".join(name.split(".")[:-2])
        if ".experts." in name:
            block, expert = stem.rsplit(".", 1)
            stack = "w2_weight" if leaf == "down_proj" else "w13_weight"
            self._mlp(self.weights[f"{block}.routed_experts.{stack}"][int(expert)], leaf, tensor)
        elif leaf in ("q_proj", "k_proj", "v_proj"):
            self._qkv(self.weights[f"{stem}.qkv_proj.weight"], leaf[0], tensor)
        elif leaf in ("gate_proj", "up_proj"):
            self._mlp(self.weights[f"{stem}.gate_up_proj.weight"], leaf, tensor)
        elif leaf in ("o_proj", "down_proj"):
            size = tensor.shape[1] // self.tp
            self.weights[name].data.copy_(tensor.narrow(1, self.tp_rank * size, size))
        elif leaf in ("embed_tokens", "lm_head"):
            own = tensor[self.tp_rank * self.vocab_rows : (self.tp_rank + 1) * self.vocab_rows]
            self.weights[name][: own.shape[0]].copy_(own)
        else:
            self.weights[name].copy_(tensor)

    def _qkv(self, fused: torch.Tensor, letter: str, tensor: torch.Tensor) -> None:
        q, kv = HEADS // self.tp * HEAD_DIM, max(KV_HEADS // self.tp, 1) * HEAD_DIM
        start, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[letter]
        shard = self.tp_rank if letter == "q" else self.tp_rank * KV_HEADS // self.tp * HEAD_DIM // size
        fused.narrow(0, start, size).copy_(tensor.narrow(0, shard * size, size))

    def _mlp(self, fused: torch.Tensor, leaf: str, tensor: torch.Tensor) -> None:
        size = MLP // self.tp
        if leaf == "down_proj":
            fused.copy_(tensor[:, self.tp_rank * size : (self.tp_rank + 1) * size])
        else:
            at = 0 if leaf == "gate_proj" else size
            fused[at : at + size].copy_(tensor[self.tp_rank * size : (self.tp_rank + 1) * size])


def read_back(layout: Layout, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    """Every element that the layout claims must be there, in tensors that the real loader filled with labels."""
    for holding in layout.holdings(rank):
        tensor = tensors[holding.address.storage]
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        at = torch.from_numpy(byte_offsets(holding.region, holding.address)) // tensor.element_size()
        label = elements(holding.region, layout.specs[holding.region.name].shape)
        assert flat[at].tolist() == label.tolist(), holding


def labelled(specs: list[TensorSpec]) -> list[tuple[str, torch.Tensor]]:
    return [(spec.name, torch.arange(spec.numel, dtype=torch.float32).reshape(spec.shape)) for spec in specs]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_fused_padded_replicated_engine_is_learnt_exactly(tp):
    model = ModelSpec.from_config(CONFIG)
    specs = list(model.specs())
    parts = []
    for rank in range(tp):
        trace = trace_loader((meta := Engine(rank, tp, "meta")).load_weights, specs, meta.weights, rank=rank)
        assert (trace.unread, trace.unwritten, trace.layout.opaque(rank)) == ((), (), ())
        live = Engine(rank, tp, "cpu")
        live.load_weights(labelled(specs))
        read_back(trace.layout, rank, live.weights)
        written = sum(int((tensor >= 0).sum()) for tensor in live.weights.values())
        assert written == sum(holding.region.numel for holding in trace.layout.holdings(rank)), "nothing is missed"
        parts.append(trace.layout)
    learnt = Layout.merge(parts)
    assert learnt == Layout.from_parallel(model, Mesh({"tp": tp}), rules=Rules(style="vllm"))
    check_plan(make_plan(Layout.from_parallel(model, Mesh({"tp": 2}), rules=Rules(style="megatron")), learnt))


W = TensorSpec("w", (6, 4), DType.FLOAT32)
V = TensorSpec("v", (2, 4), DType.FLOAT32)


def trace(load, shape: tuple[int, ...], specs=(W, V), dtype=torch.float32):
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    return trace_loader(lambda weights: load(parameter, dict(weights)), specs, {"p": parameter})


def check_against_labels(load, shape: tuple[int, ...], dtype=torch.float32) -> None:
    """The traced layout must agree with what the same loader does to labels."""
    found = trace(load, shape, dtype=dtype)
    assert found.layout.opaque(0) == ()
    live = torch.nn.Parameter(torch.full(shape, -1.0, dtype=dtype), requires_grad=False)
    load(live, dict(labelled([W, V])))
    read_back(found.layout, 0, {"p": live})
    assert int((live >= 0).sum()) == sum(holding.region.numel for holding in found.layout.holdings(0))


def through_a_buffer(parameter: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Fill a tensor piece by piece, transposed, then copy it: as loaders do that gather what they get in any order."""
    buffer = torch.full((4, 6), -1.0, device=parameter.device)
    buffer[:, 4:].copy_(second.t())
    buffer.t()[:3].copy_(first[3:])
    parameter.copy_(buffer.t())


@pytest.mark.parametrize(
    ("load", "shape"),
    [
        (lambda p, w: p.copy_(w["w"].t()), (4, 6)),
        (lambda p, w: p.copy_(w["w"].reshape(-1)), (24,)),
        (lambda p, w: p.copy_(w["w"].view(2, 3, 4)), (2, 3, 4)),
        (lambda p, w: p.copy_(w["w"].view(2, 3, 4)[:, :2].reshape(4, 4)), (4, 4)),
        (lambda p, w: p.view(2, 3, 4)[:, 1:].copy_(w["w"].view(2, 3, 4)[:, 1:]), (6, 4)),
        (lambda p, w: p.copy_(w["w"][::2]), (3, 4)),
        (lambda p, w: p.copy_(w["w"][1:, 1:3].contiguous()), (5, 2)),
        (lambda p, w: p.copy_(w["w"][2:].to(torch.float64).t()), (4, 4)),
        (lambda p, w: p.copy_(torch.cat([w["w"], w["v"]])[1:4]), (3, 4)),
        (lambda p, w: [p[6:].copy_(w["v"]), p[:6].copy_(w["w"])], (8, 4)),
        (lambda p, w: [p.fill_(-1), p[:2].copy_(w["v"])], (8, 4)),
        (lambda p, w: [p.copy_(w["w"]), p.copy_(w["w"])], (6, 4)),
        (lambda p, w: p[0, 0].copy_(w["w"][3, 2]), (2, 2)),
        (lambda p, w: [p.copy_(w["w"]), p[0].fill_(-1)], (6, 4)),
        (lambda p, w: [p.copy_(w["w"]), p[1:3, 1:3].copy_(w["v"][:, :2])], (6, 4)),
        (lambda p, w: [p[1:3].copy_(w["w"][:2] * 2), p.copy_(w["w"])], (6, 4)),
        (lambda p, w: p.copy_(torch.cat([w["w"][:, 2:], w["w"][:, :2]], dim=1)), (6, 4)),
        (lambda p, w: p.copy_(torch.stack([w["w"][:2], w["v"]], dim=1)), (2, 2, 4)),
        (lambda p, w: p.copy_(torch.nn.functional.pad(w["w"], (1, 2, 0, 1), value=-1.0)), (7, 7)),
        (lambda p, w: p.copy_(w["w"][torch.tensor([4, 5, 0, 1])]), (4, 4)),
        (lambda p, w: p.copy_(w["w"].index_select(1, torch.tensor([3, 0]))), (6, 2)),
        (lambda p, w: p.copy_(w["w"].t().clone().t()), (6, 4)),
        (lambda p, w: [half.copy_(part) for half, part in zip(p.chunk(2), w["w"].chunk(2), strict=True)], (6, 4)),
        (lambda p, w: through_a_buffer(p, w["w"], w["v"]), (6, 4)),
        (lambda p, w: p.data.fill_(w["w"][2, 1].item()), (1,)),
        (lambda p, w: setattr(p, "data", torch.cat([w["v"], w["w"]])), (6, 4)),
    ],
)
def test_views_and_exact_copies_are_followed(load, shape):
    check_against_labels(load, shape)


def test_a_converting_loader_gives_the_parameters_dtype():
    found = trace(lambda p, w: p.copy_(w["w"].to(torch.bfloat16)), (6, 4), dtype=torch.bfloat16)
    assert found.layout.specs["w"].dtype is DType.BFLOAT16
    assert found.unread == ("v",)


@pytest.mark.parametrize(
    "load",
    [
        lambda p, w: p.copy_(w["w"] * 2),
        lambda p, w: p.copy_(w["w"]).mul_(2),
        lambda p, w: [p.copy_(w["w"]), p[0].mul_(2)],
        lambda p, w: [p[:3].copy_(w["w"][:3] + 1), p[3:].copy_(w["w"][3:])],
        lambda p, w: p.copy_(w["w"][0].expand(6, 4)),
        lambda p, w: p.copy_(w["w"].to(torch.bfloat16)),
        lambda p, w: p.view(torch.int32).copy_(w["w"].view(torch.int32)),
        lambda p, w: p.copy_(w["w"].to(torch.int32)),
        lambda p, w: p.copy_(torch.where(w["w"] > 0, w["w"], 0.0)),
        lambda p, w: p.index_copy_(0, torch.arange(6, device=w["w"].device), w["w"]),
        lambda p, w: p.copy_(w["w"][torch.zeros(6, dtype=torch.int64, device=w["w"].device)]),
    ],
)
def test_what_hides_its_source_is_opaque_by_name(load):
    found = trace(load, (6, 4))
    assert found.layout.opaque(0) == ("p",)
    assert found.layout.specs == {}


def test_unread_and_unwritten_are_named_and_live_weights_refused():
    found = trace_loader(lambda weights: None, [W], {"p": torch.empty(2, device="meta")})
    assert (found.unread, found.unwritten) == (("w",), ("p",))
    with pytest.raises(LayoutError, match=r"parameters \['p'\] are not on the meta device"):
        trace_loader(lambda weights: None, [W], {"p": torch.empty(2)})


def test_a_loader_that_branches_on_weights_or_lacks_a_meta_kernel_is_refused():
    with pytest.raises(LayoutError, match=r"branches on values that it computes from \['w'\]"):
        trace(lambda p, w: p.copy_(w["w"]) if (w["w"] > 0).all() else None, (6, 4))
    with torch.library._scoped_library("reshard_test", "DEF") as library:
        library.define("quantise(Tensor x) -> Tensor")
        library.impl("quantise", lambda x: x * 2, "CPU")
        operator = torch.ops.reshard_test.quantise
        with pytest.raises(LayoutError, match=r"passes \['w'\] to reshard_test.quantise.default, which has no kernel"):
            trace(lambda p, w: p.copy_(operator(w["w"])), (6, 4))
