"""A Transformers cache whose layers hold room for the whole response, so that a decode step copies one token."""

from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer


class ReservedLayer(DynamicLayer):
    """A full-attention cache layer that keeps its keys and values at the front of a buffer with room to grow.

    `DynamicLayer` copies all that is cached for each token. Here `batch_select_indices` (which follows the prefill, and
    drops finished rows) sets aside room for `num_positions` in all, and each update writes in place.
    """

    def __init__(self, num_positions: int) -> None:
        super().__init__()
        self._num_positions = num_positions
        self._key_room: torch.Tensor | None = None
        self._value_room: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [rows, heads, new tokens, width]; return all keys and values so far."""
        if self._key_room is None or self._value_room is None:
            return super().update(key_states, value_states, *args, **kwargs)
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        self._key_room[:, :, begin:end] = key_states
        self._value_room[:, :, begin:end] = value_states
        self.keys, self.values = self._key_room[:, :, :end], self._value_room[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows, in that order and possibly repeated, and make room for the tokens to come."""
        self._key_room, self.keys = self._with_room(self.keys, indices)
        self._value_room, self.values = self._with_room(self.values, indices)

    def _with_room(self, cached: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, num_heads, num_cached, width = cached.shape
        room = cached.new_empty((len(indices), num_heads, max(self._num_positions, num_cached), width))
        used = room[:, :, :num_cached]
        used.copy_(cached.index_select(0, indices))
        return room, used


def make_cache(config: PretrainedConfig, num_positions: int) -> DynamicCache:
    """Return an empty cache for this config: reserved layers for full attention, Transformers' own otherwise."""
    cache = DynamicCache(config=config)
    cache.layers = [ReservedLayer(num_positions) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
