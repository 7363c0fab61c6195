"""The local transport on a GPU: fp32 trainer parameters into live bf16 tensors, on the caller's stream, twice."""

import pytest
import torch
from transport_suite import NO_KERNELS

import reshard
import reshard.resharder
from reshard.errors import PeerTimeout, PlanError, StateError, VerifyError
from reshard.overlap import BackwardPush
from reshard.table import CopyEntry, make_table
from reshard.transports.runner import Launches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(NO_KERNELS, reason="needs a build with CUDA kernels (RESHARD_CUDA=on), or Triton"),
]


def labelled(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device="cuda").reshape(shape) * 0.37


def test_two_updates_arrive_bit_exact_in_one_launch():
    source = {"a": labelled(513, 77), "b": labelled(64, 128), "c": labelled(5)}
    destination = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in source.items()}
    plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(destination))
    with reshard.Resharder(plan, source, destination) as resharder:
        for step in (1, 2):
            for tensor in source.values():
                tensor.add_(step * 1.01)
            stats = resharder.run()
            assert all(torch.equal(destination[n], t.bfloat16()) for n, t in source.items())
            resharder.verify()
        assert stats.num_launches == 1 and stats.staging_bytes < 1 << 20


def test_it_runs_on_the_stream_it_is_given():
    source = {"a": labelled(4096, 1024)}
    destination = {"a": torch.zeros(4096, 1024, dtype=torch.bfloat16, device="cuda")}
    plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(destination))
    side = torch.cuda.Stream()
    with reshard.Resharder(plan, source, destination) as resharder:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            source["a"].mul_(2)
        resharder.run(stream=side.cuda_stream)
        assert torch.equal(destination["a"], source["a"].bfloat16())


def test_a_moved_tensor_and_two_devices_are_refused():
    source = {"a": labelled(8, 8)}
    destination = {"a": torch.zeros(8, 8, dtype=torch.bfloat16, device="cuda")}
    plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(destination))
    with reshard.Resharder(plan, source, destination) as resharder:
        resharder.run()
        kept = source["a"].data
        source["a"].data = kept.clone()
        with pytest.raises(StateError, match="re-allocated since binding"):
            resharder.run()
    with pytest.raises(PlanError, match=r"one device a rank, its tensors are on \['cpu', 'cuda:0'\]"):
        reshard.Resharder(plan, {"a": torch.zeros(8, 8)}, destination)


def large_pair(source_dtype=torch.bfloat16):
    """Large and small tensors, one of them strided."""
    source = {"big": labelled(5000, 1001), "small": labelled(77, 13), "strip": labelled(64, 64)[:, ::2]}
    source = {name: t.to(source_dtype) for name, t in source.items()}
    destination = {name: torch.zeros(t.shape, dtype=torch.bfloat16, device="cuda") for name, t in source.items()}
    plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(destination))
    return plan, source, destination


@pytest.mark.parametrize(("graph", "num_launches"), [(False, 2), (None, 1), (True, 1)])
def test_tables_that_build_on_each_other_run_in_order(graph, num_launches):
    first, second, third = (torch.zeros(1000, 77, device="cuda") for _ in range(3))
    tables = [make_table([CopyEntry.from_tensors(b, a)]) for a, b in ((first, second), (second, third))]
    launches = Launches(tables, first.device, graph=graph)
    assert launches.num_launches == num_launches
    for step in (1, 2):
        first.copy_(labelled(1000, 77) + step)
        torch.cuda.synchronize()
        launches.launch(torch.cuda.Stream().cuda_stream if step == 2 else None)
        launches.synchronize(10.0, what="copies")
        assert torch.equal(third, first)
    launches.close()


@pytest.mark.parametrize("graph", [False, None, True])
def test_a_graph_launches_a_whole_transition(graph):
    plan, source, destination = large_pair()
    with reshard.Resharder(plan, source, destination, graph=graph) as resharder:
        for step in (1, 2):
            for tensor in source.values():
                tensor.add_(step)
            torch.cuda.synchronize()
            stats = resharder.run(stream=torch.cuda.Stream().cuda_stream if step == 2 else None)
            assert all(torch.equal(destination[n], t) for n, t in source.items())
            resharder.verify()
    assert stats.num_launches <= 10 if graph is False else stats.num_launches == 1


def test_run_inside_a_graph_of_the_user():
    plan, source, destination = large_pair(torch.float32)
    with reshard.Resharder(plan, source, destination, graph=True) as resharder:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with pytest.raises(StateError, match=r"the stream is being captured: call run\(\)"):
                resharder.begin()
            source["small"].mul_(2)
            resharder.run()
            seen = destination["small"].float().sum()
        assert resharder.state is reshard.resharder.State.TRAINING and resharder.version == 0
        for step in (1, 2):
            for tensor in source.values():
                tensor.add_(step * 1.01)
            graph.replay()
            assert resharder.publish().num_transitions == step == resharder.version
            resharder.require_complete()
            assert all(torch.equal(destination[n], t.bfloat16()) for n, t in source.items())
            assert torch.equal(seen, destination["small"].float().sum())
            resharder.verify()


def test_verify_finds_one_bit_and_takes_nans_for_equal():
    plan, source, destination = large_pair(torch.float32)
    source["small"].view(torch.int32)[3, 4] = 0x7FC00123
    with reshard.Resharder(plan, source, destination) as resharder:
        resharder.run()
        assert resharder.verify() == sum(t.numel() * 2 for t in source.values())
        destination["strip"].view(torch.int16)[3, 5] ^= 1
        with pytest.raises(VerifyError, match=r"inside rank 0: strip\[3, 5\]: the destination holds .* 1 of 2048 el"):
            resharder.verify()
        destination["strip"].view(torch.int16)[3, 5] ^= 1
        destination["big"].view(torch.int16)[4999, 1000] ^= 1
        with pytest.raises(VerifyError, match=r"big\[4999, 1000\]"):
            resharder.verify()


def test_a_deadline_ends_a_wait_for_the_device():
    plan, source, destination = large_pair(torch.float32)
    with reshard.Resharder(plan, source, destination) as resharder:
        torch.cuda._sleep(2_000_000_000)
        with pytest.raises(PeerTimeout, match=r"local copies of part 0 on cuda:0 did not finish within 0.05 s"):
            resharder.run(deadline_s=0.05)
        with pytest.raises(StateError, match="never been filled"):
            resharder.require_complete()
        resharder.run()
        resharder.verify()


def test_an_optimizer_in_backward_pushes_parts_on_the_device():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256, device="cuda") for _ in range(4)))
    source = dict(layers.named_parameters())
    destination = {name: torch.zeros_like(p, dtype=torch.bfloat16, requires_grad=False) for name, p in source.items()}
    plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(destination))
    steps = {p: torch.optim.AdamW([p], lr=0.1) for p in layers.parameters()}
    with (
        reshard.Resharder(plan, source, destination, parts="layers") as resharder,
        BackwardPush(resharder, source, update=lambda p: steps[p].step()) as hooks,
    ):
        for step in (1, 2):
            hooks.begin()
            layers(torch.full((32, 256), 0.1 * step, device="cuda")).square().sum().backward()
            for part in range(4):
                resharder.wait_part(part)
                for name in resharder.parts.names[part]:
                    assert torch.equal(destination[name], source[name].detach().bfloat16()), name
            assert resharder.wait().num_launches <= 10
            resharder.verify()
            layers.zero_grad()
