"""The planner's promise, on random pairs of layouts, against the brute-force oracle."""

from collections import Counter

import plan_cases
import plan_sweep
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from reshard import Address, DType, Holding, Layout, Plan, Region, TensorSpec, Topology, make_plan
from reshard.plan_io import plan_from_bytes, plan_from_json, plan_to_bytes, plan_to_json
from reshard.plan_oracle import faults_of

NUM_BLOCKS, BATCHES_PER_BLOCK = 13, 11
# At least so many pairs in each block: different ones, and those of each kind.
FEWEST_DIFFERENT = 2_400
FEWEST = {
    **dict.fromkeys(("uneven", "replicated", "fused", "cast", "empty"), 1_000),
    **dict.fromkeys(("strided", "overlapping", "crossing"), 400),
    **dict.fromkeys(("mixed", "tied", "like", "scalar", "in place", "passed on"), 40),
}
# Seeds don't shrink to anything simpler, so a failing pair is reported as it was found, by its size and seed.
relaxed = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
brief = settings(relaxed, max_examples=40)
shrinking = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)


def plan_of(case) -> Plan:
    return make_plan(case.source, case.destination, topology=case.topology)


@relaxed
@given(plan_cases.cases())
def test_labelled_elements_arrive_exactly_once_at_the_floor_from_the_nearest(case):
    assert faults_of(plan_of(case)) == []


@shrinking
@given(plan_cases.small_cases())
def test_small_pairs_that_shrink_to_the_smallest_wrong_one(case):
    assert faults_of(plan_of(case)) == []


@pytest.mark.parametrize("seed", range(1000, 1004))
def test_plans_of_many_tensors(seed):
    assert faults_of(plan_sweep.make_batch(seed).plan()) == []


@pytest.mark.slow
@pytest.mark.parametrize("block", range(1, NUM_BLOCKS + 1))
def test_thirty_thousand_pairs_of_layouts(block):
    assert NUM_BLOCKS * FEWEST_DIFFERENT >= 30_000
    counted: Counter[str] = Counter()
    different: set[bytes] = set()
    for seed in range(block * BATCHES_PER_BLOCK, (block + 1) * BATCHES_PER_BLOCK):
        batch = plan_sweep.make_batch(seed)
        plan = batch.plan()
        assert faults_of(plan) == [], f"seed {seed}"
        plan_sweep.count(batch, plan, counted, different)
    assert set(counted) == set(plan_sweep.KINDS) == set(FEWEST)
    assert len(different) >= FEWEST_DIFFERENT
    assert {kind: counted[kind] for kind, fewest in FEWEST.items() if counted[kind] < fewest} == {}


@brief
@given(plan_cases.cases())
def test_a_rank_alone_plans_exactly_its_part_of_the_whole(case):
    whole = plan_of(case)
    for rank in whole.scope:
        alone = make_plan(case.source, case.destination, topology=case.topology, ranks=[rank])
        assert list(alone.copies) == list(whole.copies_of(rank))
        assert alone.digest == whole.digest
        assert alone.certificate.floor_bytes(rank) == whole.certificate.floor_bytes(rank) == whole.received_bytes(rank)


@brief
@given(plan_cases.cases())
def test_inverse_makes_the_source_true_again(case):
    plan = plan_of(case)
    held = {c for n in case.destination.specs for h in case.destination.holders(n) for c in [(n, h.region)]}
    dtypes = {h.address.dtype for n in case.destination.specs for h in case.destination.holders(n)}
    covered = all(any(r.numel == s.numel for m, r in held if m == n) for n, s in case.destination.specs.items())
    if covered and len(dtypes) == 1:
        assert faults_of(plan.inverse()) == []
        assert plan.inverse().inverse() == plan


@brief
@given(plan_cases.cases(), st.sampled_from([(plan_to_bytes, plan_from_bytes), (plan_to_json, plan_from_json)]))
def test_stored_plans_come_back_equal(case, form):
    plan = plan_of(case)
    write, read = form
    again = read(write(plan))
    assert again == plan and again.digest == plan.digest and again.content_digest == plan.content_digest
    assert list(again.copies) == list(plan.copies)
    assert again.certificate == plan.certificate
    assert str(again) == str(plan) and again.explain() == plan.explain()


@brief
@given(plan_cases.cases())
def test_equal_inputs_give_equal_plans_and_other_inputs_other_digests(case):
    first, second = plan_of(case), plan_of(case)
    assert first == second and hash(first) == hash(second)
    assert make_plan(case.source, case.destination, topology=case.topology, allow_casts=_all_floats()) == first
    wider = make_plan(
        case.source,
        case.destination,
        topology=case.topology,
        allow_casts=[*_all_floats(), (DType.INT8, DType.INT32)],
    )
    assert wider.digest != first.digest and wider.content_digest == first.content_digest


def _all_floats():
    return [(a, b) for a in plan_cases.FLOATS for b in plan_cases.FLOATS if a is not b]


@relaxed
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 7), st.integers(1, 3), st.integers(1, 4), st.integers(0, 9))
def test_loads_are_level(num_sources, num_wanting, num_tensors, parts, nodes, seed):
    """Like tensors, in equal parts, each held by some ranks and wanted by others, which may share nodes.

    No source of a part sends more than one piece more than another, and no rank of a node receives from outside more
    than one piece more than its neighbours.
    """
    held = [rank * parts + part for rank in range(num_sources) for part in range(parts)]
    wanting = [len(held) + rank for rank in range(num_wanting)]
    specs = [TensorSpec(f"{seed}.{index}", (parts, 3), DType.BFLOAT16) for index in range(num_tensors)]

    def place(spec, rank, first, last):
        return Holding(rank, Region(spec.name, (first, 0), (last, 3)), Address(spec.name, 0, (3, 1), spec.dtype))

    source = Layout.from_holdings(specs, [place(s, r, r % parts, r % parts + 1) for s in specs for r in held])
    destination = Layout.from_holdings(specs, [place(spec, rank, 0, parts) for spec in specs for rank in wanting])
    everywhere = dict.fromkeys(held, 0) | {rank: 1 + rank % nodes for rank in wanting}
    for topology in (None, Topology(everywhere)):
        plan = make_plan(source, destination, topology=topology)
        for part in range(parts):
            sent = [plan.sent_bytes(rank) for rank in held if rank % parts == part]
            assert max(sent) - min(sent) <= 6
        for node in range(1, nodes + 1) if topology else ():
            own = [rank for rank in wanting if everywhere[rank] == node]
            entered = [sum(c.moved_bytes for c in plan.copies if c.dst_rank == rank and c.hop == 0) for rank in own]
            assert not own or max(entered) - min(entered) <= 6


@pytest.mark.slow
@settings(relaxed, max_examples=100)
@given(plan_cases.cases(max_size=10))
def test_many_larger_pairs(case):
    assert faults_of(plan_of(case)) == []
