"""PromptLoader: batches of prompts in a seeded order, with a position that a checkpoint keeps exactly."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from algos.data.dataset import Prompt, PromptDataset
from algos.errors import InputError


class PromptLoader:
    """Batches for as many epochs as are asked for.

    Each epoch goes through the data in an order of its own, drawn from (seed, epoch) alone, or in the file's order
    without ``shuffle``. ``drop_last`` leaves out the prompts at an epoch's end that fill no batch (other ones in
    every epoch when shuffled); without it the last batch is shorter. A position at an epoch's end *is* the start of
    the next epoch: nothing is ever exhausted.

    Raises:
        InputError: ``batch_size`` is below 1, or above the number of prompts with ``drop_last``.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"data.train_batch_size must be at least 1 prompt, got {batch_size}")
        if seed < 0:
            raise InputError(f"data.seed must be 0 or more, got {seed}")
        if drop_last and batch_size > len(dataset):
            raise InputError(
                f"data.train_batch_size={batch_size} prompts, but the data has only {len(dataset)}; "
                f"use a batch of at most {len(dataset)} or more data"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._epoch = 0
        self._batch_idx = 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next batch belongs to."""
        return self._epoch

    @property
    def num_batches_per_epoch(self) -> int:
        """How many batches an epoch has: rounded down with ``drop_last``, up without."""
        full, rest = divmod(len(self._dataset), self._batch_size)
        return full + (1 if rest and not self._drop_last else 0)

    def next_batch(self) -> list[Prompt]:
        """The next batch; after an epoch's last one comes the next epoch's first."""
        start = self._batch_idx * self._batch_size
        batch = [self._dataset[int(idx)] for idx in self._order[start : start + self._batch_size]]
        self._batch_idx += 1
        if self._batch_idx == self.num_batches_per_epoch:
            self._epoch, self._batch_idx = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return batch

    def __iter__(self) -> Iterator[list[Prompt]]:
        """The batches that are left in the current epoch, all of them at its start."""
        epoch = self._epoch
        while self._epoch == epoch:
            yield self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch given out, and what it holds for; plain JSON values."""
        return {"epoch": self._epoch, "batch_idx": self._batch_idx, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position, so that the next batch is the one that an unbroken run would have given.

        Raises:
            InputError: the state was saved with other data or options (which are named), or is incomplete.
        """
        identity = self._identity()
        missing = {"epoch", "batch_idx", *identity} - set(state)
        if missing:
            raise InputError(f"the saved data position lacks {', '.join(sorted(missing))}; it can't be resumed from")
        changed = [f"{key} was {state[key]} and is {now}" for key, now in identity.items() if state[key] != now]
        if changed:
            raise InputError(
                f"the saved data position belongs to other data or options: {'; '.join(changed)}. Put them back, or "
                "start a new run"
            )
        self._epoch, self._batch_idx = int(state["epoch"]), int(state["batch_idx"])
        self._order = self._order_of(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
            "num_prompts": len(self._dataset),
            "data_digest": self._dataset.digest,
        }

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._dataset))
        # RandomState's stream is frozen across NumPy versions, so a resumed run draws the same order anywhere.
        return np.random.RandomState([self._seed & 0xFFFFFFFF, self._seed >> 32, epoch]).permutation(len(self._dataset))
