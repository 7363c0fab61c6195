"""The Resharder on one process: labelled weights, two updates, every refusal."""

import pytest
import torch

import reshard
from reshard.errors import LayoutError, PlanError, StateError, TransportError, VerifyError
from reshard.resharder import Resharder, State
from reshard.transports.base import BoundTransfer, Endpoint


def labelled(shape, start=0, dtype=torch.float32):
    size = torch.Size(shape).numel()
    return (torch.arange(size) % 251 + start).reshape(shape).to(dtype)


def trainer_tensors():
    return {"embed.weight": labelled((12, 8), 1), "proj.weight": labelled((8, 8), 2), "norm.weight": labelled((8,), 3)}


def zeros_like(tensors, dtype=torch.bfloat16):
    return {name: torch.zeros_like(t, dtype=dtype) for name, t in tensors.items()}


def bind(source, destination, **options):
    plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(destination))
    return Resharder(plan, source, destination, **options)


def test_two_updates_arrive_cast_to_the_bit_and_in_place():
    source = trainer_tensors()
    destination = zeros_like(source)
    addresses = {name: t.data_ptr() for name, t in destination.items()}
    with bind(source, destination) as resharder:
        for step in range(1, 3):
            for tensor in source.values():
                tensor.add_(0.37 * step)
            stats = resharder.run()
            for name, tensor in source.items():
                assert torch.equal(destination[name], tensor.bfloat16()), name
            assert resharder.version == step == stats.num_transitions
            assert resharder.verify() == sum(t.numel() * 2 for t in source.values())
    assert addresses == {name: t.data_ptr() for name, t in destination.items()}
    assert stats.received_bytes == 0 and stats.num_launches == 1 and stats.staging_bytes == 0
    assert stats.local_bytes == sum(t.numel() * 2 for t in source.values())


def test_a_strided_and_a_scalar_tensor():
    backing = torch.zeros(16, 10)
    source = {"w": labelled((8, 5)), "scale": torch.tensor(1.5)}
    destination = {"w": backing[::2, ::2], "scale": torch.zeros((), dtype=torch.bfloat16)}
    with bind(source, destination) as resharder:
        resharder.run()
        resharder.verify()
    assert torch.equal(backing[::2, ::2], source["w"]) and destination["scale"].item() == 1.5
    backing[::2, ::2] = 0
    assert backing.count_nonzero() == 0, "elements between the strides were written"


def test_tied_tensors_arrive_once_and_both_names_see_them():
    tied = labelled((6, 4), 5)
    source = {"embed.weight": tied, "lm_head.weight": tied}
    target = torch.zeros(6, 4, dtype=torch.bfloat16)
    destination = {"embed.weight": target, "lm_head.weight": target}
    with bind(source, destination) as resharder:
        tied.mul_(2)
        stats = resharder.run()
    assert torch.equal(target, tied.bfloat16())
    assert stats.local_bytes == 6 * 4 * 2


def test_the_same_tensors_on_both_sides_cost_nothing():
    source = trainer_tensors()
    with bind(source, source) as resharder:
        before = {name: t.clone() for name, t in source.items()}
        stats = resharder.run()
        assert (stats.num_launches, stats.local_bytes) == (0, 0)
        assert stats.aliased_bytes == sum(t.numel() * 4 for t in source.values())
        resharder.require_complete()
        resharder.train()
        with pytest.raises(StateError, match=rf"{stats.aliased_bytes} bytes of the destination are the training wei"):
            resharder.require_complete()
        resharder.run()
        resharder.require_complete()
    assert all(torch.equal(before[name], t) for name, t in source.items())


@pytest.mark.parametrize("side", ["source", "destination"])
def test_reallocated_tensors_are_caught_before_anything_is_written(side):
    source = trainer_tensors()
    destination = zeros_like(source)
    with bind(source, destination) as resharder:
        resharder.run()
        victim = (source if side == "source" else destination)["proj.weight"]
        keep = victim.data
        victim.data = victim.data.clone()
        source["norm.weight"].add_(1)
        before = destination["norm.weight"].clone()
        with pytest.raises(
            StateError, match=rf"1 {side} tensors were re-allocated .* 'proj.weight'; nothing was written"
        ):
            resharder.run()
        assert torch.equal(destination["norm.weight"], before)
        victim.data = keep
        resharder.run()
        assert resharder.version == 2


def test_missing_wrong_and_short_tensors_are_named():
    source = trainer_tensors()
    destination = zeros_like(source)
    plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(destination))
    lacking = {name: t for name, t in source.items() if name != "proj.weight"}
    with pytest.raises(LayoutError, match=r"'proj.weight' but no such source tensor was given"):
        Resharder(plan, lacking, destination)
    with pytest.raises(LayoutError, match=r"destination tensor 'norm.weight' is float32 but its Layout says bfloat16"):
        Resharder(plan, source, destination | {"norm.weight": torch.zeros(8)})
    with pytest.raises(LayoutError, match=r"'norm.weight' holds 8 bytes but its Layout reaches byte 16"):
        Resharder(plan, source, destination | {"norm.weight": torch.zeros(4, dtype=torch.bfloat16)})


def test_states_and_versions():
    source = trainer_tensors()
    resharder = bind(source, zeros_like(source))
    assert resharder.state is State.TRAINING
    with pytest.raises(StateError, match="never been filled"):
        resharder.require_complete()
    with pytest.raises(StateError, match=r"no transition is in flight .*call start\(\) first"):
        resharder.wait()
    resharder.start(version=7)
    with pytest.raises(StateError, match=r"a transition is in flight: call wait\(\)"):
        resharder.start()
    with pytest.raises(StateError, match="cannot go to training from state transition"):
        resharder.train()
    resharder.wait()
    assert resharder.state is State.GENERATING and resharder.version == 7
    resharder.require_complete()
    with pytest.raises(StateError, match="version 7 is not newer than 7"):
        resharder.start(version=7)
    resharder.train()
    assert resharder.state is State.TRAINING
    resharder.close()
    resharder.close()
    with pytest.raises(StateError, match="closed"):
        resharder.run()


class FailingTransport:
    """Breaks on the transitions listed, after the real transport has written."""

    name = "failing"

    def __init__(self, inner, fail_on):
        self.inner, self.fail_on = inner, fail_on

    def bind(self, plan, **options):
        return FailingTransfer(self.inner.bind(plan, **options), self.fail_on)


class FailingTransfer(BoundTransfer):
    def __init__(self, bound, fail_on):
        self.bound, self.fail_on, self.count = bound, fail_on, 0
        self.num_launches, self.staging_bytes = 1, 0

    def begin(self, *, stream):
        self.count += 1
        self.bound.begin(stream=stream)

    def push(self, part, *, stream):
        self.bound.push(part, stream=stream)

    def wait(self, *, deadline_s):
        if self.count in self.fail_on:
            raise TransportError("rank 1 left during step 2")

    def close(self):
        self.bound.close()


def test_a_failed_transition_leaves_training_intact_and_generation_refused():
    source = trainer_tensors()
    kept = {name: t.clone() for name, t in source.items()}
    transport = FailingTransport(reshard.LocalTransport(), fail_on={2})
    resharder = bind(source, zeros_like(source), transport=transport)
    resharder.run()
    with pytest.raises(TransportError, match="rank 1 left"):
        resharder.run()
    assert resharder.state is State.STALE and resharder.version == 1
    assert all(torch.equal(kept[name], t) for name, t in source.items())
    with pytest.raises(StateError, match=r"not whole \(state stale\)"):
        resharder.require_complete()
    resharder.run()
    resharder.require_complete()
    assert resharder.version == 2


def test_verify_names_the_first_element_that_differs():
    source = trainer_tensors()
    destination = zeros_like(source)
    with bind(source, destination) as resharder:
        resharder.run()
        source["norm.weight"].view(torch.int32)[:] = 0x7FC50001
        resharder.run()
        assert destination["norm.weight"].isnan().all() and resharder.verify() > 0, "NaNs of equal bits are equal"
        destination["proj.weight"][3, 5] = -7
        with pytest.raises(VerifyError, match=r"proj.weight\[3, 5\]: the destination holds -7.0, .* 1 of 64 elements"):
            resharder.verify()


def test_a_plan_that_crosses_ranks_is_refused_by_the_local_transport():
    whole = reshard.Layout.from_tensors({"w": torch.zeros(4, 2)}, rank=0)
    elsewhere = reshard.Layout.from_tensors({"w": torch.zeros(4, 2)}, rank=1)
    plan = reshard.make_plan(whole, elsewhere)
    with pytest.raises(PlanError, match=r"1 copies cross ranks, first 'w' from rank 0 to rank 1; pass transport="):
        Resharder(plan, {}, {"w": torch.zeros(4, 2)}, rank=1)


def test_endpoint_refuses_negative_offsets():
    layout = reshard.Layout.from_tensors({"w": torch.zeros(4, 2)})
    holding = layout.holdings(0)[0]
    address = type(holding.address)("w", -4, (2, 1), holding.address.dtype)
    with pytest.raises(LayoutError, match="reaches byte"):
        Endpoint.of("source", {"w": torch.zeros(4, 2)}, [(address, holding.region)])
