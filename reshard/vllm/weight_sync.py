"""A trainer's side of live weights in vLLM: connect once, push after each optimizer step.

Colocated (the engine's worker lives in the trainer's process, one engine rank a trainer rank) and separate (the engine
has processes of its own on this host) look the same to the caller.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, get_args

import torch
import torch.distributed as dist

from reshard.checkpoint_form import checkpoint_form
from reshard.errors import LayoutError, PlanError, StateError, TransportError
from reshard.layout import Layout
from reshard.names import canonical_names
from reshard.plan import Plan
from reshard.resharder import Resharder, TransitionStats
from reshard.torch_layout import gather_bytes, gather_layout
from reshard.transports.base import Transport
from reshard.transports.collective import CollectiveTransport
from reshard.vllm.clients import EngineClient
from reshard.vllm.exchange import Exchange
from reshard.vllm.quantised_update import Lender
from reshard.vllm.reach import TransportChoice
from reshard.vllm.session import Membership, SessionInfo, join_as_trainer, plan_between
from reshard.vllm.turns import Turns

if TYPE_CHECKING:
    from reshard.vllm.engine import ReshardWeightTransferEngine

Weights = torch.nn.Module | Mapping[str, torch.Tensor]


class WeightSync:
    """A trainer rank's connection to a vLLM engine. Make it with ``connect``."""

    def __init__(
        self,
        client: EngineClient | None,
        resharder: Resharder,
        *,
        rank: int,
        exchange: Exchange | None,
        engine: ReshardWeightTransferEngine | None,
        group: dist.ProcessGroup | None = None,
        folder: str | None = None,
    ) -> None:
        """``exchange`` is the session's, where the engine has processes of its own; else ``engine`` is this one's.

        ``group`` and ``folder``, if any, are the session's own, which ``close`` takes down and removes.
        """
        self._client, self._resharder, self._rank = client, resharder, rank
        self._engine = engine
        self._session_group, self._folder = group, folder
        self._turns = Turns(exchange) if exchange is not None else None
        self._version = 0

    @classmethod
    def connect(
        cls,
        client: EngineClient | None,
        weights: Weights,
        *,
        num_engine_ranks: int | None = None,
        group: dist.ProcessGroup | None = None,
        transport: Transport | TransportChoice = "auto",
        host: str = "127.0.0.1",
        ignore: Collection[str] = (),
        timeout_s: float = 120.0,
    ) -> WeightSync:
        """Agree with the engine on what moves where, once. Every trainer rank calls it.

        Args:
            client: the engine's control plane. Where the engine has its own processes only rank 0 uses it: None on the
                others.
            weights: this rank's part of the model, a module or tensors by checkpoint names; plain tensors or DTensors.
                Borrowed: they stay in place, optimizers update them as ever.
            num_engine_ranks: processes of an engine that lives elsewhere (tensor x pipeline x data parallel size).
                None where its worker lives in this process.
            group: the trainer's ranks; all of ``torch.distributed`` by default, one rank without it.
            transport: how bytes cross between processes. Of an engine in this process: one of ``reshard.transports``,
                by default ``collective`` over ``group``. Of one in processes of its own: ``peer`` (one host),
                ``collective`` (several), or ``auto``, which finds out.
            host: address of trainer rank 0 as engine ranks on other hosts see it.
            ignore: trainer's tensors, names or shell patterns, that generation does not need.
            timeout_s: how long ranks wait for one another here.

        Raises:
            LayoutError, PlanError: trainer and engine do not hold the same model; the message lists what differs.
            TransportError, PeerTimeout: a process failed or did not come.
            StateError: the engine was not started with ``weight_transfer_config={"backend": "reshard"}``.
        """
        tensors = trainer_tensors(weights)
        rank, _ = _place(group)
        if client is None and (rank == 0 or num_engine_ranks is None):
            raise ValueError(f"trainer rank {rank} drives the engine: expected an EngineClient, got None")
        layout = source_layout(weights, tensors, rank=rank)
        if num_engine_ranks is None:
            own = _transport_object(transport)
            return cls._colocated(client, tensors, layout, group=group, transport=own, ignore=ignore)
        if num_engine_ranks < 1:
            raise LayoutError(f"expected at least one engine rank, got num_engine_ranks={num_engine_ranks}")
        info, exchange = _open_session(
            group,
            num_engine_ranks=num_engine_ranks,
            transport=_transport_choice(transport),
            host=host,
            ignore=tuple(ignore),
            timeout_s=timeout_s,
        )
        return cls._beside(client, tensors, layout, info=info, exchange=exchange, rank=rank)

    @classmethod
    def _beside(
        cls,
        client: EngineClient | None,
        tensors: Mapping[str, torch.Tensor],
        own: Layout,
        *,
        info: SessionInfo,
        exchange: Exchange,
        rank: int,
    ) -> WeightSync:
        """With an engine in processes of its own."""
        call = _Call(exchange)
        if rank == 0 and client is not None:
            call.begin(lambda: client.init_weight_transfer_engine({"session": info.to_dict()}))
        bound: list[Membership] = []
        exchange.guarded(
            f"trainer rank {rank}", lambda: bound.append(join_as_trainer(info, exchange, rank, tensors, own))
        )
        call.end()
        return cls(
            client,
            bound[0].resharder,
            rank=rank,
            exchange=exchange,
            engine=None,
            group=bound[0].group,
            folder=info.folder if rank == 0 else None,
        )

    @classmethod
    def _colocated(
        cls,
        client: EngineClient | None,
        tensors: Mapping[str, torch.Tensor],
        own: Layout,
        *,
        group: dist.ProcessGroup | None,
        transport: Transport | None,
        ignore: Collection[str],
    ) -> WeightSync:
        from reshard.vllm.engine import local_engine

        engine = local_engine()
        if engine is None:
            raise StateError(
                "no vLLM engine with weight_transfer_config={'backend': 'reshard'} lives in this process: start it so "
                "(with VLLM_ENABLE_V1_MULTIPROCESSING=0), or pass num_engine_ranks= where it has processes of its own"
            )
        rank, size = _place(group)
        source = gather_layout(own, group) if size > 1 else own
        lender = Lender(layout=own, rank=rank, tensors=tensors)
        part = engine.live.layout(source.specs.values(), rank=rank, lender=lender)
        destination = gather_layout(part, group) if size > 1 else part
        plan = plan_between(source, destination, ignore=ignore)
        if transport is None and not _is_local(plan):
            transport = CollectiveTransport(_group(group))
        resharder = Resharder(plan, tensors, engine.live.tensors, rank=rank, transport=transport)
        engine.bind(resharder)
        return cls(client, resharder, rank=rank, exchange=None, engine=engine)

    @property
    def plan(self) -> Plan:
        """What moves where."""
        return self._resharder.plan

    @property
    def stats(self) -> TransitionStats:
        """What a push costs on this rank."""
        return self._resharder.stats

    @property
    def version(self) -> int:
        """Version of the weights that the engine has; 0 before the first push, the last whole one after a failure."""
        return self._version

    def push(self, *, version: int | None = None, deadline_s: float = 60.0) -> TransitionStats:
        """Bring the engine to the trainer's weights of now. Every trainer rank calls it; blocks until it is done.

        The engine's prefix cache is empty afterwards. Weights must not change until it returns.

        Args:
            version: the number that the weights get; one more than the last where left out. Larger than the last, and
                equal on all ranks. After a failure it may be the one that failed.
            deadline_s: seconds until a PeerTimeout names who was missing; waiting for a server's running requests does
                not count.

        Raises:
            StateError: requests are in flight in the engine (nothing has changed), or the version is not newer.
            TransportError, PeerTimeout: the engine's weights are not whole and it refuses to generate until a push
                succeeds; the trainer's weights are intact.
        """
        version = self.version + 1 if version is None else version
        if version <= self.version:
            raise StateError(f"weights version {version} is not newer than {self.version}: versions only grow")
        if self._turns is None:
            self._update(version, deadline_s, lambda: None)
        elif self._rank == 0:
            with self._turns.lead() as opened:
                self._update(version, deadline_s, opened)
        else:
            self._turns.follow(lambda: self._resharder.run(deadline_s=deadline_s), deadline_s=deadline_s)
        self._version = version
        return self.stats

    def begin_training(self) -> None:
        """Generation is over: the trainer may change its weights from here until the next ``push``."""
        self._resharder.train()

    def verify(self) -> int:
        """Compare what this rank can see of both sides; returns the bytes compared. See ``Resharder.verify``."""
        return self._resharder.verify()

    def close(self) -> None:
        """Release what the connection holds; weights on both sides stay as they are."""
        Membership(self._resharder, self._session_group).close()
        self._session_group = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _update(self, version: int, deadline_s: float, opened: Callable[[], None]) -> None:
        """Drive the engine through an update; ``opened`` is called when it is ready for the weights."""
        assert self._client is not None
        self._client.start_weight_update()
        opened()
        update = {"version": version, "deadline_s": deadline_s}
        if self._engine is not None:
            self._client.update_weights(update)
        else:
            self._send_beside(lambda client: client.update_weights(update), deadline_s)
        self._client.finish_weight_update(str(version))
        if self._engine is None or not self._engine.has_empty_prefix_cache:
            self._client.reset_prefix_cache()

    def _send_beside(self, receive: Callable[[EngineClient], None], deadline_s: float) -> None:
        """Both ends at once: ``receive`` lets the engine's ranks receive, and this rank sends."""
        client, call = self._client, _Call()
        assert client is not None
        call.begin(lambda: receive(client))
        try:
            self._resharder.run(deadline_s=deadline_s)
        finally:
            call.end()


def _transport_object(transport: Transport | TransportChoice) -> Transport | None:
    """What an engine in this process can take; None for the default."""
    if not isinstance(transport, str):
        return transport
    if transport in ("auto", "collective"):
        return None
    raise PlanError(
        f"expected a transport object for an engine in this process, got {transport!r}: pass one of "
        "reshard.transports, or leave it out"
    )


def _transport_choice(transport: Transport | TransportChoice) -> TransportChoice:
    """What an engine in other processes can be told."""
    if isinstance(transport, str) and transport in get_args(TransportChoice):
        return transport
    raise PlanError(
        f"expected transport= one of {', '.join(get_args(TransportChoice))} for engines in other processes, got "
        f"{transport!r}"
    )


def trainer_tensors(weights: Weights) -> dict[str, torch.Tensor]:
    """This rank's tensors by checkpoint names: parameters and persistent buffers of a module, or a mapping's own.

    Raises:
        LayoutError: two names become one, or adapters are not merged.
    """
    if isinstance(weights, torch.nn.Module):
        persistent = weights.state_dict(keep_vars=True)
        named = {name: value for name, value in persistent.items() if isinstance(value, torch.Tensor)}
    else:
        named = dict(weights)
    short = canonical_names(named)
    return {short[name]: tensor.detach() for name, tensor in named.items() if name in short}


def source_layout(weights: Weights, tensors: Mapping[str, torch.Tensor], *, rank: int) -> Layout:
    """What ``rank`` holds, by checkpoint names; a Transformers module may hold several of them as one tensor."""
    layout = Layout.from_tensors(tensors, rank=rank)
    form = checkpoint_form(weights) if isinstance(weights, torch.nn.Module) else None
    return layout if form is None else form.apply(layout)


class _Call:
    """A blocking call on the engine's control plane, beside this rank's own part of the work."""

    def __init__(self, exchange: Exchange | None = None) -> None:
        self._exchange = exchange
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reshard-engine-call")
        self._answer: Future[None] | None = None

    def begin(self, call: Callable[[], None]) -> None:
        """Start ``call``; if it fails, the processes that wait at the exchange are told."""
        self._answer = self._thread.submit(call)
        self._answer.add_done_callback(self._tell)

    def end(self) -> None:
        """Wait for the call, if one was begun; TransportError with the engine's words if it failed."""
        self._thread.shutdown()
        error = self._answer.exception() if self._answer is not None else None
        if error is not None:
            raise TransportError(f"the engine refused: {error}") from error

    def _tell(self, answer: Future[None]) -> None:
        error = answer.exception()
        if error is not None and self._exchange is not None:
            self._exchange.fail("the engine", error)


def _open_session(
    group: dist.ProcessGroup | None,
    *,
    num_engine_ranks: int,
    transport: TransportChoice,
    host: str,
    ignore: tuple[str, ...],
    timeout_s: float,
) -> tuple[SessionInfo, Exchange]:
    """The session that trainer rank 0 serves, told to the other trainer ranks."""
    rank, size = _place(group)
    exchange: Exchange | None = None
    told = b""
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        info = SessionInfo(
            host=host,
            port=store.port,
            session=uuid.uuid4().hex[:12],
            num_trainers=size,
            num_engine_ranks=num_engine_ranks,
            transport=transport,
            folder=tempfile.mkdtemp(prefix="reshard"),
            ignore=ignore,
            timeout_s=timeout_s,
        )
        exchange = Exchange(store, session=info.session, timeout_s=timeout_s)
        told = json.dumps(info.to_dict()).encode()
    if size > 1:
        told = gather_bytes(told or b" ", group)[0]
    info = SessionInfo.from_dict(json.loads(told))
    return info, exchange or info.exchange()


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank among the trainer's ranks and their number."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the world."""
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found


def _is_local(plan: Plan) -> bool:
    return all(copy.is_local for rank in plan.scope for copy in plan.copies_of(rank))
