"""HybridFlow's groups and its Table 2, as exact fractions that our own plans give."""

import itertools
from fractions import Fraction

import pytest

from reshard import DType, Layout, Mesh, ModelSpec, Plan, Rules, TensorSpec, make_groups, make_plan
from reshard.errors import LayoutError
from reshard.groups import paper_costs
from reshard.plan_gather import find_gathers
from reshard.plan_oracle import check_plan
from reshard.spec import ModelTensor

SIZES = [
    (p, t, d, p_g, t_g)
    for p, t, d in [(1, 4, 2), (2, 4, 1), (4, 2, 2), (1, 8, 4), (2, 2, 3), (4, 4, 1)]
    for p_g, t_g in itertools.product((1, 2, 4), (1, 2, 4, 8))
    if p % p_g == 0 and t % t_g == 0
]


def toy(p: int, t: int, d: int, t_g: int = 1) -> ModelSpec:
    """A model whose every part is a whole number of rows: 4 * p layers of one weight each."""
    rows = 2 * p * t * d * t_g
    names = [f"layers.{layer}.w" for layer in range(4 * p)]
    tensors = tuple(
        ModelTensor(TensorSpec(name, (rows, 2), DType.BFLOAT16), "rows", layer=layer)
        for layer, name in enumerate(names)
    )
    return ModelSpec("toy", "made up", 4 * p, 1, 1, 1, tensors, {})


def parts(plan: Plan, model: ModelSpec, what: str) -> set[Fraction]:
    """Bytes of every rank as parts of the model: received, peak of both shards together, or training's alone."""
    found = set()
    for rank in plan.scope:
        train = plan.source.held_bytes(rank)
        needed, held = plan.certificate.needed_bytes[rank], plan.certificate.held_bytes[rank]
        value = {"received": plan.received_bytes(rank), "peak": train + needed - held, "redundant": train - held}[what]
        found.add(Fraction(value, model.num_bytes))
    return found


def test_the_papers_example():
    """1-4-2 to 1-2-2-2, figure 8 of the paper, ranks counted from 0."""
    train = Mesh({"pp": 1, "dp": 2, "tp": 4})
    ours, vanilla = (make_groups(train, tp=2, kind=kind) for kind in ("zero_redundancy", "vanilla"))
    assert ours.generate.groups("tp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert ours.micro_dp == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert vanilla.generate.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert vanilla.micro_dp == ((0, 2), (1, 3), (4, 6), (5, 7))
    model = toy(1, 4, 2)
    held = {}
    for groups in (ours, vanilla):
        plan = make_plan(Layout.from_parallel(model, groups.train), Layout.from_parallel(model, groups.generate))
        check_plan(plan)
        held[groups.kind] = [plan.certificate.held_bytes[rank] for rank in range(8)]
    assert all(held["zero_redundancy"])
    assert [rank for rank, num_bytes in enumerate(held["vanilla"]) if not num_bytes] == [1, 2, 5, 6]


@pytest.mark.parametrize(("p", "t", "d", "p_g", "t_g"), SIZES)
def test_table_2_from_our_plans(p, t, d, p_g, t_g):
    model = toy(p, t, d)
    ours = make_groups(Mesh({"pp": p, "dp": d, "tp": t}), tp=t_g, pp=p_g)
    source = Layout.from_parallel(model, ours.train)
    plan = make_plan(source, Layout.from_parallel(model, ours.generate))
    received, peak, redundant = paper_costs("zero_redundancy", p=p, t=t, d=d, p_g=p_g, t_g=t_g)
    assert parts(plan, model, "received") == {received}
    assert parts(plan, model, "peak") == {peak}
    assert parts(plan, model, "redundant") == {redundant} == {Fraction(0)}
    whole = Layout.from_parallel(model, Mesh({"dp": p * t * d}))
    vanilla = make_groups(Mesh({"pp": p, "dp": d, "tp": t}), tp=t_g, pp=p_g, kind="vanilla")
    sharded = Layout.from_parallel(model, Mesh({"dp": p * t * d}), rules=Rules(fsdp="dp"))
    for kind, shards in (("vanilla", source), ("full_gather", sharded)):
        gather = make_plan(shards, whole)
        received, peak, redundant = paper_costs(kind, p=p, t=t, d=d, p_g=p_g, t_g=t_g)
        assert parts(gather, model, "received") == {received}
        assert parts(gather, model, "peak") == {peak} == {Fraction(1)}
        train_bytes = {Fraction(shards.held_bytes(rank), model.num_bytes) for rank in gather.scope}
        assert train_bytes == {redundant}, "training's shard is kept beside the gathered weights"
    direct = make_plan(source, Layout.from_parallel(model, vanilla.generate))
    assert max(parts(direct, model, "received")) >= max(parts(plan, model, "received"))


@pytest.mark.parametrize(("p", "t", "d", "p_g", "t_g"), [s for s in SIZES if s[0] * s[1] > s[3] * s[4]])
def test_the_transition_is_nothing_but_gathers_inside_micro_groups(p, t, d, p_g, t_g):
    model = toy(p, t, d)
    groups = make_groups(Mesh({"pp": p, "dp": d, "tp": t}), tp=t_g, pp=p_g)
    plan = make_plan(Layout.from_parallel(model, groups.train), Layout.from_parallel(model, groups.generate))
    micro = {rank: index for index, group in enumerate(groups.micro_dp) for rank in group}
    assert all(micro[copy.src_rank] == micro[copy.dst_rank] for copy in plan.copies)
    assert {len(group) for group in groups.micro_dp} == {groups.micro_dp_size} == {p * t // (p_g * t_g)}
    if p == p_g:
        gathers = find_gathers(plan)
        assert {gather.ranks for gather in gathers} == set(groups.micro_dp)
        assert all(gather.in_place for gather in gathers)
        covered = sum(len(gather.rows) for gather in gathers)
        assert covered == plan.table.num


@pytest.mark.parametrize(
    ("p", "t", "d", "p_g", "t_g"), [(1, 2, 4, 1, 8), (1, 2, 2, 1, 4), (2, 2, 4, 4, 4), (1, 4, 2, 2, 2), (2, 2, 2, 1, 4)]
)
def test_generation_may_be_more_parallel_and_then_nothing_that_is_held_is_redundant(p, t, d, p_g, t_g):
    model = toy(p, t, d, t_g)
    groups = make_groups(Mesh({"pp": p, "dp": d, "tp": t}), tp=t_g, pp=p_g)
    plan = make_plan(Layout.from_parallel(model, groups.train), Layout.from_parallel(model, groups.generate))
    check_plan(plan)
    finer = Fraction(1, max(t, t_g) * max(p, p_g))
    size = Fraction(1, t_g * p_g)
    assert parts(plan, model, "received") == {size - finer}


def test_communicators_are_listed_once_and_in_one_order():
    groups = make_groups(Mesh({"pp": 2, "dp": 2, "tp": 2}), tp=1, pp=1)
    found = groups.communicators()
    assert len({c.ranks for c in found}) == len(found)
    assert found[0].name == "train_tp[0,1]"
    assert [c.ranks for c in found if c.name.startswith("micro_dp")] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert found == make_groups(Mesh({"pp": 2, "dp": 2, "tp": 2}), tp=1, pp=1).communicators()
    assert sorted(groups.engine_rank(rank) for rank in range(8)) == list(range(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "generation tp=3 does not fit training tp=4: one must divide the other, for example 1, 2, 4, 8"),
        ({"tp": 4, "pp": 3}, "generation pp=3 does not fit training pp=2"),
        ({"tp": 16}, "needs 4 training replicas to share each shard, but .* make dp a multiple of 4"),
        ({"tp": 2, "micro_dp_size": 2}, r"micro_dp_size=2 does not fit: p\*t/\(p_g\*t_g\) = 2\*4/\(1\*2\) = 4"),
    ],
)
def test_sizes_that_do_not_fit_say_what_would(options, message):
    with pytest.raises(LayoutError, match=message):
        make_groups(Mesh({"pp": 2, "dp": 2, "tp": 4}), **options)
    with pytest.raises(LayoutError, match="fold them into dp"):
        make_groups(Mesh({"cp": 2, "tp": 4}), tp=2)
