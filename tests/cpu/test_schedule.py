"""Messages cut from copies under a budget, and the rounds that they and staged gathers make."""

from dataclasses import replace

import plan_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import Address, Copy, DType, Layout, Mesh, ModelSpec, Region, Rules, TensorSpec, make_plan
from reshard.errors import PlanError
from reshard.plan_gather import find_gathers, gather_communicators
from reshard.schedule import ALIGNMENT_BYTES, pack_pair, wire_bytes, wire_dtype
from reshard.spec import ModelTensor
from reshard.transports.collective_drafts import Way, choose_way, exchange_drafts, own_rows, staged_drafts

F32, BF16 = DType.FLOAT32, DType.BFLOAT16


def copy(shape: tuple[int, ...], *, src: DType = F32, dst: DType = BF16, wire: DType = BF16) -> Copy:
    strides = tuple(4 ** (len(shape) - dim) for dim in range(len(shape)))
    return Copy(
        region=Region.whole("w", shape),
        src_rank=0,
        dst_rank=1,
        src=Address("w", 0, strides, src),
        dst=Address("w", 0, strides, dst),
        wire=wire,
    )


@settings(max_examples=150, deadline=None)
@given(plan_cases.cases(), st.integers(16, 400))
def test_messages_hold_every_element_once_in_order_within_the_budget(case, budget_bytes):
    plan = make_plan(case.source, case.destination, topology=case.topology)
    pairs: dict[tuple[int, int], list[Copy]] = {}
    for c in plan.copies:
        if not c.is_local:
            pairs.setdefault((c.src_rank, c.dst_rank), []).append(c)
    for (src, dst), copies in pairs.items():
        messages = pack_pair(copies, budget_bytes=budget_bytes)
        slots = [slot for message in messages for slot in message.slots]
        assert sum(slot.copy.region.numel for slot in slots) == sum(c.region.numel for c in copies)
        assert len({(slot.copy.region, slot.copy.dst) for slot in slots}) == len(slots)
        for message in messages:
            assert (message.src_rank, message.dst_rank) == (src, dst) and 0 < message.num_bytes <= budget_bytes
            ends = [slot.offset_bytes + wire_bytes(slot.copy) for slot in message.slots]
            assert ends[-1] == message.num_bytes
            assert all(slot.offset_bytes % ALIGNMENT_BYTES == 0 for slot in message.slots)
            assert all(end <= slot.offset_bytes for end, slot in zip(ends, message.slots[1:], strict=False))


def test_what_a_later_hop_passes_on_is_no_wider_than_what_came():
    relayed = copy((4, 4), src=F32, dst=F32, wire=BF16)
    assert wire_dtype(relayed) is BF16 and wire_bytes(relayed) == relayed.moved_bytes == 32


def test_a_budget_that_holds_no_element_is_refused():
    with pytest.raises(PlanError, match="a staging budget of 8 bytes a pair is too small: give at least 16"):
        pack_pair([copy((4, 4))], budget_bytes=8)
    other = replace(copy((4, 4)), dst_rank=2)
    with pytest.raises(PlanError, match="the copies of one pair of ranks, got others beside 0 -> 1"):
        pack_pair([copy((4, 4)), other], budget_bytes=64)
    assert pack_pair([], budget_bytes=64) == ()


def gathering_plan():
    """Rows over four ranks become whole, columns likewise, one of them with large parts."""
    sizes = {"large": ("rows", (2048, 512)), "small": ("rows", (64, 8)), "columns": ("columns", (64, 64))}
    sides = []
    for dtype, mesh in ((F32, Mesh({"tp": 4})), (BF16, Mesh({"dp": 4}))):
        tensors = [ModelTensor(TensorSpec(name, shape, dtype), cut, layer=0) for name, (cut, shape) in sizes.items()]
        spec = ModelSpec("m", "made up", 1, 1, 1, 1, tuple(tensors), {})
        sides.append(Layout.from_parallel(spec, mesh, rules=Rules()))
    return make_plan(*sides)


def test_the_way_of_each_gather():
    plan = gathering_plan()
    gathers = {gather.name: gather for gather in find_gathers(plan)}
    everyone = (0, 1, 2, 3)
    assert [(c.name, c.ranks) for c in gather_communicators(plan)] == [("gather[0,1,2,3]", everyone)]
    ways = {mode: [choose_way(gathers[n], mode, {everyone}) for n in ("large", "small", "columns")] for mode in MODES}
    assert ways == {
        "all_gather": [Way.IN_PLACE, Way.IN_PLACE, Way.STAGED],
        "messages": [Way.DIRECT, Way.STAGED, Way.STAGED],
        "off": [None, None, None],
    }
    assert choose_way(gathers["large"], "all_gather", ()) is None, "no group of these ranks"
    turned = replace(gathers["large"], ranks=(1, 0, 2, 3))
    assert choose_way(turned, "all_gather", {everyone}) is Way.STAGED, "a group's members are in ascending order"
    pair = replace(gathers["columns"], ranks=(0, 1))
    assert choose_way(pair, "all_gather", {(0, 1)}) is None, "between two, messages cost the same"


MODES = ("all_gather", "messages", "off")


def test_staged_gathers_lie_slot_by_slot_and_alike_on_every_rank():
    plan = gathering_plan()
    members = (0, 1, 2, 3)
    rounds = {}
    for rank in members:
        found = [own_rows(plan, gather, rank) for gather in find_gathers(plan)]
        rounds[rank] = staged_drafts({members: found}, rank, set_bytes=64 << 10)
        for draft in rounds[rank]:
            assert draft.num_bytes <= 64 << 10 and draft.gather == members
            assert [place.is_outgoing for place in draft.places] == [member == rank for member in members]
    shapes = {rank: [(d.num_bytes, [p.offset_bytes for p in d.places]) for d in rounds[rank]] for rank in members}
    assert all(shapes[rank] == shapes[0] for rank in members)
    received = sum(p.message.num_bytes for d in rounds[0] for p in d.places if not p.is_outgoing)
    assert received == plan.received_bytes(0)


def test_rounds_of_messages_stay_within_both_directions_of_every_peer():
    plan = gathering_plan()
    traffic = [c for c in plan.copies_of(1) if not c.is_local]
    drafts = exchange_drafts(traffic, 1, pair_bytes=1 << 12)
    assert all(draft.num_bytes <= 6 << 12 and not draft.gather and draft.hop == 0 for draft in drafts)
    assert sum(p.message.num_bytes for d in drafts for p in d.places if not p.is_outgoing) == plan.received_bytes(1)
