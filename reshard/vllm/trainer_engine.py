"""The trainer's side by vLLM's own interface: ``WeightTransferTrainerFactory`` makes it for backend ``reshard``.

For code that is written against vLLM's trainer engines and changes nothing but the init info and the source; other
code is shorter with ``reshard.vllm.WeightSync``, which this wraps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    materialize_full_tensor,
)

from reshard.errors import LayoutError
from reshard.vllm.weight_sync import Weights, WeightSync, trainer_tensors


@dataclass
class ReshardTrainerInitInfo(TrainerInitInfo):
    """``num_engine_ranks``: processes of the engine; None where its worker lives in the trainer's process."""

    backend: ClassVar[str] = "reshard"
    num_engine_ranks: int | None = None
    timeout_s: float = 120.0


class LiveSource(WeightSource):
    """A trainer's live tensors as vLLM's ``WeightSource``; backend ``reshard`` reads them where they are."""

    def __init__(self, weights: Weights) -> None:
        """``weights``: this rank's part of the model, as ``WeightSync.connect`` takes it."""
        self.tensors = trainer_tensors(weights)

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and global shapes."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, for other backends; a collective for DTensors."""
        for name, tensor in self.tensors.items():
            yield name, materialize_full_tensor(tensor)


class ReshardTrainerEngine(TrainerWeightTransferEngine):
    """A trainer rank's connection; ``send_weights`` is one push."""

    init_info_cls = ReshardTrainerInitInfo

    def __init__(self, sync: WeightSync, *, client: VLLMWeightSyncClient, source: LiveSource, is_sender: bool) -> None:
        """Made by ``trainer_init``."""
        self.sync, self.client, self.source, self.is_sender = sync, client, source, is_sender

    @classmethod
    def trainer_init(
        cls,
        init_info: ReshardTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
        config: object = None,
    ) -> Self:
        """Connect. ``config`` is what vLLM 0.26 passes besides; it says nothing that ``init_info`` does not.

        Raises:
            LayoutError: the source is not a ``LiveSource``.
        """
        if not isinstance(source, LiveSource):
            raise LayoutError(
                f"backend 'reshard' reads live tensors, but the source is a {type(source).__name__}: pass "
                "reshard.vllm.trainer_engine.LiveSource(module)"
            )
        sync = WeightSync.connect(
            _WithReset(client),
            source.tensors,
            num_engine_ranks=init_info.num_engine_ranks,
            timeout_s=init_info.timeout_s,
        )
        return cls(sync, client=client, source=source, is_sender=init_info.is_sender)

    def send_weights(self) -> None:
        """Bring the engine to the trainer's weights of now. Raises as ``WeightSync.push``."""
        self.sync.push()

    def shutdown(self) -> None:
        """Release what the connection holds."""
        self.sync.close()


class _WithReset:
    """vLLM's client, which has no call for the prefix cache: its caller pauses the engine, which forgets it."""

    def __init__(self, client: VLLMWeightSyncClient) -> None:
        self._client = client

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._client.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._client.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._client.finish_weight_update()

    def reset_prefix_cache(self) -> None:
        """Left to the caller."""
