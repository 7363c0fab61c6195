"""One batch of rows on its way through the model: what they have produced, and the state that they decode from."""

import dataclasses

import torch
from transformers import PreTrainedModel

from hybrid.engines.kv_cache import make_cache
from hybrid.engines.model_io import cache_argument
from hybrid.engines.sampling import SamplingParams, uniforms


@dataclasses.dataclass(frozen=True, slots=True)
class RowOutputs:
    """What `generate` fills in, a row a sample: ids and log-probs [B, R], lengths and truncated [B], draws [B, R]."""

    ids: torch.Tensor
    log_probs: torch.Tensor
    lengths: torch.Tensor
    truncated: torch.Tensor
    draws: torch.Tensor

    @classmethod
    def empty(
        cls, num_rows: int, params: SamplingParams, first_row: int, pad_token_id: int, device: torch.device
    ) -> "RowOutputs":
        """Return outputs with no token yet, and the draws of the given rows."""
        shape = (num_rows, params.max_new_tokens)
        draws = uniforms(params.seed, range(first_row, first_row + num_rows), params.max_new_tokens)
        return cls(
            ids=torch.full(shape, pad_token_id, dtype=torch.int64, device=device),
            log_probs=torch.zeros(shape, dtype=torch.float32, device=device),
            lengths=torch.zeros(num_rows, dtype=torch.int64, device=device),
            truncated=torch.zeros(num_rows, dtype=torch.bool, device=device),
            draws=draws.to(device),
        )

    def part(self, rows: range) -> "RowOutputs":
        """Return views of the given rows."""
        part = slice(rows.start, rows.stop)
        return RowOutputs(
            self.ids[part], self.log_probs[part], self.lengths[part], self.truncated[part], self.draws[part]
        )


class Decoder:
    """The model with the state of the rows that decode together: cache, attention mask and next position."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[tuple[int, ...]],
        *,
        max_new_tokens: int,
        pad_token_id: int,
        last_position: int,
    ) -> None:
        """Set the prompts side by side, padded on the left; `last_position` is the model's largest position."""
        device = model.device
        width = max(len(prompt) for prompt in prompts)
        ids = [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._model = model
        self._cache_argument = cache_argument(model)
        self._last_position = last_position
        self._prompt_ids = torch.tensor(ids, device=device)
        self._mask = torch.arange(width + max_new_tokens, device=device) >= (width - lengths)[:, None]
        self._is_padded = any(len(prompt) < width for prompt in prompts)
        self._next_position = lengths
        self._num_cached = 0
        self._cache = make_cache(model.config, width + max_new_tokens)

    def prefill(self, prompt_of_row: torch.Tensor) -> torch.Tensor:
        """Run all prompts, then repeat what is cached for the rows; return the rows' next-token logits [rows, V]."""
        width = self._prompt_ids.shape[1]
        positions = (torch.arange(width, device=self._mask.device) - width + self._next_position[:, None]).clamp(min=0)
        logits = self._forward(self._prompt_ids, positions)
        self.keep(prompt_of_row)
        return logits[prompt_of_row]

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with the given rows alone (an index may repeat)."""
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]
        self._next_position = self._next_position[rows]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to each row; return the next-token logits [rows, V]."""
        positions = self._next_position.clamp(max=self._last_position)
        self._next_position = self._next_position + 1
        return self._forward(tokens[:, None], positions[:, None])

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._num_cached += ids.shape[1]
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask[:, : self._num_cached] if self._is_padded else None,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        return output.logits[:, -1]
