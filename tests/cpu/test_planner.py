"""The planner on cases that a person can check by hand: who sends what, what is refused and how it is said."""

from collections import Counter

import numpy as np
import pytest

from reshard import Address, DType, Holding, Layout, Region, TensorSpec, Topology, make_plan
from reshard.errors import PlanError
from reshard.plan_digest import DigestReport, check_reports, digest_report
from reshard.plan_gather import find_gathers
from reshard.plan_oracle import check_plan

F32, BF16 = DType.FLOAT32, DType.BFLOAT16


def holding(
    rank: int, name: str, *spans: tuple[int, int], dtype: DType = F32, storage: str = "", offset: int = 0
) -> Holding:
    shape = [b - a for a, b in spans]
    strides = tuple(int(np.prod(shape[dim + 1 :])) for dim in range(len(shape)))
    region = Region(name, tuple(a for a, _ in spans), tuple(b for _, b in spans))
    return Holding(rank, region, Address(storage or name, offset, strides, dtype))


def rows(num: int, parts: dict[int, tuple[int, int]], *, name: str = "w", width: int = 4, **how) -> Layout:
    spec = TensorSpec(name, (num, width), how.get("dtype", F32))
    return Layout.from_holdings([spec], [holding(rank, name, span, (0, width), **how) for rank, span in parts.items()])


def join(*layouts: Layout, ranks: range | None = None) -> Layout:
    specs = [spec for layout in layouts for spec in layout.specs.values()]
    holdings = [h for layout in layouts for name in layout.specs for h in layout.holders(name)]
    return Layout.from_holdings(specs, holdings, ranks=ranks)


def test_a_rank_never_receives_what_it_holds():
    source = rows(8, {0: (0, 4), 1: (4, 8)})
    destination = rows(8, {0: (0, 8), 1: (2, 6)}, dtype=BF16)
    plan = make_plan(source, destination)
    check_plan(plan)
    assert [(c.src_rank, c.dst_rank, str(c.region)) for c in plan.copies] == [
        (0, 0, "w[0:4, 0:4]"),
        (1, 0, "w[4:8, 0:4]"),
        (0, 1, "w[2:4, 0:4]"),
        (1, 1, "w[4:6, 0:4]"),
    ]
    assert plan.received_bytes(0) == 16 * 2 == plan.certificate.floor_bytes(0)
    assert plan.received_bytes(1) == 8 * 2
    assert plan.sent_bytes(1) == 16 * 2
    assert [len(part) for part in (plan.for_rank(0).sends, plan.for_rank(0).receives, plan.for_rank(0).local)] == [
        1,
        1,
        1,
    ]


def test_growing_casts_travel_narrow():
    plan = make_plan(rows(4, {0: (0, 4)}, dtype=BF16), rows(4, {1: (0, 4)}))
    assert plan.copies[0].wire is BF16
    assert plan.received_bytes(1) == plan.copies[0].moved_bytes == 16 * 2
    assert (plan.copies[0].read_bytes, plan.copies[0].written_bytes) == (32, 64)


def test_replicas_of_like_tensors_are_read_in_turn():
    names = [f"layers.{layer}.w" for layer in range(6)]
    source = join(*(rows(4, dict.fromkeys(range(3), (0, 4)), name=name) for name in names))
    destination = join(*(rows(4, {9: (0, 4)}, name=name) for name in names))
    plan = make_plan(source, destination)
    assert [plan.sent_bytes(rank) for rank in range(3)] == [2 * 64] * 3


def test_a_large_tensor_with_too_few_sends_is_cut_so_that_its_replicas_share_the_load():
    shape = (3 * 2**10, 2**10)
    spec = TensorSpec("embed", shape, F32)
    everything = [(0, extent) for extent in shape]
    source = Layout.from_holdings([spec], [holding(rank, "embed", *everything) for rank in range(3)])
    destination = Layout.from_holdings([spec], [holding(rank, "embed", *everything) for rank in (3, 4)])
    plan = make_plan(source, destination)
    total = 2 * spec.numel * 4
    assert [plan.sent_bytes(rank) for rank in range(3)] == [total // 3] * 3
    assert plan.received_bytes(3) == plan.received_bytes(4) == total // 2


def test_the_nearest_replica_sends():
    topology = Topology({0: 0, 1: 1, 2: 1, 3: 1, 4: 0}, gpus={0: 0, 1: 1, 2: 2, 3: 2, 4: 4})
    source = rows(4, {0: (0, 4), 1: (0, 4), 2: (0, 4)})
    plan = make_plan(source, rows(4, {3: (0, 4), 4: (0, 4)}), topology=topology)
    assert [(c.src_rank, c.dst_rank) for c in plan.copies] == [(2, 3), (0, 4)]
    without = make_plan(rows(4, {0: (0, 4), 2: (0, 4)}), rows(4, {2: (0, 4)}), topology=topology)
    assert without.copies[0].is_local


def test_bytes_enter_a_node_once_and_fan_out_inside():
    names = [f"layers.{layer}.w" for layer in range(4)]
    topology = Topology.regular(range(12), ranks_per_node=4)
    source = join(*(rows(4, {0: (0, 2), 1: (2, 4)}, name=name) for name in names))
    destination = join(*(rows(4, dict.fromkeys(range(4, 12), (0, 4)), name=name, dtype=BF16) for name in names))
    plan = make_plan(source, destination, topology=topology)
    check_plan(plan)
    assert plan.certificate.node_floor_bytes == {0: 0, 1: 4 * 32, 2: 4 * 32}
    entering = Counter(c.dst_rank for c in plan.copies if c.hop == 0)
    assert set(entering.values()) == {2 * 4 * 2 // 8}, "leaders take turns"
    assert all(topology.node(c.src_rank) == topology.node(c.dst_rank) for c in plan.copies if c.hop == 1)
    flat = make_plan(source, destination, topology=Topology.regular(range(12), ranks_per_node=4, fan_out=False))
    assert {c.hop for c in flat.copies} == {0}


def test_a_second_copy_on_one_rank_does_not_cross_again():
    spec = TensorSpec("embed", (4,), F32)
    source = Layout.from_holdings([spec], [holding(0, "embed", (0, 4))])
    two = [holding(1, "embed", (0, 4), storage="embed"), holding(1, "embed", (0, 4), storage="head")]
    plan = make_plan(source, Layout.from_holdings([spec], two))
    check_plan(plan)
    assert [(c.src_rank, c.hop, c.src.storage, c.dst.storage) for c in plan.copies] == [
        (0, 0, "embed", "embed"),
        (1, 1, "embed", "head"),
    ]
    assert plan.received_bytes(1) == 16


def test_tied_engine_head_on_the_last_stage_follows_the_embedding():
    """A tied model, generation in two stages: the last stage's own head must be filled although no source has that
    name.
    """
    source = Layout.from_holdings(
        [TensorSpec("embed", (4,), F32)], [holding(0, "embed", (0, 4))], ties={"head": "embed"}
    )
    specs = [TensorSpec("embed", (4,), F32), TensorSpec("head", (4,), F32)]
    stages = Layout.from_holdings(specs, [holding(0, "embed", (0, 4)), holding(1, "head", (0, 4))])
    plan = make_plan(source, stages)
    check_plan(plan)
    assert {(c.region.name, c.dst_rank) for c in plan.copies} == {("embed", 0), ("head", 1)}


def test_equal_addresses_are_in_place_only_under_one_memory_label():
    spec = TensorSpec("w", (4,), F32)
    shared = [Layout.from_holdings([spec], [holding(0, "w", (0, 4))], memory=label) for label in ("gpu", "gpu", None)]
    aliased = make_plan(shared[0], shared[1])
    assert [c.is_alias for c in aliased.copies] == [True]
    assert aliased.table.written_bytes.sum() == 0
    assert not make_plan(shared[0], shared[2]).copies[0].is_alias
    assert not make_plan(shared[2], shared[2]).copies[0].is_alias
    check_plan(aliased)


def test_moving_within_shared_memory_onto_what_others_read_is_refused():
    spec = TensorSpec("w", (4,), F32)
    here = [holding(0, "w", (0, 2), offset=0), holding(0, "w", (2, 4), offset=8)]
    swapped = [holding(0, "w", (0, 2), offset=8), holding(0, "w", (2, 4), offset=0)]
    layouts = [Layout.from_holdings([spec], held, memory="gpu") for held in (here, swapped)]
    with pytest.raises(PlanError, match=r"overwrites w on rank 0 .* before everything has been read"):
        make_plan(*layouts)


def test_gathering_in_place_next_to_what_others_read_is_allowed():
    """Two ranks hold two columns each of a whole weight that is already theirs, and fill in the other two."""
    spec = TensorSpec("w", (4, 4), F32)
    own = [
        Holding(rank, Region("w", (0, 2 * rank), (4, 2 * rank + 2)), Address("w", 8 * rank, (4, 1), F32))
        for rank in range(2)
    ]
    whole = [holding(rank, "w", (0, 4), (0, 4)) for rank in range(2)]
    plan = make_plan(*(Layout.from_holdings([spec], held, memory="gpu") for held in (own, whole)))
    check_plan(plan)
    assert Counter((c.is_local, c.is_alias) for c in plan.copies) == {(True, True): 2, (False, False): 2}


def test_adjacent_boxes_from_one_holding_are_one_copy():
    """The overlap of rank 1 cuts rank 0's box in two, but rank 0 copies its own box in one piece."""
    source = rows(8, {0: (0, 8), 1: (2, 4)})
    plan = make_plan(source, rows(8, {0: (0, 8)}))
    assert [str(c.region) for c in plan.copies] == ["w[0:8, 0:4]"]


@pytest.mark.parametrize(
    ("source", "destination", "options", "message"),
    [
        (
            rows(4, {0: (0, 4)}),
            rows(4, {0: (0, 4)}, name="v"),
            {},
            "none of these tensors that the destination needs: v;",
        ),
        (
            join(rows(4, {0: (0, 4)}), rows(4, {0: (0, 4)}, name="x")),
            rows(4, {0: (0, 4)}),
            {},
            "destination does not know: x;",
        ),
        (rows(4, {0: (0, 4)}), rows(6, {0: (0, 6)}), {}, r"global shapes differ: w \[4, 4\] to \[6, 4\]"),
        (
            rows(4, {0: (0, 2)}),
            rows(4, {0: (0, 4)}),
            {},
            r"no source rank holds these regions.*w\[0:4, 0:4\], of which 8 elements",
        ),
        (
            rows(4, {0: (0, 4)}),
            rows(4, {0: (0, 4)}, dtype=BF16),
            {"allow_casts": []},
            r"not allowed: w \(float32 to bfloat16\)",
        ),
        (
            rows(4, {0: (0, 4)}),
            rows(4, {0: (0, 4)}, dtype=DType.FLOAT8_E4M3FN),
            {},
            r"not allowed: w \(float32 to float8_e4m3fn\)",
        ),
        (rows(4, {0: (0, 4)}), rows(4, {0: (0, 4)}), {"ranks": [3]}, r"ranks \[3\] are in neither layout"),
    ],
)
def test_what_can_not_be_planned_is_named(source, destination, options, message):
    with pytest.raises(PlanError, match=message):
        make_plan(source, destination, **options)


def test_unused_source_tensors_travel_only_if_not_ignored():
    source = join(rows(4, {0: (0, 4)}), rows(4, {0: (0, 4)}, name="value_head.w"))
    assert len(make_plan(source, rows(4, {0: (0, 4)}), ignore=["value_head.*"]).copies) == 1


def test_replicas_of_different_dtypes_conflict():
    spec = TensorSpec("w", (4,), F32)
    source = Layout.from_holdings([spec], [holding(0, "w", (0, 4)), holding(1, "w", (0, 4), dtype=BF16)])
    with pytest.raises(PlanError, match=r"replicas conflict in dtype: w \(float32, bfloat16\)"):
        make_plan(source, Layout.from_holdings([spec], [holding(0, "w", (0, 4))]))


def test_separate_sources_of_a_tied_destination_conflict():
    specs = [TensorSpec(name, (4,), F32) for name in ("embed", "head")]
    source = Layout.from_holdings(specs, [holding(0, name, (0, 4)) for name in ("embed", "head")])
    tied = Layout.from_holdings(specs[:1], [holding(0, "embed", (0, 4))], ties={"head": "embed"})
    with pytest.raises(PlanError, match="ties tensors that the source holds separately: embed <- embed, head;"):
        make_plan(source, tied)


def test_rank_outside_a_partial_plan_is_refused():
    plan = make_plan(rows(4, {0: (0, 4)}), rows(4, {1: (0, 4)}), ranks=[1])
    with pytest.raises(PlanError, match=r"rank 0 is not in this plan, which covers ranks \[1\]"):
        plan.for_rank(0)


def reports(sources: list[Layout], destination: Layout, **options) -> list[DigestReport]:
    plans = [make_plan(source, destination, ranks=[rank], **options) for rank, source in enumerate(sources)]
    sent = [digest_report(plan, rank) for rank, plan in enumerate(plans)]
    return [DigestReport.from_bytes(report.to_bytes()) for report in sent]


def test_digest_check_names_the_rank_and_the_first_difference():
    good, destination = rows(4, {0: (0, 2), 1: (2, 4)}), rows(4, dict.fromkeys(range(4), (0, 4)))
    check_reports(reports([good] * 4, destination))
    moved = join(rows(4, {0: (0, 1), 1: (1, 4)}))
    with pytest.raises(
        PlanError, match=r"rank 2 planned from other inputs than the 3 ranks like rank 0: .* tensor 'w' lies"
    ):
        check_reports(reports([good, good, moved, good], destination))
    changed = reports([good] * 4, destination)
    changed[1] = reports([good] * 4, destination, allow_casts=[])[1]
    with pytest.raises(PlanError, match=r"rank 1 planned from other inputs .* the options differ"):
        check_reports(changed)


def test_digest_check_finds_sends_that_nobody_expects():
    good, destination = rows(4, {0: (0, 2), 1: (2, 4)}), rows(4, dict.fromkeys(range(2), (0, 4)))
    sent = reports([good] * 2, destination)
    tampered = DigestReport.from_bytes(sent[0].to_bytes().replace(sent[0].sends[1].encode(), b"0" * 16))
    with pytest.raises(PlanError, match="what rank 0 sends to rank 1 is not what rank 1 expects"):
        check_reports([tampered, sent[1]])


def test_a_gather_inside_micro_groups_is_recognised_and_an_uneven_one_is_not():
    """Four row shards, generation in two halves: ranks 0, 1 gather the upper half, ranks 2, 3 the lower one."""
    source = rows(8, {rank: (2 * rank, 2 * rank + 2) for rank in range(4)})
    halves = rows(8, {0: (0, 4), 1: (0, 4), 2: (4, 8), 3: (4, 8)})
    gathers = find_gathers(make_plan(source, halves))
    assert [(g.name, g.ranks, g.part_bytes, g.in_place, len(g.rows)) for g in gathers] == [
        ("w", (0, 1), 32, True, 4),
        ("w", (2, 3), 32, True, 4),
    ]
    swapped = rows(8, {1: (0, 2), 0: (2, 4), 2: (4, 6), 3: (6, 8)})
    assert find_gathers(make_plan(swapped, halves))[0].ranks == (1, 0)
    assert find_gathers(make_plan(rows(8, {0: (0, 3), 1: (3, 8)}), rows(8, {0: (0, 8), 1: (0, 8)}))) == ()
    assert find_gathers(make_plan(source, rows(8, {0: (0, 4), 2: (4, 8), 3: (4, 8)})))[0].ranks == (2, 3)


def test_a_gather_of_columns_is_regular_but_not_in_place():
    spec = TensorSpec("w", (4, 4), F32)
    source = Layout.from_holdings([spec], [holding(rank, "w", (0, 4), (2 * rank, 2 * rank + 2)) for rank in range(2)])
    gathers = find_gathers(make_plan(source, rows(4, {0: (0, 4), 1: (0, 4)})))
    assert [(g.ranks, g.in_place) for g in gathers] == [((0, 1), False)]


def test_print_and_explain_tell_the_whole_story():
    source = join(rows(4, {0: (0, 2), 1: (2, 4)}), ranks=range(2))
    destination = Layout.from_holdings(
        [TensorSpec("w", (4, 4), BF16)],
        [holding(rank, "w", (0, 4), (0, 4), dtype=BF16) for rank in range(2)],
        opaque={1: ["kv_scale"]},
    )
    plan = make_plan(source, destination)
    lines = str(plan).splitlines()
    assert lines[0].startswith(f"Plan {plan.digest[:12]}: 1 tensors, 4 copies, ranks 2 -> 2, 32 B between ranks")
    assert lines[2].split() == ["0", "32", "B", "16", "B", "16", "B", "16", "B", "16", "B", "0", "B"]
    account = plan.explain()
    assert "rank 1: needs 32 bytes, holds 16 of them, floor 16, receives 16" in account
    assert "w [4, 4]: cast float32 to bfloat16, 4 copies, local 32 B, received 32 B" in account
    assert "rank 1: opaque in the destination, take their owner's reload path: kv_scale" in account


def test_plan_files_are_checked(tmp_path):
    plan = make_plan(rows(4, {0: (0, 4)}), rows(4, {1: (0, 4)}), topology=Topology.regular(range(2), ranks_per_node=1))
    for name in ("plan.json", "plan.bin"):
        plan.save(tmp_path / name)
        assert type(plan).load(tmp_path / name) == plan
    data = (tmp_path / "plan.json").read_text()
    for damage, message in (
        (data.replace('"version": 1', '"version": 99'), "of version 1, got 'reshard plan' of version 99"),
        (data.replace('"src_rank": [\n   0', '"src_rank": [\n   1'), "the plan's copies are damaged: digest"),
        (data[: len(data) // 2], "is not a plan or is damaged"),
        ("[]", "expected a JSON object"),
    ):
        (tmp_path / "bad.json").write_text(damage)
        with pytest.raises(PlanError, match=message):
            type(plan).load(tmp_path / "bad.json")
    (tmp_path / "bad.bin").write_bytes((tmp_path / "plan.bin").read_bytes()[:-9])
    with pytest.raises(PlanError, match="is not a plan or is damaged"):
        type(plan).load(tmp_path / "bad.bin")
