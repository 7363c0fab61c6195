"""How a trainer speaks to an engine's control plane: in this process, over HTTP, or to several engines at once.

vLLM's own clients (``vllm.distributed.weight_transfer.clients``) fit ``EngineClient`` but for the prefix cache: with
them, reset it yourself after each update.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from reshard.errors import ReshardError, StateError, TransportError

if TYPE_CHECKING:
    from vllm import LLM


class EngineClient(Protocol):
    """What a weight update asks of an engine; every call blocks."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every rank of the engine join a session."""

    def start_weight_update(self) -> None:
        """Open an update; refused where requests are running."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the weights."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update and publish its version."""

    def reset_prefix_cache(self) -> None:
        """Forget what was computed with older weights."""


class LLMClient:
    """An ``vllm.LLM`` of this process, or one of this process's ranks under ``external_launcher``."""

    def __init__(self, llm: LLM) -> None:
        """Borrow ``llm``."""
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See ``EngineClient``."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """See ``EngineClient``.

        Raises:
            StateError: requests are in flight; nothing has changed.
        """
        unfinished = self._llm.llm_engine.get_num_unfinished_requests()
        if unfinished:
            raise StateError(
                f"{unfinished} requests are in flight: their tokens would come from two versions of the weights; let "
                "generate() return, or abort them, before pushing"
            )
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See ``EngineClient``."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See ``EngineClient``."""
        self._llm.llm_engine.collective_rpc("finish_weight_update")

    def reset_prefix_cache(self) -> None:
        """See ``EngineClient``.

        Raises:
            StateError: the cache could not be reset, as blocks of it are in use.
        """
        if not self._llm.reset_prefix_cache():
            raise StateError("vLLM did not reset its prefix cache: blocks of it are still in use")


class HTTPClient:
    """A vLLM server (``vllm serve`` with ``VLLM_SERVER_DEV_MODE=1``, which opens its RL routes).

    Requests that run when an update starts are waited for and new ones are held back until it is finished: the server
    is paused meanwhile.
    """

    def __init__(self, base_url: str, *, timeout_s: float = 300.0) -> None:
        """``base_url`` is like ``http://127.0.0.1:8000``."""
        self._base_url, self._timeout_s = base_url.rstrip("/"), timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See ``EngineClient``."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """See ``EngineClient``."""
        self._post("pause?mode=wait")
        try:
            self._post("start_weight_update")
        except TransportError:
            self._post("resume")
            raise

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See ``EngineClient``."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See ``EngineClient``."""
        self._post("finish_weight_update", None if weight_version is None else {"weight_version": weight_version})
        self._post("resume")

    def reset_prefix_cache(self) -> None:
        """See ``EngineClient``."""
        self._post("reset_prefix_cache")

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        request = urllib.request.Request(
            f"{self._base_url}/{path}",
            data=json.dumps(body).encode() if body is not None else b"",
            headers={"Content-Type": "application/json"} if body is not None else {},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                response.read()
        except urllib.error.HTTPError as error:
            words = error.read().decode(errors="replace")[:500]
            raise TransportError(f"the engine at {self._base_url} refused {path}: {error.code} {words}") from error
        except urllib.error.URLError as error:
            raise TransportError(
                f"the engine at {self._base_url} can't be reached for {path}: {error.reason}"
            ) from error


class Replicas:
    """Several engines of one model as one: they take part in one session and get every update together.

    Pass ``num_engine_ranks`` of all of them together to ``WeightSync.connect``. Engines may be on several hosts.
    """

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        """Borrow the engines' clients; each call goes to all of them at once."""
        if not clients:
            raise ValueError("expected at least one engine's client, got none")
        self._clients = tuple(clients)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See ``EngineClient``."""
        self._at_once(lambda client: client.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        """See ``EngineClient``. Where one engine refuses, those that had opened an update go on with what they have."""
        opened: list[EngineClient] = []
        for idx, client in enumerate(self._clients):
            try:
                client.start_weight_update()
            except ReshardError as error:
                for other in opened:
                    with contextlib.suppress(ReshardError):  # never filled: it refuses to run until it is
                        other.finish_weight_update()
                raise type(error)(f"engine {idx} of {len(self._clients)}: {error}") from error
            opened.append(client)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See ``EngineClient``."""
        self._at_once(lambda client: client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See ``EngineClient``."""
        self._at_once(lambda client: client.finish_weight_update(weight_version))

    def reset_prefix_cache(self) -> None:
        """See ``EngineClient``."""
        self._at_once(lambda client: client.reset_prefix_cache())

    def _at_once(self, call: Callable[[EngineClient], None]) -> None:
        """Call all and wait for all; the first error, with the engine's number."""
        with ThreadPoolExecutor(len(self._clients), thread_name_prefix="reshard-replica") as threads:
            answers = [threads.submit(call, client) for client in self._clients]
        for idx, answer in enumerate(answers):
            if error := answer.exception():
                raise TransportError(f"engine {idx} of {len(self._clients)}: {error}") from error
