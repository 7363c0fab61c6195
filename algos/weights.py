"""The way of the weights from training to generation: one Plan, made once, run before each rollout."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from reshard.layout import Layout
from reshard.planner import make_plan
from reshard.resharder import Resharder, TransitionStats


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
