"""One conformance suite for every arena: a test module subclasses ArenaConformance and says how a driver is made."""

import gc
import os
import threading
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from reshard import _C
from reshard.arena import Arena, ArenaRegion, RegionState
from reshard.errors import DeviceError, OutOfMemory, StateError

POISON = 0xA5
MODES = ("drop", "keep")


def write(region: ArenaRegion, label: int) -> None:
    words = region.tensor(torch.int32)
    words.copy_(torch.arange(words.numel(), device=words.device, dtype=torch.int32) + label)


def assert_holds(region: ArenaRegion, label: int) -> None:
    words = region.tensor(torch.int32)
    expected = torch.arange(words.numel(), device=words.device, dtype=torch.int32) + label
    assert torch.equal(words, expected), f"{region} lost its contents"


def states(arena: Arena) -> list[tuple[str, str, int]]:
    return [(region.name, region.state.value, region.address) for region in arena.regions()]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class ArenaConformance:
    """Sizes are in units of the smallest chunk class; classes are 16, 4 and 1 units."""

    unit_bytes: ClassVar[int]
    make_driver: ClassVar[Callable[[], _C.MemoryDriver]]

    def arena(self, *, budget: int | None = None, driver: _C.MemoryDriver | None = None, **options: object) -> Arena:
        classes = tuple(self.unit_bytes * units for units in (16, 4, 1))
        budget_bytes = None if budget is None else budget * self.unit_bytes
        driver = driver or type(self).make_driver()
        return Arena(driver, chunk_classes=classes, budget_bytes=budget_bytes, **options)  # type: ignore[arg-type]

    def group(self, arena: Arena, name: str, units: list[int], *, backed: bool) -> tuple[ArenaRegion, ...]:
        make = arena.allocate if backed else arena.reserve
        return tuple(make(f"{name}.{i}", size * self.unit_bytes, group=name) for i, size in enumerate(units))

    # ---- the contract ----

    def test_a_region_goes_from_reserved_to_backed_to_released_and_back(self) -> None:
        with self.arena() as arena:
            region = arena.reserve("weights", self.unit_bytes)
            assert (region.state, arena.stats.created_bytes) == (RegionState.RESERVED, 0)
            for generation in (1, 3):
                arena.back(region)
                assert (region.state, region.generation) == (RegionState.BACKED, generation)
                arena.release(region)
                assert region.state is RegionState.RELEASED
            assert arena.stats.num_creates == 1

    def test_sizes_are_rounded_up_to_the_smallest_class(self) -> None:
        with self.arena() as arena:
            region = arena.allocate("odd", 5 * self.unit_bytes - 3)
            assert region.num_bytes == 5 * self.unit_bytes == arena.stats.backed_bytes
            assert region.num_chunks == 2
            assert arena.region_at(region.address) == arena.region_at(region.address + region.num_bytes - 1) == region
            assert arena.region_at(region.address + region.num_bytes) is arena.region_at(region.address - 1) is None

    @pytest.mark.parametrize("mode", MODES)
    def test_hand_overs_keep_addresses_and_neighbours_and_create_nothing(self, mode: str) -> None:
        with self.arena(budget=90, mappings=mode) as arena:
            kv = self.group(arena, "kv", [19, 19, 19], backed=True)
            weights = arena.allocate("weights", 7 * self.unit_bytes)
            trainer = self.group(arena, "trainer", [3, 5, 9, 1, 21], backed=False)
            write(weights, 7)
            pointers = [region.tensor().data_ptr() for region in (*kv, *trainer)]
            for cycle in range(4):
                before = arena.stats
                arena.handover("kv", "trainer")
                for label, region in enumerate(trainer):
                    write(region, 100 * cycle + label)
                for label, region in enumerate(trainer):
                    assert_holds(region, 100 * cycle + label)
                arena.handover("trainer", "kv")
                for label, region in enumerate(kv):
                    write(region, -100 * cycle - label)
                for label, region in enumerate(kv):
                    assert_holds(region, -100 * cycle - label)
                if cycle:
                    now = arena.stats
                    assert (now.num_creates, now.num_destroys) == (before.num_creates, before.num_destroys)
                    assert now.created_bytes == before.created_bytes <= 90 * self.unit_bytes
                assert arena.core.check() == ""
            assert_holds(weights, 7)
            assert pointers == [region.tensor().data_ptr() for region in (*kv, *trainer)]

    def test_kept_mappings_make_the_second_hand_over_free(self) -> None:
        with self.arena(budget=64, mappings="keep") as arena:
            self.group(arena, "kv", [32, 32], backed=True)
            self.group(arena, "trainer", [7, 7, 7], backed=False)
            reports = [arena.handover(*pair) for pair in [("kv", "trainer"), ("trainer", "kv")] * 3]
            assert sum(report.num_maps for report in reports[:3]) > 0
            assert [(r.num_maps, r.num_unmaps, r.num_creates) for r in reports[3:]] == [(0, 0, 0)] * 3

    def test_kept_mappings_refill_only_what_someone_else_holds(self) -> None:
        with self.arena(budget=40, mappings="keep") as arena:
            first = arena.allocate("first", 36 * self.unit_bytes)
            arena.release(first)
            thief = arena.allocate("thief", 4 * self.unit_bytes)
            write(thief, 5)
            report = arena.back(first)
            assert report.num_maps <= 4
            write(first, 9)
            assert_holds(thief, 5)
            assert_holds(first, 9)

    # ---- budgets ----

    def test_a_budget_that_is_too_small_changes_nothing(self) -> None:
        with self.arena(budget=20) as arena:
            kv = arena.allocate("kv", 12 * self.unit_bytes)
            arena.allocate("weights", 6 * self.unit_bytes)
            big = arena.reserve("big", 15 * self.unit_bytes)
            write(kv, 3)
            before, account = states(arena), arena.stats
            with pytest.raises(OutOfMemory, match=r"no memory to back 'big', .* missing .* raise the budget"):
                arena.handover(kv, big)
            with pytest.raises(MemoryError, match="no memory to back 'bigger'"):
                arena.allocate("bigger", 40 * self.unit_bytes)
            assert (states(arena), arena.stats) == (before, account)
            assert_holds(kv, 3)

    def test_a_group_has_a_budget_of_its_own(self) -> None:
        with self.arena() as arena:
            arena.set_budget("kv", 8 * self.unit_bytes)
            first, second = self.group(arena, "kv", [5, 5], backed=False)
            arena.back(first)
            with pytest.raises(OutOfMemory, match=r"group 'kv' would hold .* its budget is .* raise its budget"):
                arena.back(second)
            arena.handover(first, second)
            assert (first.state, second.state) == (RegionState.RELEASED, RegionState.BACKED)

    def test_large_chunks_are_broken_up_once_when_the_budget_is_full(self) -> None:
        with self.arena(budget=32) as arena:
            large = arena.allocate("large", 32 * self.unit_bytes)
            small = self.group(arena, "small", [3] * 10, backed=False)
            first = arena.handover(large, small)
            assert first.num_destroys > 0 and arena.stats.created_bytes == 32 * self.unit_bytes
            for _ in range(3):
                for pair in ((small, large), (large, small)):
                    report = arena.handover(*pair)
                    assert (report.num_creates, report.num_destroys) == (0, 0)
            assert arena.core.check() == ""

    def test_a_full_device_makes_the_arena_break_up_what_it_has(self) -> None:
        injector = _C.FaultInjector(type(self).make_driver())
        classes = (64 * self.unit_bytes, self.unit_bytes)
        with Arena(injector, chunk_classes=classes) as arena:
            arena.release(arena.allocate("idle", 64 * self.unit_bytes))
            spared = arena.allocate("spared", self.unit_bytes)
            assert arena.chunk_sizes == {classes[0]: 1, classes[1]: 1}
            injector.arm("create", kind="memory")
            wanted = arena.allocate("wanted", self.unit_bytes)
            assert arena.chunk_sizes == {classes[1]: 65}
            for label, region in enumerate((spared, wanted)):
                write(region, label)
            assert_holds(spared, 0)
            assert arena.core.check() == ""

    def test_a_full_device_is_an_error_that_changes_nothing(self) -> None:
        injector = _C.FaultInjector(type(self).make_driver())
        with self.arena(driver=injector) as arena:
            kv = arena.allocate("kv", 4 * self.unit_bytes)
            big = arena.reserve("big", 21 * self.unit_bytes)
            write(kv, 11)
            before, account = states(arena), arena.stats.created_bytes
            injector.arm("create", countdown=2, kind="memory", num_times=9)
            with pytest.raises(OutOfMemory, match="the device said: create failed: injected"):
                arena.handover(kv, big)
            injector.arm("create", num_times=0)
            assert (states(arena), arena.stats.created_bytes) == (before, account)
            assert_holds(kv, 11)
            arena.handover(kv, big)

    # ---- failures half-way ----

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("call", ["create", "map", "allow", "unmap", "synchronize"])
    def test_a_driver_that_fails_half_way_leaves_all_as_it_was(self, call: str, mode: str) -> None:
        num_failures = 0
        for countdown in range(1, 40):
            injector = _C.FaultInjector(type(self).make_driver())
            with self.arena(driver=injector, mappings=mode) as arena:
                kv = self.group(arena, "kv", [6, 9], backed=True)
                taken = self.group(arena, "old", [5], backed=True)
                trainer = self.group(arena, "trainer", [4, 21], backed=False)
                arena.handover(taken, self.group(arena, "thief", [2], backed=False))
                for label, region in enumerate(kv):
                    write(region, label)
                before, account = states(arena), arena.stats.created_bytes
                injector.arm(call, countdown=countdown)
                try:
                    arena.handover(kv, (*trainer, *taken))
                except DeviceError as error:
                    num_failures += 1
                    assert str(error) == f"{call} failed: injected"
                    assert (states(arena), arena.stats.created_bytes) == (before, account)
                    for label, region in enumerate(kv):
                        assert_holds(region, label)
                    arena.handover(kv, (*trainer, *taken))
                else:
                    injector.arm(call, num_times=0)
                    break
                finally:
                    assert arena.core.check() == ""
        else:
            pytest.fail("the call was never reached")
        assert num_failures > 0 or (call == "unmap" and mode == "keep")

    def test_a_chunk_broken_up_before_the_failure_costs_its_region_the_contents_and_says_so(self) -> None:
        injector = _C.FaultInjector(type(self).make_driver())
        with self.arena(driver=injector, budget=17) as arena:
            kv, spared = self.group(arena, "kv", [16, 1], backed=True)
            small = self.group(arena, "small", [3, 3], backed=False)
            write(spared, 2)
            injector.arm("map", countdown=4)
            with pytest.raises(DeviceError, match=r"lost their contents and are RELEASED now: 'kv\.0'$"):
                arena.handover((kv, spared), small)
            assert (kv.state, spared.state) == (RegionState.RELEASED, RegionState.BACKED)
            assert_holds(spared, 2)
            assert arena.core.check() == "" and arena.stats.created_bytes == 17 * self.unit_bytes

    def test_an_undo_that_fails_too_releases_the_regions_and_keeps_the_books(self) -> None:
        injector = _C.FaultInjector(type(self).make_driver())
        with self.arena(driver=injector) as arena:
            kv = self.group(arena, "kv", [4, 4], backed=True)
            trainer = self.group(arena, "trainer", [8], backed=False)
            injector.arm("map", num_times=2)
            with pytest.raises(DeviceError, match=r"undoing it failed too: map failed.* RELEASED now"):
                arena.handover(kv, trainer)
            assert {region.state for region in kv} == {RegionState.RELEASED}
            assert arena.core.check() == ""
            arena.back(kv)
            arena.handover(kv, trainer)

    # ---- states and names that are refused ----

    def test_wrong_states_are_errors_that_name_the_region(self) -> None:
        with self.arena() as arena:
            region = arena.reserve("kv", self.unit_bytes)
            with pytest.raises(StateError, match="region 'kv' can't be released: it is RESERVED, not BACKED"):
                arena.release(region)
            arena.back(region)
            with pytest.raises(StateError, match="region 'kv' can't be backed: it is BACKED already"):
                arena.back(region)
            with pytest.raises(StateError, match="named twice"):
                arena.release((region, region))
            arena.free(region)
            with pytest.raises(StateError, match="region 1 was freed"):
                arena.back(region)

    def test_wrong_arguments_are_value_errors(self) -> None:
        with self.arena() as arena, self.arena() as other:
            arena.reserve("kv", 1)
            with pytest.raises(ValueError, match="region 'kv' exists already"):
                arena.reserve("kv", 1)
            with pytest.raises(ValueError, match="expected a size above 0, got 0 bytes"):
                arena.reserve("nothing", 0)
            with pytest.raises(ValueError, match=r"no region is in group 'kw'; there are the groups \['kv'\]"):
                arena.back("kw")
            with pytest.raises(ValueError, match="belongs to another arena"):
                arena.back(other.reserve("kv", 1))
            with pytest.raises(ValueError, match="descending order"):
                Arena(type(self).make_driver(), chunk_classes=(self.unit_bytes, 4 * self.unit_bytes))
            with pytest.raises(ValueError, match="expected mappings 'drop' or 'keep', got 'hold'"):
                self.arena(mappings="hold")

    # ---- views ----

    def test_a_view_keeps_its_region_from_being_freed_but_not_from_being_released(self) -> None:
        arena = self.arena()
        region = arena.allocate("kv", self.unit_bytes)
        words = region.tensor(torch.int32)
        words.fill_(9)
        assert region.num_views == 1
        with pytest.raises(StateError, match="region 'kv' still has 1 views and 0 shares; drop them before freeing it"):
            arena.close()
        arena.release(region)
        arena.back(region)
        words.fill_(4)
        assert region.tensor(torch.int32, (2, 3), offset_bytes=8).flatten().tolist() == [4] * 6
        del words
        arena.close()

    def test_a_view_outlives_the_arena_object(self) -> None:
        arena = self.arena()
        words = arena.allocate("kv", self.unit_bytes).tensor(torch.int32)
        words.fill_(3)
        del arena
        gc.collect()
        assert int(words.sum()) == 3 * words.numel()

    def test_a_tensor_has_to_fit(self) -> None:
        with self.arena() as arena:
            region = arena.allocate("kv", self.unit_bytes)
            with pytest.raises(ValueError, match="does not fit into"):
                region.tensor(torch.float32, (self.unit_bytes,))
            with pytest.raises(ValueError, match="multiple of 4, got 2"):
                region.tensor(torch.float32, offset_bytes=2)
            with pytest.raises(BufferError, match="never a copy"):
                region.__dlpack__(copy=True)
            assert region.num_views == 0

    # ---- debugging, trimming, sharing in one process ----

    def test_poison_shows_contents_that_are_undefined(self) -> None:
        with self.arena(poison=True, budget=8) as arena:
            first, second = self.group(arena, "kv", [8, 8], backed=False)
            arena.back(first)
            write(first, 1)
            arena.handover(first, second)
            assert bool((second.tensor() == POISON).all())
        with self.arena(poison=True, mappings="keep") as arena:
            region = arena.allocate("kv", self.unit_bytes)
            stale = region.tensor()
            stale.fill_(1)
            arena.release(region)
            assert bool((stale == POISON).all())
            del stale

    @pytest.mark.parametrize("mode", MODES)
    def test_trim_gives_free_chunks_back(self, mode: str) -> None:
        with self.arena(mappings=mode) as arena:
            kept, idle = self.group(arena, "kv", [5, 20], backed=True)
            write(kept, 6)
            arena.release(idle)
            assert arena.trim(keep_free_bytes=16 * self.unit_bytes) == 4 * self.unit_bytes
            assert arena.trim() == 16 * self.unit_bytes
            assert arena.stats.free_bytes == 0 and arena.stats.created_bytes == 5 * self.unit_bytes
            arena.back(idle)
            assert_holds(kept, 6)
            assert arena.core.check() == ""

    def test_an_export_is_the_same_memory_and_pins_the_region(self) -> None:
        with self.arena() as arena:
            region = arena.allocate("weights", 5 * self.unit_bytes)
            write(region, 1)
            chunks = arena.core.export_region(region.id)
            imported = _C.ImportedCore(arena.driver, [fd for fd, _ in chunks], [size for _, size in chunks])
            for descriptor, _ in chunks:
                os.close(descriptor)
            assert imported.num_bytes == region.num_bytes and imported.address != region.address
            words = torch.utils.dlpack.from_dlpack(imported.dlpack(True)).view(torch.int32)
            assert torch.equal(words, region.tensor(torch.int32))
            words.fill_(8)
            assert bool((region.tensor(torch.int32) == 8).all())
            with pytest.raises(StateError, match="1 shares of it are out"):
                arena.release(region)
            with pytest.raises(StateError, match="still has 1 views"):
                imported.close()
            del words
            imported.close()
            arena.core.unpin(region.id)
            arena.release(region)

    def test_threads_may_use_one_arena(self) -> None:
        with self.arena() as arena:
            pairs = [self.group(arena, f"thread{i}", [3, 5], backed=False) for i in range(4)]

            def rotate(first: ArenaRegion, second: ArenaRegion) -> None:
                arena.back(first)
                for _ in range(25):
                    arena.handover(first, second)
                    arena.handover(second, first)

            threads = [threading.Thread(target=rotate, args=pair) for pair in pairs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert arena.core.check() == ""
            assert {first.state for first, _ in pairs} == {RegionState.BACKED}
