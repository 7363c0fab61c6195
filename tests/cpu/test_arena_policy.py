"""The arena's books against a model: any sequence of operations, budgets exact, contents of BACKED regions intact."""

import random
import resource

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from reshard import _C
from reshard.arena import Arena, ArenaRegion, RegionState
from reshard.errors import DeviceError, OutOfMemory

PAGE = resource.getpagesize()
BUDGET_PAGES = 60


class ArenaModel(RuleBasedStateMachine):
    """Keeps for each region whether it is backed and which label its first and last word of each page hold."""

    arena: Arena

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[ArenaRegion, int | None] = {}
        self.serial = 0

    @initialize(mode=st.sampled_from(["drop", "keep"]), ratio=st.sampled_from([2, 3, 4]), poison=st.booleans())
    def start(self, mode, ratio, poison) -> None:
        classes = tuple(PAGE * ratio**power for power in (3, 2, 1, 0))
        self.arena = Arena(
            _C.host_driver(), chunk_classes=classes, budget_bytes=BUDGET_PAGES * PAGE, mappings=mode, poison=poison
        )

    @rule(pages=st.integers(1, 40))
    def reserve(self, pages) -> None:
        self.serial += 1
        self.labels[self.arena.reserve(f"region{self.serial}", pages * PAGE)] = None

    @rule(data=st.data())
    def hand_over(self, data) -> None:
        backed = [region for region, label in self.labels.items() if label is not None]
        idle = [region for region, label in self.labels.items() if label is None]
        leaving = data.draw(st.lists(st.sampled_from(backed), unique=True) if backed else st.just([]))
        coming = data.draw(st.lists(st.sampled_from(idle), unique=True) if idle else st.just([]))
        staying = [region for region in backed if region not in leaving]
        wanted_bytes = sum(region.num_bytes for region in (*staying, *coming))
        if coming and wanted_bytes > BUDGET_PAGES * PAGE:
            with pytest.raises(OutOfMemory):
                self.arena.handover(leaving, coming)
            return
        self.arena.handover(leaving, coming)
        for region in leaving:
            self.labels[region] = None
        for region in coming:
            self.serial += 1
            self.labels[region] = self.serial
            self.edges(region)[:] = self.serial

    @rule(data=st.data())
    def free(self, data) -> None:
        if self.labels:
            region = data.draw(st.sampled_from(list(self.labels)))
            self.arena.free(region)
            del self.labels[region]

    @rule(keep=st.integers(0, 40))
    def trim(self, keep) -> None:
        self.arena.trim(keep_free_bytes=keep * PAGE)

    @invariant()
    def books_and_contents_agree(self) -> None:
        assert self.arena.core.check() == ""
        stats = self.arena.stats
        backed = [region for region, label in self.labels.items() if label is not None]
        assert stats.backed_bytes == sum(region.num_bytes for region in backed)
        assert stats.created_bytes == stats.backed_bytes + stats.free_bytes <= BUDGET_PAGES * PAGE
        for region in backed:
            assert bool((self.edges(region) == self.labels[region]).all()), f"{region} lost its contents"

    @staticmethod
    def edges(region: ArenaRegion) -> np.ndarray:
        return np.from_dlpack(region).view(np.int64).reshape(-1, PAGE // 8)[:, :: PAGE // 8 - 1]

    def teardown(self) -> None:
        if "arena" in self.__dict__:
            self.arena.close()


TestArenaModel = ArenaModel.TestCase
TestArenaModel.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    first=st.lists(st.integers(1, 700), min_size=1, max_size=20),
    second=st.lists(st.integers(1, 700), min_size=1, max_size=20),
    mode=st.sampled_from(["drop", "keep"]),
    spare=st.integers(0, 50),
)
def test_hand_overs_that_repeat_create_nothing_after_the_first_cycle(first, second, mode, spare):
    classes = tuple(PAGE << power for power in range(9, -1, -1))
    budget_bytes = (max(sum(first), sum(second)) + spare) * PAGE
    with Arena(_C.host_driver(), chunk_classes=classes, budget_bytes=budget_bytes, mappings=mode) as arena:
        kv = tuple(arena.allocate(f"kv.{i}", pages * PAGE, group="kv") for i, pages in enumerate(first))
        trainer = tuple(arena.reserve(f"trainer.{i}", pages * PAGE, group="trainer") for i, pages in enumerate(second))
        for cycle in range(4):
            for pair in ((kv, trainer), (trainer, kv)):
                report = arena.handover(*pair)
                assert cycle == 0 or (report.num_creates, report.num_destroys) == (0, 0)
                assert mode == "drop" or cycle < 2 or (report.num_maps, report.num_unmaps) == (0, 0)
                assert arena.core.check() == ""


@pytest.mark.parametrize("mode", ["drop", "keep"])
def test_faults_at_any_call_leave_the_books_right_and_backed_contents_intact(mode):
    """Several driver calls in a row fail, the undo's own among them; what can't be destroyed stays, free."""
    num_failures = 0
    for seed in range(25):
        draw = random.Random(seed)
        injector = _C.FaultInjector(_C.host_driver())
        classes = tuple(PAGE * units for units in (64, 16, 4, 1))
        budget_bytes = draw.randint(60, 260) * PAGE
        with Arena(injector, chunk_classes=classes, budget_bytes=budget_bytes, mappings=mode) as arena:
            regions = [arena.reserve(f"region{i}", draw.randint(1, 60) * PAGE) for i in range(10)]
            for _ in range(25):
                backed = [region for region in regions if region.state is RegionState.BACKED]
                leaving = [region for region in backed if draw.random() < 0.5]
                coming = [region for region in regions if region not in backed and draw.random() < 0.3]
                call = draw.choice(["create", "destroy", "map", "allow", "unmap", "synchronize"])
                kind = draw.choice(["memory", "device"])
                injector.arm(call, countdown=draw.randint(1, 6), kind=kind, num_times=draw.randint(0, 3))
                try:
                    arena.handover(leaving, coming)
                    for region in coming:
                        words_of(region)[:] = region.id
                except (DeviceError, OutOfMemory):
                    num_failures += 1
                injector.arm(call, num_times=0)
                assert arena.core.check() in ("", "the budget is exceeded")
                for region in regions:
                    if region.state is RegionState.BACKED:
                        assert bool((words_of(region) == region.id).all()), f"{region} lost its contents, seed {seed}"
    assert num_failures > 50


def words_of(region: ArenaRegion) -> np.ndarray:
    return np.from_dlpack(region).view(np.int64)[:: PAGE // 8]
