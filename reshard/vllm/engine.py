"""The weight-transfer engine that vLLM makes for ``weight_transfer_config={"backend": "reshard"}``, one a worker."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from reshard.arena import Arena
from reshard.errors import StateError
from reshard.resharder import Resharder
from reshard.vllm.live_model import LiveModel
from reshard.vllm.quantised_update import Allocate
from reshard.vllm.session import Membership, SessionInfo, join_as_engine

_ENGINES: weakref.WeakSet[ReshardWeightTransferEngine] = weakref.WeakSet()


@dataclass
class ReshardInitInfo(WeightTransferInitInfo):
    """How to join a session: the fields of ``SessionInfo``; empty where the trainer lives in this process."""

    session: dict[str, Any] = field(default_factory=dict)


@dataclass
class ReshardUpdateInfo(WeightTransferUpdateInfo):
    """One update: the version that the weights get, and how long to wait for the bytes."""

    version: int = 0
    deadline_s: float = 60.0


class ReshardWeightTransferEngine(WeightTransferEngine[ReshardInitInfo, ReshardUpdateInfo]):
    """Takes weights where they live: trainer ranks push what this rank lacks into its parameters.

    A worker of vLLM owns it. ``start_weight_update``, ``update_weights`` and ``finish_weight_update`` make one update;
    from the first to the last the model refuses to run, and after an error until an update succeeds.
    """

    init_info_cls = ReshardInitInfo
    update_info_cls = ReshardUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        """Called by vLLM's worker once the model is loaded; learns and moves nothing yet."""
        super().__init__(config, vllm_config, device, model)
        self.live = LiveModel(vllm_config, model, self.model_config)
        self._resharder: Resharder | None = None
        self._membership: Membership | None = None
        self._own_arena: Arena | None = None
        self._num_sessions = 0
        self._is_whole = True
        model.register_forward_pre_hook(self._refuse_while_incomplete)
        _ENGINES.add(self)

    @property
    def resharder(self) -> Resharder:
        """The bound Plan.

        Raises:
            StateError: no trainer has connected yet.
        """
        if self._resharder is None:
            raise StateError(
                "no trainer is connected to this engine: call reshard.vllm.WeightSync.connect in the trainer before "
                "updating weights"
            )
        return self._resharder

    @property
    def is_whole(self) -> bool:
        """Whether the engine's weights are one whole set: false during an update, and after one that failed."""
        return self._is_whole

    @property
    def has_empty_prefix_cache(self) -> bool:
        """Whether nothing computed with older weights can be left: vLLM forgets its prefix cache as it goes to sleep,
        and can't compute before the KV cache wakes.
        """
        from reshard.vllm.memory import engine_memory

        memory = engine_memory()
        return memory is not None and memory.has_slept

    def bind(self, resharder: Resharder) -> None:
        """Use a Plan that a trainer in this process has bound; the engine closes it."""
        self._close_binding()
        self._resharder = resharder

    def init_transfer_engine(self, init_info: ReshardInitInfo) -> None:
        """Join the trainer's session: learn the layout, agree on a Plan, bind it. Blocks until all ranks are there.

        Raises:
            LayoutError, PlanError: the two sides do not hold the same model.
            TransportError, PeerTimeout: a process failed or did not come.
        """
        if not init_info.session:
            _ = self.resharder
            return
        self._close_binding()
        info = SessionInfo.from_dict(init_info.session)
        exchange = info.exchange()

        def join() -> None:
            arena = self._destination_arena()
            self._membership = join_as_engine(
                info,
                exchange,
                learn=lambda specs, rank: self.live.layout(specs, rank=rank, allocate=self._allocate_in(arena)),
                tensors=lambda: self.live.tensors,
                arena=arena,
            )
            self._resharder = self._membership.resharder

        exchange.guarded("an engine rank", join)

    def start_weight_update(self) -> None:
        """Open the update: from here on the model does not run until it is finished."""
        _ = self.resharder
        self._is_whole = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all weights of one version. Blocks until the last byte has arrived."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ReshardUpdateInfo) -> None:
        """Run the transition; the trainer's ranks run theirs at the same time.

        Raises:
            TransportError, PeerTimeout: it failed; the weights are not whole and the model refuses to run.
        """
        is_newer = update_info.version > self.resharder.version  # not where an update is repeated that failed elsewhere
        self.resharder.run(version=update_info.version if is_newer else None, deadline_s=update_info.deadline_s)

    def finish_weight_update(self) -> None:
        """Bring what depends on the weights up to date and let the model run again."""
        self.resharder.require_complete()
        self.live.finish()
        self._is_whole = True

    def shutdown(self) -> None:
        """Release what the transfer holds; the weights stay as they are."""
        self._close_binding()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Of older vLLM: always an error, as weights are pushed from where they live, not from an iterator."""
        raise StateError("backend 'reshard' sends from live tensors: use reshard.vllm.WeightSync in the trainer")

    def _refuse_while_incomplete(self, module: nn.Module, args: object) -> None:
        if not self._is_whole:
            raise StateError(
                "the engine's weights are not whole (an update is under way or failed): push again before generating"
            )

    def _destination_arena(self) -> Arena:
        """The arena that holds the live parameters; they are moved into one of this engine's own on a CPU without."""
        from reshard.vllm.memory import engine_memory

        memory = engine_memory()
        if memory is not None:
            return memory.arena
        if self._own_arena is None:
            if self.device.type == "cpu":
                self._own_arena = Arena.host()
                move_into(self._own_arena, self.model)
            else:
                self._own_arena = Arena.cuda(self.device.index or 0)
        return self._own_arena

    def _allocate_in(self, arena: Arena) -> Allocate:
        """Staging tensors from ``arena``, one region each, under names that no earlier session used."""
        self._num_sessions += 1
        session = self._num_sessions

        def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            num_bytes = max(math.prod(shape) * dtype.itemsize, 1)
            return arena.allocate(f"{session}.{name}", num_bytes).tensor(dtype, shape)

        return allocate

    def _close_binding(self) -> None:
        if self._membership is not None:
            self._membership.close()
        elif self._resharder is not None:
            self._resharder.close()
        self._resharder = self._membership = None


def local_engine() -> ReshardWeightTransferEngine | None:
    """The engine whose worker lives in this process; None if there is none.

    Raises:
        StateError: there are several.
    """
    found = list(_ENGINES)
    if len(found) > 1:
        raise StateError(f"{len(found)} vLLM engines live in this process: shut all but one down before connecting")
    return found[0] if found else None


def move_into(arena: Arena, model: nn.Module) -> None:
    """Move a host model's parameters into ``arena``, so that other processes can write them; values stay."""
    moved: dict[int, torch.Tensor] = {}
    for index, (name, tensor) in enumerate([*model.named_parameters(), *model.named_buffers()]):
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            continue
        key = storage.data_ptr()
        if key not in moved:
            region = arena.allocate(f"weights.{index}.{name}", storage.nbytes())
            moved[key] = region.tensor(shape=(storage.nbytes(),))
            moved[key].copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        place = torch.empty(0, dtype=tensor.dtype).set_(
            moved[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        tensor.data = place
