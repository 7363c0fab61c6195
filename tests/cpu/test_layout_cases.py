"""Faults that users of such systems have reported, each as the smallest input that shows it, with the right value."""

from collections import Counter

import numpy as np
import pytest

from reshard import Address, DType, Holding, Layout, Mesh, ModelSpec, Region, Rules, TensorSpec, make_groups, make_plan
from reshard.errors import LayoutError, PlanError
from reshard.plan_oracle import byte_offsets, check_plan, elements
from reshard.spec import ModelTensor
from reshard.topology import Topology

F32, BF16, INT64, BOOL = DType.FLOAT32, DType.BFLOAT16, DType.INT64, DType.BOOL


def whole(name: str, numel: int, rank: int, *, dtype: DType = F32, storage: str = "", offset: int = 0) -> Holding:
    return Holding(rank, Region(name, (0,), (numel,)), Address(storage or name, offset, (1,), dtype))


def layout(*holdings: Holding, ties: dict[str, str] | None = None) -> Layout:
    """Each holding is of all of its tensor, but for regions that say otherwise."""
    sizes = {h.region.name: max(o.region.stop for o in holdings if o.region.name == h.region.name) for h in holdings}
    dtypes = {h.region.name: h.address.dtype for h in holdings}
    specs = [TensorSpec(name, size, dtypes[name]) for name, size in sizes.items()]
    return Layout.from_holdings(specs, holdings, ties=ties)


def row_of(layout: Layout, storage: str) -> dict[tuple[int, str, int], int]:
    """(rank, tensor, row) -> row of a fused storage, by addresses."""
    found = {}
    for rank in layout.ranks:
        for holding in (h for h in layout.holdings(rank) if h.address.storage == storage):
            shape = layout.specs[holding.region.name].shape
            width = int(np.prod(shape[1:])) * holding.address.dtype.itemsize
            at = byte_offsets(holding.region, holding.address).tolist()
            for element, offset in zip(elements(holding.region, shape).tolist(), at, strict=True):
                found[rank, holding.region.name.split(".")[-2], element * 4 // width] = offset // width
    return found


def fused_attention(heads: int, groups: int, head_dim: int, leaf: str) -> ModelSpec:
    shapes = (("q", heads, "query"), ("k", groups, "key"), ("v", groups, "value"))
    tail = (1,) if leaf == "weight" else ()
    tensors = tuple(
        ModelTensor(TensorSpec(f"l.0.a.{letter}_proj.{leaf}", (n * head_dim, *tail), F32), cut, 0, head_dim=head_dim)
        for letter, n, cut in shapes
    )
    return ModelSpec("attention", "made up", 1, heads, groups, 1, tensors, {})


def test_biases_are_fused_in_the_order_of_their_weights():
    """q0 q1 k0 v0 q2 q3 k1 v1, two rows a head, on both; the second half is tensor parallel rank 1's."""
    for num_tp in (1, 2):
        rows = []
        for leaf in ("weight", "bias"):
            model = fused_attention(4, 2, 2, leaf)
            found = Layout.from_parallel(model, Mesh({"tp": num_tp}), rules=Rules(style="megatron"))
            rows.append(row_of(found, f"l.0.a.linear_qkv.{leaf}"))
            check_plan(make_plan(found, Layout.from_parallel(model, Mesh({"tp": 1}), rules=Rules(style="vllm"))))
        assert rows[0] == rows[1]
    assert rows[1][1, "k_proj", 2] == 4 and rows[1][1, "v_proj", 3] == 7 and rows[1][0, "q_proj", 3] == 3


def test_every_global_layer_arrives_once_under_its_own_number():
    """48 layers in stages of 25 and 23, each filled with its number."""
    names = [f"model.layers.{layer}.norm.weight" for layer in range(48)]
    tensors = tuple(ModelTensor(TensorSpec(name, (2,), F32), "none", layer=layer) for layer, name in enumerate(names))
    model = ModelSpec("layers", "made up", 48, 1, 1, 1, tensors, {})
    train = Layout.from_parallel(model, Mesh({"pp": 2}), rules=Rules(style="megatron", stages=[25, 23]))
    assert [len(train.holdings(rank)) for rank in (0, 1)] == [25, 23]
    assert {h.address.storage for h in train.holdings(1)} == set(names[25:]), "stages number layers globally"
    plan = make_plan(train, Layout.from_parallel(model, Mesh({"dp": 2}), rules=Rules(style="vllm")))
    check_plan(plan)
    memory = {(rank, name): float(layer) for rank in (0, 1) for layer, name in enumerate(names) if (layer > 24) == rank}
    got = {(c.dst_rank, c.dst.storage): memory[c.src_rank, c.src.storage] for c in plan.copies}
    assert len(plan.copies) == 96
    assert got == {(rank, name): float(layer) for rank in (0, 1) for layer, name in enumerate(names)}


def test_each_stage_and_tensor_rank_reads_its_own_payload():
    """tp 2 and pp 2: worker (pp, tp) is engine rank 2 * pp + tp and gets the fourth of the model that is its own."""
    tensors = tuple(ModelTensor(TensorSpec(f"layers.{layer}.w", (2,), F32), "rows", layer=layer) for layer in range(2))
    model = ModelSpec("payloads", "made up", 2, 1, 1, 1, tensors, {})
    groups = make_groups(Mesh({"pp": 1, "dp": 4, "tp": 1}), tp=2, pp=2, kind="vanilla")
    plan = make_plan(Layout.from_parallel(model, groups.train), Layout.from_parallel(model, groups.generate))
    check_plan(plan)
    for pp in range(2):
        for tp in range(2):
            rank = groups.generate.rank(dp=0, pp=pp, tp=tp)
            assert groups.engine_rank(rank) == 2 * pp + tp
            assert [str(c.region) for c in plan.copies if c.dst_rank == rank] == [f"layers.{pp}.w[{tp}:{tp + 1}]"]


def test_lists_of_parameters_that_differ_stop_before_any_write():
    """One side has a router's bias that the other does not know."""
    bias = whole("mlp.gate.e_score_correction_bias", 8, 0)
    with_bias, without = layout(whole("w", 4, 0), bias), layout(whole("w", 4, 0))
    with pytest.raises(PlanError, match=r"does not know: mlp\.gate\.e_score_correction_bias; rename them, or pass"):
        make_plan(with_bias, without)
    with pytest.raises(PlanError, match=r"has none of these .* needs: mlp\.gate\.e_score_correction_bias;"):
        make_plan(without, with_bias)


def test_a_head_of_its_own_storage_follows_the_embedding_and_crosses_once():
    """A tied trainer, an engine with two storages on one rank: both are filled, the bytes are received once."""
    source = layout(whole("embed", 4, 0), ties={"head": "embed"})
    engine = layout(whole("embed", 4, 1, dtype=BF16), whole("head", 4, 1, dtype=BF16), whole("head", 4, 0, dtype=BF16))
    plan = make_plan(source, engine)
    check_plan(plan)
    assert [(c.region.name, c.src_rank, c.dst_rank, c.hop) for c in plan.copies] == [
        ("head", 0, 0, 0),
        ("embed", 0, 1, 0),
        ("head", 1, 1, 1),
    ]
    assert plan.received_bytes(1) == 8 == plan.certificate.needed_bytes[1]
    assert "head [4]: cast float32 to bfloat16, 2 copies, local 16 B" in plan.explain()
    check_plan(plan.inverse())


def test_an_exact_redundant_head_may_be_skipped_and_nested_ones_are_not():
    names = ("embed", "lm_head.weight", "mtp.lm_head.weight")
    source = layout(*(whole(name, 4, 0) for name in names))
    tied = layout(whole("embed", 4, 1), whole("mtp.lm_head.weight", 4, 1), ties={"lm_head.weight": "embed"})
    with pytest.raises(
        PlanError, match=r"embed <- embed, lm_head\.weight; declare the tie .* or pass all but one name"
    ):
        make_plan(source, tied)
    plan = make_plan(source, tied, ignore=["lm_head.weight"])
    check_plan(plan)
    assert [(c.region.name, c.src.storage) for c in plan.copies] == [(name, name) for name in (names[0], names[2])]
    untied = layout(*(whole(name, 4, 1) for name in names))
    assert len(make_plan(source, untied).copies) == 3


def test_block_scales_follow_true_rows_where_groups_end_inside_a_block():
    """8 groups of 1856 rows are 116 blocks of 128: a group is 14.5 of them, so 14 per group would leave 64 rows out."""
    head_dim, per_group, groups, block = 116, 14, 8, 128
    group_rows = (per_group + 2) * head_dim
    assert (group_rows, groups * group_rows, group_rows % block, group_rows - 14 * block) == (1856, 14848, 64, 64)
    model = fused_attention(per_group * groups, groups, head_dim, "weight")
    (cut,) = (Layout.from_parallel(model, Mesh({"tp": n}), rules=Rules(style="megatron")) for n in (8,))
    whole_rows = row_of(
        Layout.from_parallel(model, Mesh({"tp": 1}), rules=Rules(style="megatron")), "l.0.a.linear_qkv.weight"
    )
    scale_of_row = np.repeat(np.arange(groups * group_rows // block), block)
    for (rank, name, row), at in row_of(cut, "l.0.a.linear_qkv.weight").items():
        true_row = rank * group_rows + at
        assert whole_rows[0, name, row] == true_row
        assert scale_of_row[true_row] == (rank * 14 + (rank * 64 + at) // block)
    blocks = Counter(int(scale_of_row[group_rows + row]) for row in range(group_rows))
    assert (min(blocks), blocks[14], max(blocks), len(blocks)) == (14, 64, 28, 15), (
        "group 1 shares block 14 with group 0"
    )


def test_buffers_travel_in_their_own_types_and_are_never_cast_to_others():
    buffers = [("steps", 3, INT64), ("mask", 5, BOOL), ("bias", 2, F32)]
    source = layout(*(whole(name, numel, 0, dtype=dtype) for name, numel, dtype in buffers))
    plan = make_plan(source, layout(*(whole(name, numel, 1, dtype=dtype) for name, numel, dtype in buffers)))
    check_plan(plan)
    assert plan.received_bytes(1) == 3 * 8 + 5 + 2 * 4 and not any(c.is_cast for c in plan.copies)
    with pytest.raises(PlanError, match=r"not allowed: steps \(int64 to float32\); pass them in allow_casts"):
        make_plan(layout(whole("steps", 3, 0, dtype=INT64)), layout(whole("steps", 3, 1)))


def test_different_elements_at_the_same_bytes_are_refused_by_name():
    source = layout(whole("gate", 4, 0), whole("up", 4, 0))
    fused = [whole("gate", 4, 0, storage="fused"), whole("up", 4, 0, storage="fused", offset=16)]
    check_plan(make_plan(source, layout(*fused)))
    wrong = [fused[0], whole("up", 4, 0, storage="fused", offset=12)]
    message = r"different elements at the same bytes: gate and up \(storage 'fused' of rank 0\); give each tensor bytes"
    with pytest.raises(PlanError, match=message):
        make_plan(source, layout(*wrong))
    with pytest.raises(PlanError, match=message):
        make_plan(source, layout(*wrong), ranks=[0])
    elsewhere = layout(*wrong, whole("gate", 4, 1), whole("up", 4, 1))
    assert len(make_plan(source, elsewhere, ranks=[1]).copies) == 2, "another rank's fault is found by that rank"
    aside = [fused[0], whole("up", 4, 0, storage="fused", offset=14)]
    with pytest.raises(PlanError, match="gate and up"):
        make_plan(source, layout(*aside))
    narrow = [fused[0], whole("up", 4, 0, storage="fused", offset=14, dtype=BF16)]
    with pytest.raises(PlanError, match="gate and up"):
        make_plan(source, layout(*narrow))


def test_interleaved_columns_of_one_storage_do_not_overlap():
    """Two halves of every row, and a transposed view beside them; one column too far is refused."""
    spec = TensorSpec("w", (4, 6), F32)
    source = Layout.from_holdings([spec], [Holding(0, Region("w", (0, 0), (4, 6)), Address("w", 0, (6, 1), F32))])

    def engine(first: int) -> Layout:
        halves = [
            Holding(1, Region("w", (0, a), (4, a + 3)), Address("w", 4 * at, (8, 1), F32))
            for a, at in ((0, 0), (3, first))
        ]
        return Layout.from_holdings([spec], halves)

    for first in (3, 5, 32):
        check_plan(make_plan(source, engine(first)))
    for first in (2, 6, 8):
        with pytest.raises(PlanError, match=r"same bytes: w \(storage 'w' of rank 1\)"):
            make_plan(source, engine(first))


def test_the_certificate_names_nodes_as_the_topology_does():
    plan = make_plan(layout(whole("w", 4, 0)), layout(whole("w", 4, 2)), topology=Topology({0: 7, 2: 3}))
    assert plan.certificate.node_floor_bytes == {3: 16, 7: 0}
    assert "node 3: 16 bytes enter it, which is its floor" in plan.explain()


def test_unknown_and_misplaced_holdings_are_named():
    spec = TensorSpec("w", (4,), F32)
    with pytest.raises(LayoutError, match="holdings of unknown tensors: v, x; list them in specs"):
        Layout.from_holdings([spec], [whole("x", 2, 0), whole("v", 2, 0), whole("w", 4, 0)])
    with pytest.raises(LayoutError, match=r"tensor 'w': rank 0 holds the box \[0\]\.\.\[5\], outside shape \(4,\)"):
        Layout.from_holdings([spec], [whole("w", 5, 0)])
