"""The way of the weights from training to generation: one Plan, made once, run before each rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from reshard.layout import Layout
from reshard.planner import make_plan
from reshard.resharder import Resharder, TransitionStats

if TYPE_CHECKING:
    from reshard.vllm import WeightSync


class Publisher(Protocol):
    """Brings generation to the trainer's weights."""

    @property
    def version(self) -> int:
        """Version of the weights that generation holds; 0 before the first ``publish``."""

    @property
    def stats(self) -> TransitionStats:
        """What a transition costs."""

    def publish(self, version: int) -> None:
        """Bring generation to ``version``; nothing moves if it is there already."""

    def begin_training(self) -> None:
        """Generation is over: the trainer's parameters may change from here until the next ``publish``."""

    def verify(self) -> int:
        """Compare both sides byte by byte; returns the bytes compared."""


class WeightPublisher:
    """Writes the trainer's parameters into the rollout engine's live tensors, in place, casts included."""

    def __init__(self, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor]) -> None:
        """Plan the transition between tensors by canonical names; the tensors are borrowed and must stay in place.

        Raises:
            LayoutError, PlanError: the two sides do not hold the same model.
        """
        plan = make_plan(Layout.from_tensors(source), Layout.from_tensors(destination))
        self._resharder = Resharder(plan, source, destination)

    @property
    def version(self) -> int:
        """Version of the weights that generation holds; 0 before the first ``publish``."""
        return self._resharder.version

    @property
    def stats(self) -> TransitionStats:
        """What a transition costs."""
        return self._resharder.stats

    def publish(self, version: int) -> None:
        """Bring generation to ``version``; nothing moves if it is there already."""
        if version != self._resharder.version:
            self._resharder.run(version=version)
        self._resharder.require_complete()

    def begin_training(self) -> None:
        """Generation is over: the trainer's parameters may change from here until the next ``publish``."""
        self._resharder.train()

    def verify(self) -> int:
        """Compare both sides byte by byte; returns the bytes compared."""
        return self._resharder.verify()


class SyncPublisher:
    """Pushes the trainer's parameters into a vLLM engine."""

    def __init__(self, sync: WeightSync) -> None:
        """Borrow a connection, see ``VllmRolloutEngine.connect``."""
        self._sync = sync

    @property
    def version(self) -> int:
        """See ``Publisher``."""
        return self._sync.version

    @property
    def stats(self) -> TransitionStats:
        """See ``Publisher``."""
        return self._sync.stats

    def publish(self, version: int) -> None:
        """See ``Publisher``."""
        if version != self._sync.version:
            self._sync.push(version=version)

    def begin_training(self) -> None:
        """See ``Publisher``."""
        self._sync.begin_training()

    def verify(self) -> int:
        """See ``Publisher``."""
        return self._sync.verify()
