"""The local transport on a GPU: fp32 trainer parameters into live bf16 tensors, on the caller's stream, twice."""

import pytest
import torch

import reshard
from reshard import _C
from reshard.errors import PlanError, StateError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not _C.CUDA_KERNELS, reason="needs a build with CUDA kernels (RESHARD_CUDA=on)"),
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
