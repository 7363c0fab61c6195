"""A vLLM engine in a Ray actor on this host: weights go through mapped memory, Ray carries calls and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybrid.engines.vllm_host import Answer, Sizes, VllmHost
from hybrid.errors import BackendUnavailable, ResourceError, WorkerTimeout
from hybrid.ray_backend import connect_cluster, node_resources
from hybrid.resources import check_fit
from reshard.vllm.clients import EngineClient
from reshard.vllm.ray_client import RayClient


class RayVllmHost:
    """A `VllmHost` in an actor: made with it, ended by `shutdown`."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        name: str,
        num_cpus: float,
        num_gpus: float,
        options: Mapping[str, Any] | None = None,
        start_timeout_s: float = 600.0,
        call_timeout_s: float = 3600.0,
    ) -> None:
        """Start the actor on this host, on the cluster that this process is connected to, or on one of its own.

        Args:
            arguments: of `vllm.LLM`.
            name: of the actor, for messages.
            num_cpus, num_gpus: what the actor takes of the cluster's books.
            options: further options of the actor, as Ray takes them; they win.
            start_timeout_s: seconds until vLLM must be up.
            call_timeout_s: bound on each call, such as one of `generate`.

        Raises:
            ResourceError: no node has what the actor takes, or it is not free.
            BackendUnavailable: vLLM did not start; the message has its words.
        """
        self._owns_cluster = connect_cluster()
        self._actor: Any = None
        try:
            asked = {"CPU": float(num_cpus), "GPU": float(num_gpus)}
            check_fit([{key: amount for key, amount in asked.items() if amount > 0}], node_resources())
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            own = {
                "num_cpus": num_cpus,
                "num_gpus": num_gpus,
                "max_restarts": 0,
                "scheduling_strategy": here,
                "runtime_env": {"env_vars": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}},
            }
            remote = ray.remote(VllmHost).options(**own | dict(options or {}))
            self._actor = remote.remote(dict(arguments), in_this_process=True)
            self._sizes = self._wait_for_start(name, start_timeout_s)
        except (BackendUnavailable, ResourceError, WorkerTimeout):
            self.shutdown()
            raise
        self._client = RayClient(self._actor, name=name, timeout_s=call_timeout_s)

    def _wait_for_start(self, name: str, timeout_s: float) -> Sizes:
        try:
            sizes: Sizes = ray.get(self._actor.sizes.remote(), timeout=timeout_s)
        except GetTimeoutError as error:
            free = ", ".join(f"{key} {amount:g}" for key, amount in sorted(_free().items()))
            raise WorkerTimeout(
                f"vLLM in Ray actor {name!r} was not up within {timeout_s:g} s; free in the cluster: {free}. "
                "Raise start_timeout_s, or free what the actor takes",
                [0],
            ) from error
        except RayActorError as error:
            raise BackendUnavailable(f"vLLM did not start in Ray actor {name!r}: {_last_line(error)}") from error
        return sizes

    @property
    def client(self) -> EngineClient:
        """See `Host`."""
        return self._client

    def sizes(self) -> Sizes:
        """See `Host`."""
        return self._sizes

    def generate(self, prompts: Sequence[Sequence[int]], settings: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """See `Host`; also TransportError, which names the actor, where it is gone."""
        answers: list[Answer] = self._client.call("generate", prompts, settings)
        return answers

    def sleep(self, level: int) -> None:
        """See `Host`."""
        self._client.call("sleep", level)

    def wake_up(self) -> None:
        """See `Host`."""
        self._client.call("wake_up")

    def shutdown(self) -> None:
        """Kill the actor, and end the cluster if this host started it. Safe to call twice."""
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
            self._actor = None
        if self._owns_cluster:
            ray.shutdown()
            self._owns_cluster = False


def _free() -> dict[str, float]:
    found: dict[str, float] = ray.available_resources()
    return {key: amount for key, amount in found.items() if key in ("CPU", "GPU")}


def _last_line(error: BaseException) -> str:
    """What the actor's constructor raised: the end of Ray's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
