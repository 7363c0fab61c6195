"""The `torch` rollout engine: samples with a Transformers model and its key-value cache, on a CPU or one GPU.

The engine's weights are its own live tensors (`tensors()`), bf16 unless asked otherwise; a transition writes into them
and then sets `version`. Nothing is kept between calls of `generate`, so nothing computed with older weights is used.

One call: every distinct prompt goes through the model once, its cached keys and values are then repeated for its
samples, all rows decode together, and rows that have ended leave the batch once a quarter of it has. On a CPU without
bf16 arithmetic the weights stay bf16 and the computing is in fp32 (`hybrid.engines.widen`).
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tensordict import TensorDict
from transformers import PretrainedConfig

from hybrid.batch import pad_rows, trim, validate
from hybrid.engines.decoder import Decoder, RowOutputs
from hybrid.engines.model_io import load_model, max_positions, named_tensors
from hybrid.engines.sampling import SamplingParams, check_prompts, sample_tokens, step_seed
from hybrid.engines.widen import has_native_bf16, widen_at_use

__all__ = ["SamplingParams", "TorchRolloutEngine", "step_seed"]

_COMPACT_BELOW = 0.75
_logger = logging.getLogger(__name__)


class TorchRolloutEngine:
    """Generates responses with a Transformers causal language model.

    Memory: the weights in `dtype`; during `generate` the cache, 2 x layers x rows x (prompt + response) x key-value
    width x 4 bytes where computing is in fp32 (2 where in bf16), for at most `max_batch_rows` rows; and fp32 logits of
    rows x vocabulary, about three times over.

    Attributes:
        version: number of the weights now in `tensors()`; whoever writes new weights sets it. Each batch records it.
    """

    def __init__(
        self,
        model: str | Path | PretrainedConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        pad_token_id: int = 0,
        max_batch_rows: int = 256,
    ) -> None:
        """Load `model`: a folder, or a config for random weights that a transition will overwrite.

        Args:
            model: what to load.
            dtype: of the weights.
            device: where they live; "cpu" or one GPU.
            pad_token_id: fills unused places of the ids; has no meaning otherwise.
            max_batch_rows: rows that decode together; more samples than this go in turns.

        Raises:
            FileNotFoundError: there is no model folder at that path.
            ValueError: the model takes no key-value cache.
        """
        if max_batch_rows < 1:
            raise ValueError(f"Expected max_batch_rows >= 1, but got {max_batch_rows}.")
        self.device = torch.device(device)
        self.version = 0
        self._model = load_model(model, dtype=dtype, device=self.device).requires_grad_(False)
        self._pad_token_id = pad_token_id
        self._max_batch_rows = max_batch_rows
        self._max_positions = max_positions(self._model)
        self._vocab_size = self._model.get_input_embeddings().num_embeddings
        self._warned_about_support = False
        if self.device.type == "cpu" and dtype != torch.float32 and not has_native_bf16():
            widen_at_use(self._model)

    @property
    def config(self) -> PretrainedConfig:
        """The model's Transformers config."""
        return self._model.config

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live weights by canonical name, tied ones once; writing into them changes what is sampled next."""
        return named_tensors(self._model)

    @contextlib.contextmanager
    def training_memory(self) -> Iterator[None]:
        """Nothing to hand over: this engine holds no memory between calls of `generate` but its weights."""
        yield

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, first_row: int = 0) -> TensorDict:
        """Sample `params.n` responses to each prompt; blocks until all are there.

        Args:
            prompts: token ids, none empty.
            params: how to sample.
            first_row: number of this call's first sample within the whole step, where several engines share one
                step; it offsets the random streams and `group_id`, and must be a multiple of `params.n`.

        Returns:
            A batch (docs/batch.md) of len(prompts) * n rows on the engine's device, the samples of a prompt adjacent.
            A response that would pass the model's last position ends there and counts as truncated.

        Raises:
            ValueError: a prompt is empty, too long for the model, or has an id outside the vocabulary.
            FloatingPointError: the model's logits are not finite.
        """
        check_prompts(prompts, vocab_size=self._vocab_size, max_positions=self._max_positions)
        if first_row % params.n:
            raise ValueError(f"Expected first_row to be a multiple of n = {params.n}, but got {first_row}.")
        if params.cuts_support and not self._warned_about_support:
            self._warned_about_support = True
            _logger.warning(
                "top_p < 1 or top_k > 0: tokens are drawn from a part of the vocabulary, but log-probs are over all of "
                "it, so they understate the sampling probability by the mass left out (docs/batch.md)."
            )
        rows = [prompt for prompt in prompts for _ in range(params.n)]
        outputs = RowOutputs.empty(len(rows), params, first_row, self._pad_token_id, self.device)
        with torch.no_grad():
            for begin in range(0, len(rows), self._max_batch_rows):
                chunk = range(begin, min(begin + self._max_batch_rows, len(rows)))
                self._generate_rows([rows[i] for i in chunk], params, outputs.part(chunk))
        if not bool(torch.isfinite(outputs.log_probs).all()):
            raise FloatingPointError(
                f"The model's logits are not finite with weights version {self.version}; "
                "check the last update's gradient norm and that every tensor was written."
            )
        return self._as_batch(rows, params, first_row, outputs)

    def _generate_rows(self, rows: list[Sequence[int]], params: SamplingParams, outputs: RowOutputs) -> None:
        """Fill `outputs` for these rows, which decode together."""
        distinct = {tuple(prompt): None for prompt in rows}
        prompts = {prompt: i for i, prompt in enumerate(distinct)}
        decoder = Decoder(
            self._model,
            list(prompts),
            max_new_tokens=params.max_new_tokens,
            pad_token_id=self._pad_token_id,
            last_position=(self._max_positions or 2**31) - 1,
        )
        logits = decoder.prefill(torch.tensor([prompts[tuple(prompt)] for prompt in rows], device=self.device))
        active = torch.arange(len(rows), device=self.device)
        is_live = torch.ones(len(rows), dtype=torch.bool, device=self.device)
        limits = self._response_limits(rows, params.max_new_tokens)
        stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=self.device)
        for step in range(params.max_new_tokens):
            tokens, log_probs = sample_tokens(logits, outputs.draws[active, step], params)
            live = active[is_live]
            outputs.ids[live, step] = tokens[is_live]
            outputs.log_probs[live, step] = log_probs[is_live]
            outputs.lengths[live] = step + 1
            has_stopped = torch.isin(tokens, stops)
            at_limit = limits[active] == step + 1
            outputs.truncated[live] = (at_limit & ~has_stopped)[is_live]
            is_live = is_live & ~has_stopped & ~at_limit
            num_live = int(is_live.sum())
            if num_live == 0:
                return
            if num_live <= _COMPACT_BELOW * len(active):
                kept = is_live.nonzero().flatten()
                active, tokens, is_live = active[kept], tokens[kept], is_live[kept]
                decoder.keep(kept)
            logits = decoder.step(tokens)

    def _response_limits(self, rows: list[Sequence[int]], max_new_tokens: int) -> torch.Tensor:
        limits = [max_new_tokens] * len(rows)
        if self._max_positions is not None:
            limits = [min(max_new_tokens, self._max_positions - len(prompt)) for prompt in rows]
        return torch.tensor(limits, device=self.device)

    def _as_batch(
        self, rows: list[Sequence[int]], params: SamplingParams, first_row: int, outputs: RowOutputs
    ) -> TensorDict:
        num_rows = len(rows)
        groups = torch.arange(first_row // params.n, (first_row + num_rows) // params.n, device=self.device)
        fields = {
            "prompt_ids": pad_rows(rows, dtype=torch.int64, value=self._pad_token_id).to(self.device),
            "prompt_len": torch.tensor([len(row) for row in rows], device=self.device),
            "response_ids": outputs.ids,
            "response_len": outputs.lengths,
            "group_id": groups.repeat_interleave(params.n),
            "truncated": outputs.truncated,
            "version": torch.full((num_rows,), self.version, dtype=torch.int64, device=self.device),
            "rollout_log_probs": outputs.log_probs,
        }
        return trim(validate(TensorDict(fields, batch_size=[num_rows])))
