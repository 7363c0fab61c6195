"""The arena on a GPU: the conformance suite, then graphs, real errors of the driver, and other processes."""

import multiprocessing
import os
import signal

import arena_workers
import pytest
import torch
from arena_suite import ArenaConformance, assert_holds, open_descriptors, write

from reshard import _C
from reshard.arena import Arena, ArenaRegion, Listener, RegionState, send_region
from reshard.errors import DeviceError, OutOfMemory, TransportError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIB = 1 << 20
PATIENCE_S = 120.0
spawn = multiprocessing.get_context("spawn")


class TestCudaArena(ArenaConformance):
    unit_bytes = 2 * MIB
    make_driver = staticmethod(lambda: _C.cuda_driver(0))

    @pytest.mark.parametrize("mode", ["drop", "keep"])
    def test_a_thousand_hand_overs_grow_nothing(self, mode: str) -> None:
        with self.arena(budget=64, mappings=mode) as arena:
            kv = self.group(arena, "kv", [17, 31], backed=True)
            trainer = self.group(arena, "trainer", [5, 7, 11], backed=False)

            def cycle(label: int) -> None:
                arena.handover(kv, trainer)
                write(trainer[2], label)
                assert_holds(trainer[2], label)
                arena.handover(trainer, kv)
                write(kv[0], -label)
                assert_holds(kv[0], -label)

            for label in range(20):
                cycle(label)
            torch.cuda.synchronize()
            before = (
                open_descriptors(),
                arena.stats.created_bytes,
                arena.stats.num_creates,
                torch.cuda.mem_get_info()[0],
            )
            for label in range(500):
                cycle(label)
            torch.cuda.synchronize()
            after = (
                open_descriptors(),
                arena.stats.created_bytes,
                arena.stats.num_creates,
                torch.cuda.mem_get_info()[0],
            )
            assert before == after


def test_closing_gives_the_memory_back():
    torch.cuda.init()
    torch.cuda.synchronize()
    free_bytes = torch.cuda.mem_get_info()[0]
    with Arena.cuda(0) as arena:
        arena.allocate("kv", 1 << 30)
        assert torch.cuda.mem_get_info()[0] <= free_bytes - (1 << 30)
    assert torch.cuda.mem_get_info()[0] >= free_bytes - 32 * MIB


def test_the_drivers_own_error_names_arrive():
    with pytest.raises(DeviceError, match="cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE"):
        Arena.cuda(4096)
    driver = _C.cuda_driver(0)
    read, written = os.pipe()
    with pytest.raises(DeviceError, match=r"cuMemImportFromShareableHandle failed: CUDA_ERROR_\w+"):
        _C.ImportedCore(driver, [read], [2 * MIB])
    os.close(read)
    os.close(written)


def test_a_full_device_is_a_typed_error_and_the_arena_stays_usable():
    """F8: no memory at wake-up must be catchable, and waking must work later."""
    with Arena.cuda(0) as arena:
        asleep = arena.allocate("kv", 1 << 30)
        arena.release(asleep)
        arena.trim()
        total_bytes = torch.cuda.mem_get_info()[1]
        hog = arena.reserve("hog", total_bytes + (1 << 30))
        with pytest.raises(OutOfMemory, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
            arena.handover((), (asleep, hog))
        assert (asleep.state, hog.state) == (RegionState.RELEASED, RegionState.RESERVED)
        assert arena.stats.created_bytes == 0 and arena.core.check() == ""
        arena.back(asleep)
        write(asleep, 3)
        assert_holds(asleep, 3)


class Matmul:
    """A captured step whose tensors all lie in one region."""

    def __init__(self, region: ArenaRegion) -> None:
        self.inputs, self.weights, self.output = (
            region.tensor(torch.float32, (1024, 1024), offset_bytes=i * 4 * MIB) for i in range(3)
        )
        self.values = torch.randn(2, 1024, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        self.graph = torch.cuda.CUDAGraph()
        self.fill()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            self.work()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.work()

    def fill(self) -> None:
        self.output.zero_()
        self.inputs.copy_(self.values[0])
        self.weights.copy_(self.values[1])

    def work(self) -> None:
        torch.mm(self.inputs, self.weights, out=self.output)
        self.output.tanh_()

    def replay(self) -> torch.Tensor:
        self.fill()
        self.graph.replay()
        torch.cuda.synchronize()
        return self.output.clone()


@pytest.mark.parametrize("mode", ["drop", "keep"])
def test_a_graph_captured_before_a_hand_over_replays_bit_equal_after_it(mode):
    with Arena.cuda(0, mappings=mode) as arena:
        kv = arena.allocate("kv", 64 * MIB)
        trainer = tuple(arena.reserve(f"trainer.{i}", 12 * MIB, group="trainer") for i in range(5))
        captured = Matmul(kv)
        expected = captured.replay()
        assert bool(expected.any())
        for cycle in range(3):
            arena.handover("kv", "trainer")
            for region in trainer:
                write(region, cycle)
            arena.handover("trainer", "kv")
            assert torch.equal(captured.replay(), expected), f"replay after hand-over {cycle} differs"
        del captured


def test_two_processes_use_one_set_of_pages(tmp_path):
    path = str(tmp_path / "owner.sock")
    with Listener(path) as listener, Arena.cuda(0) as arena:
        process = spawn.Process(target=arena_workers.write_in_place, args=(path,), daemon=True)
        process.start()
        region = arena.allocate("weights", 70 * MIB)
        write(region, 0)
        torch.cuda.synchronize()
        free_bytes = torch.cuda.mem_get_info()[0]
        with listener.accept(timeout_s=PATIENCE_S) as channel:
            share = send_region(channel, region, arena=arena, timeout_s=PATIENCE_S)
            channel.receive("written", timeout_s=PATIENCE_S)
        process.join(PATIENCE_S)
        assert process.exitcode == 0
        words = region.tensor(torch.int32)
        assert torch.equal(words, torch.arange(words.numel(), device="cuda", dtype=torch.int32) * -3)
        del words
        share.end()
        arena.release(region)
        assert torch.cuda.mem_get_info()[0] >= free_bytes - 64 * MIB


def test_a_killed_importer_leaves_the_owner_working(tmp_path):
    path = str(tmp_path / "owner.sock")
    with Listener(path) as listener, Arena.cuda(0) as arena:
        process = spawn.Process(target=arena_workers.map_and_die, args=(path,), daemon=True)
        process.start()
        region = arena.allocate("weights", 70 * MIB)
        with listener.accept(timeout_s=PATIENCE_S) as channel:
            share = send_region(channel, region, arena=arena, timeout_s=PATIENCE_S)
            with pytest.raises(TransportError, match=f"process {process.pid} .* closed the connection or died"):
                channel.receive("written", timeout_s=PATIENCE_S)
        process.join(PATIENCE_S)
        assert process.exitcode == -signal.SIGKILL
        share.end()
        arena.release(region)
        arena.back(region)
        write(region, 4)
        assert_holds(region, 4)
