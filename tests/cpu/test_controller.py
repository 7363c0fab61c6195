"""Worker groups on the inline backend: results, errors with rank and traceback, deadlines, colocation, phases."""

import re
import threading
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from hybrid import controller
from hybrid.controller import Dispatch, ResourceSpec, Worker, WorkerContext, WorkerGroup, open_pool, register
from hybrid.errors import BackendUnavailable, DispatchError, GroupStuck, ResourceError, WorkerError, WorkerTimeout
from hybrid.inline_backend import InlinePool
from hybrid.profiler import phase, record_phases
from reshard.mesh import Mesh


class Adder(Worker):
    """Adds ten and its rank; can be told to fail, to wait, and to meet the others."""

    def __init__(self, context: WorkerContext, *, offset: int = 10, fail_on: int | None = None) -> None:
        super().__init__(context)
        if context.rank == fail_on:
            raise RuntimeError(f"no memory for rank {context.rank}")
        self.offset = offset
        self.num_calls = 0

    @register(dispatch=Dispatch.DP)
    def add(self, batch: TensorDict) -> TensorDict:
        self.num_calls += 1
        return TensorDict({"x": batch["x"] + self.offset + self.context.rank}, batch_size=batch.batch_size)

    @register(dispatch=Dispatch.DP, uneven="pad")
    def add_padded(self, batch: TensorDict) -> TensorDict:
        return self.add(batch)

    @register(dispatch=Dispatch.THREE_D)
    def place(self, batch: TensorDict) -> TensorDict:
        return TensorDict(
            {"x": batch["x"], "rank": torch.full_like(batch["x"], self.context.rank)}, batch_size=[len(batch)]
        )

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def describe(self, greeting: str, *, mark: str = "!") -> str:
        return f"{greeting} {self.context.rank} of {self.context.world_size}{mark}"

    @register(dispatch=Dispatch.ALL)
    def mine(self, value: int) -> int:
        return value * 100 + self.context.rank

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def fail(self, ranks: list[int]) -> int:
        if self.context.rank in ranks:
            raise ZeroDivisionError(f"rank {self.context.rank} divides")
        return self.context.rank

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def wait_for(self, event: threading.Event, ranks: list[int]) -> int:
        if self.context.rank in ranks:
            assert event.wait(60)
        return self.context.rank

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def fail_or_wait(self, event: threading.Event) -> None:
        if self.context.rank == 0:
            raise KeyError("first")
        assert event.wait(60)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def meet(self, barrier: threading.Barrier) -> int:
        return barrier.wait(timeout=60)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def work(self) -> None:
        with phase("forward"), phase("attention"):
            sum(range(1000))

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def leave(self) -> None:
        raise SystemExit(3)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        return self.num_calls

    def helper(self) -> None:
        """Not registered."""


def rows(*values: int) -> TensorDict:
    return TensorDict({"x": torch.tensor(values)}, batch_size=[len(values)])


@pytest.fixture
def pool() -> InlinePool:
    with InlinePool(ResourceSpec(num_workers=2)) as opened:
        yield opened


def test_known_value_two_workers_add_ten_and_their_rank(pool: InlinePool) -> None:
    with WorkerGroup(pool, Adder) as group:
        assert group.call(Adder.add, rows(0, 1, 2, 3))["x"].tolist() == [10, 11, 13, 14]
        assert group.call(Adder.add, batch=rows(5, 5))["x"].tolist() == [15, 16]
        assert group.call(Adder.count) == [2, 2]
        assert group.call(Adder.add_padded, rows(0, 1, 2))["x"].tolist() == [10, 11, 13]
        assert group.call(Adder.describe, "rank", mark="?") == ["rank 0 of 2?", "rank 1 of 2?"]
        assert group.call(Adder.mine, [3, 4]) == [300, 401]


def test_three_d_collects_from_one_peer_of_each_dp_index() -> None:
    spec = ResourceSpec(num_workers=8)
    with open_pool(spec) as pool, WorkerGroup(pool, Adder, mesh=Mesh({"pp": 2, "dp": 2, "tp": 2})) as group:
        result = group.call(Adder.place, rows(7, 8))
        assert result["x"].tolist() == [7, 8]
        assert result["rank"].tolist() == [4, 6]


def test_settings_reach_every_worker_and_groups_are_colocated(pool: InlinePool) -> None:
    with WorkerGroup(pool, Adder, {"offset": 0}) as plain, WorkerGroup(pool, Adder, {"offset": 50}) as shifted:
        assert plain.call(Adder.add, rows(1, 1))["x"].tolist() == [1, 2]
        assert shifted.call(Adder.add, rows(1, 1))["x"].tolist() == [51, 52]


def test_a_pool_holds_no_more_than_max_groups_at_once() -> None:
    with InlinePool(ResourceSpec(num_workers=1, max_groups=1)) as pool:
        with WorkerGroup(pool, Adder), pytest.raises(ResourceError, match="the pool holds 1 of max_groups=1"):
            WorkerGroup(pool, Adder, name="second")
        with WorkerGroup(pool, Adder) as later:
            assert later.world_size == 1


def test_a_remote_error_has_rank_type_message_and_traceback_and_the_group_lives_on(pool: InlinePool) -> None:
    with WorkerGroup(pool, Adder) as group:
        with pytest.raises(
            WorkerError, match=r"Adder.fail: ranks \[1\] raised; rank 1: ZeroDivisionError: rank 1 div"
        ) as e:
            group.call(Adder.fail, [1])
        (failure,) = e.value.failures
        assert (failure.rank, failure.method, failure.error_type) == (1, "fail", "ZeroDivisionError")
        assert "in fail\n    raise ZeroDivisionError" in failure.traceback
        assert "--- traceback of rank 1 ---" in str(e.value)
        with pytest.raises(WorkerError, match=r"ranks \[0, 1\] raised; rank 0") as both:
            group.call(Adder.fail, [0, 1])
        assert [failure.rank for failure in both.value.failures] == [0, 1]
        assert group.call(Adder.fail, []) == [0, 1]


def test_a_constructor_that_raises_names_its_rank_and_frees_the_place() -> None:
    with InlinePool(ResourceSpec(num_workers=2, max_groups=1)) as pool:
        with pytest.raises(WorkerError, match=r"Adder.__init__: ranks \[1\] raised; rank 1: RuntimeError: no memory"):
            WorkerGroup(pool, Adder, {"fail_on": 1})
        with pytest.raises(WorkerError, match=r"TypeError.*unexpected keyword argument 'ofset'"):
            WorkerGroup(pool, Adder, {"ofset": 1})
        with WorkerGroup(pool, Adder) as group:
            assert group.call(Adder.count) == [0, 0]


def test_a_worker_that_exits_is_a_failure_too(pool: InlinePool) -> None:
    with WorkerGroup(pool, Adder) as group, pytest.raises(WorkerError, match="rank 0: SystemExit: 3"):
        group.call(Adder.leave)


def test_a_call_past_its_deadline_names_the_silent_ranks_and_the_group_is_stuck() -> None:
    event = threading.Event()
    with InlinePool(ResourceSpec(num_workers=3), concurrent=True) as pool, WorkerGroup(pool, Adder) as group:
        pending = group.submit(Adder.wait_for, event, [2])
        with pytest.raises(WorkerTimeout, match=r"Adder.wait_for: ranks \[2\] of 3 did not answer within 0.05 s") as e:
            pending.result(timeout_s=0.05)
        assert e.value.ranks == (2,)
        with pytest.raises(GroupStuck, match=r"call 'wait_for' never came back from ranks \[2\]; shut it down"):
            group.call(Adder.count)
        event.set()


def test_after_a_failure_the_others_get_a_grace_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "GRACE_S", 0.05)
    event = threading.Event()
    with InlinePool(ResourceSpec(num_workers=2), concurrent=True) as pool, WorkerGroup(pool, Adder) as group:
        with pytest.raises(WorkerError, match=r"ranks \[0\] raised(.|\n)*ranks \[1\] had not answered 0.05 s later"):
            group.call(Adder.fail_or_wait, event)
        event.set()


def test_concurrent_ranks_can_wait_for_one_another() -> None:
    with InlinePool(ResourceSpec(num_workers=3), concurrent=True) as pool, WorkerGroup(pool, Adder) as group:
        assert sorted(group.call(Adder.meet, threading.Barrier(3))) == [0, 1, 2]


def test_calls_can_be_in_flight_together_and_be_read_in_any_order(pool: InlinePool) -> None:
    with WorkerGroup(pool, Adder) as group:
        first, second = group.submit(Adder.add, rows(0, 0)), group.submit(Adder.add, rows(100, 100))
        assert second.result()["x"].tolist() == [110, 111]
        assert first.result()["x"].tolist() == [10, 11]
        with pytest.raises(GroupStuck, match=r"the result of Adder.add was taken already"):
            first.result()


def test_phases_of_workers_come_back_below_the_callers_phase(pool: InlinePool) -> None:
    with WorkerGroup(pool, Adder) as group, record_phases() as record, phase("update"):
        group.call(Adder.work)
    assert set(record.seconds) == {"update", "update/forward", "update/forward/attention"}
    assert 0 < record.seconds["update/forward"] <= record.seconds["update"]


def test_wrong_calls_are_refused_before_anything_is_sent(pool: InlinePool) -> None:
    class Other(Worker):
        @register(dispatch=Dispatch.ONE_TO_ALL)
        def count(self) -> int:
            return -1

    with WorkerGroup(pool, Adder) as group:
        with pytest.raises(TypeError, match="has no method 'count'; it has"):
            group.call(Other.count)
        with pytest.raises(TypeError, match=r"Adder.add: missing a required argument: 'batch'"):
            group.call(Adder.add, batches=rows(1))
        with pytest.raises(DispatchError, match="3 rows don't divide into 2 parts"):
            group.call(Adder.add, rows(1, 2, 3))
        assert group.call(Adder.count) == [0, 0]


def test_after_shutdown_calls_are_refused(pool: InlinePool) -> None:
    group = WorkerGroup(pool, Adder)
    group.shutdown()
    group.shutdown()
    with pytest.raises(GroupStuck, match="it was shut down"):
        group.call(Adder.count)


def test_meshes_must_cover_the_pool(pool: InlinePool) -> None:
    with pytest.raises(ValueError, match=r"mesh \(dp=4\) covers ranks \[0, 1, 2, 3\], but the pool has 2 places"):
        WorkerGroup(pool, Adder, mesh=Mesh({"dp": 4}))
    with pytest.raises(ValueError, match="generation_mesh"):
        WorkerGroup(pool, Adder, generation_mesh=Mesh({"dp": 1}))


def test_unknown_backend_is_named() -> None:
    with pytest.raises(BackendUnavailable, match="unknown backend 'slurm'; use inline or ray"):
        open_pool(ResourceSpec(num_workers=1), backend="slurm")


def test_inherited_methods_are_registered_and_plain_overrides_are_not() -> None:
    class Doubler(Adder):
        @register(dispatch=Dispatch.DP)
        def add(self, batch: TensorDict) -> TensorDict:
            return TensorDict({"x": batch["x"] * 2}, batch_size=batch.batch_size)

        def mine(self, value: int) -> int:
            return value

    with InlinePool(ResourceSpec(num_workers=1)) as pool, WorkerGroup(pool, Doubler) as group:
        assert group.call(Doubler.add, rows(4))["x"].tolist() == [8]
        assert group.call(Doubler.describe, "rank") == ["rank 0 of 1!"]
        with pytest.raises(TypeError, match="has no method 'add'"):
            group.call(Adder.add, rows(4))
        with pytest.raises(TypeError, match="has no method 'mine'"):
            group.call(Adder.mine, [1])


def test_the_documented_example_runs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "controller.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), {})
