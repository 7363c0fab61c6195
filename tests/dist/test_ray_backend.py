"""Worker groups on Ray: the same calls as inline, across processes; lacks that are named; processes that die."""

import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

ray = pytest.importorskip("ray", reason="ray is not installed; install reshard[ray]")

from hybrid.controller import Dispatch, ResourceSpec, Worker, WorkerContext, WorkerGroup, open_pool, register  # noqa: E402
from hybrid.errors import GroupStuck, ResourceError, WorkerError, WorkerTimeout  # noqa: E402
from hybrid.pool import ResourcePool  # noqa: E402
from hybrid.profiler import phase, record_phases  # noqa: E402
from reshard.errors import PeerTimeout, StateError, TransportError  # noqa: E402
from reshard.mesh import Mesh  # noqa: E402
from reshard.vllm import RayClient  # noqa: E402

pytestmark = pytest.mark.slow
TIMEOUT_S = 200.0

# The processes can't import this file by its name.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Echo(Worker):
    def __init__(self, context: WorkerContext, *, fail_on: int | None = None) -> None:
        super().__init__(context)
        if context.rank == fail_on:
            raise RuntimeError(f"no memory for rank {context.rank}")

    @register(dispatch=Dispatch.DP)
    def add(self, batch: TensorDict) -> TensorDict:
        with phase("add"):
            return TensorDict({"x": batch["x"] + 10 + self.context.rank}, batch_size=batch.batch_size)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def fail(self, ranks: list[int]) -> int:
        if self.context.rank in ranks:
            raise ZeroDivisionError(f"rank {self.context.rank} divides")
        return self.context.rank

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def total(self) -> float:
        if not dist.is_initialized():
            context = self.context
            dist.init_process_group("gloo", store=context.store, rank=context.rank, world_size=context.world_size)
        value = torch.tensor([float(self.context.rank + 1)])
        dist.all_reduce(value)
        return value.item()

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def die(self, rank: int) -> None:
        if self.context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def hang(self, rank: int) -> None:
        if self.context.rank == rank:
            threading.Event().wait(600)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def unsendable(self) -> object:
        return threading.Lock()


class Engine:
    """An engine's control plane that answers each call in another wrong way."""

    def start_weight_update(self) -> None:
        raise StateError("3 requests are in flight")

    def update_weights(self, update_info: dict[str, object]) -> None:
        raise RuntimeError(f"no kernel for version {update_info['version']}")

    def finish_weight_update(self, weight_version: str | None) -> None:
        threading.Event().wait(600)

    def reset_prefix_cache(self) -> None:
        """Never reached: the actor is gone by then."""


def rows(*values: int) -> TensorDict:
    return TensorDict({"x": torch.tensor(values)}, batch_size=[len(values)])


@pytest.fixture(scope="module")
def pool() -> ResourcePool:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    with open_pool(ResourceSpec(num_workers=2, cpus_per_worker=0.5), backend="ray") as opened:
        yield opened
    ray.shutdown()


@pytest.fixture(scope="module")
def group(pool: ResourcePool) -> WorkerGroup:
    with WorkerGroup(pool, Echo, timeout_s=TIMEOUT_S) as started:
        yield started


def test_calls_run_in_other_processes_and_bring_their_phases(group: WorkerGroup) -> None:
    with record_phases() as record:
        assert group.call(Echo.add, rows(0, 1, 2, 3))["x"].tolist() == [10, 11, 13, 14]
    assert set(record.seconds) == {"add"}
    processes = group.call(Echo.process)
    assert len({*processes, os.getpid()}) == 3
    assert group.call(Echo.process) == processes


def test_remote_errors_have_rank_and_traceback(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"Echo.fail: ranks \[1\] raised; rank 1: ZeroDivisionError: rank 1 div") as e:
        group.call(Echo.fail, [1])
    assert "in fail\n" in e.value.failures[0].traceback
    with pytest.raises(WorkerError, match="could not be transferred"):
        group.call(Echo.unsendable)


def test_l3_colocated_groups_meet_at_ports_of_their_own(pool: ResourcePool, group: WorkerGroup) -> None:
    with WorkerGroup(pool, Echo, mesh=Mesh({"tp": 2}), name="second", timeout_s=TIMEOUT_S) as second:
        calls = [member.submit(Echo.total) for member in (group, second)]
        assert [call.result() for call in calls] == [[3.0, 3.0], [3.0, 3.0]]
        with pytest.raises(WorkerError, match=r"ranks \[1\] raised; rank 1: \w+: the worker's process is gone"):
            second.call(Echo.die, 1)
    assert group.call(Echo.total) == [3.0, 3.0]


def test_a_silent_process_is_named_and_the_group_is_stuck(pool: ResourcePool) -> None:
    with WorkerGroup(pool, Echo, timeout_s=TIMEOUT_S) as silent:
        pending = silent.submit(Echo.hang, 0)
        with pytest.raises(WorkerTimeout, match=r"Echo.hang: ranks \[0\] of 2 did not answer within 2 s"):
            pending.result(timeout_s=2)
        with pytest.raises(GroupStuck):
            silent.call(Echo.process)


def test_constructor_errors_name_the_rank(pool: ResourcePool) -> None:
    with pytest.raises(WorkerError, match=r"Echo.__init__: ranks \[1\] raised; rank 1: RuntimeError: no memory"):
        WorkerGroup(pool, Echo, {"fail_on": 1}, timeout_s=TIMEOUT_S)


def test_l1_a_demand_that_cannot_fit_fails_at_once_and_names_the_lack(pool: ResourcePool) -> None:
    with pytest.raises(ResourceError, match=r"lacks CPU \(asked 60, has 2\), GPU \(asked 1, has 0\)"):
        open_pool(ResourceSpec(num_workers=1, cpus_per_worker=60, gpus_per_worker=1), backend="ray")
    with pytest.raises(ResourceError, match=r"6 bundles of {CPU: 1} were asked for, and 2 fit"):
        open_pool(ResourceSpec(num_workers=6, cpus_per_worker=1), backend="ray")


def test_what_others_hold_is_named_after_the_timeout(pool: ResourcePool) -> None:
    with pytest.raises(ResourceError, match=r"not free within 1 s: CPU asked 2, free 1"):
        open_pool(ResourceSpec(num_workers=2, cpus_per_worker=1), backend="ray", timeout_s=1)


def test_what_an_engine_in_an_actor_does_wrong_comes_back_by_its_kind(pool: ResourcePool) -> None:
    actor = ray.remote(Engine).options(num_cpus=0).remote()
    client = RayClient(actor, name="policy", timeout_s=TIMEOUT_S)
    with pytest.raises(StateError, match=r"^3 requests are in flight$"):
        client.start_weight_update()
    refusal = "^the engine in Ray actor 'policy' refused update_weights: RuntimeError: no kernel for version 4$"
    with pytest.raises(TransportError, match=refusal):
        client.update_weights({"version": 4})
    with pytest.raises(PeerTimeout, match="'policy' did not answer finish_weight_update within 1 s: raise timeout_s"):
        RayClient(actor, name="policy", timeout_s=1).finish_weight_update("4")
    ray.kill(actor)
    with pytest.raises(TransportError, match=r"'policy', which holds the engine, is gone \(reset_prefix_cache was"):
        client.reset_prefix_cache()
