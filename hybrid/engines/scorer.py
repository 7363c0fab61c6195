"""Log-probs of a batch's responses under a model: packing, the forward pass, and logits only where they are needed."""

import contextlib
from typing import Any

import torch
from tensordict import TensorDict
from transformers import PretrainedConfig, PreTrainedModel

from hybrid.engines.packing import PackedRows, Packing, pack, split_micro_batches
from hybrid.logprobs import token_log_probs

_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})


class Scorer:
    """Runs micro-batches through a model and returns log-probs and entropies of their response tokens.

    It hooks the model's head, so that this sees the hidden states of the predicting places alone: the model's own code
    around the head (scaling, soft capping) still applies.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute_dtype: torch.dtype,
        packing: Packing,
        max_tokens: int | None,
        max_samples: int | None,
    ) -> None:
        """Borrow `model`; raises ValueError where its attention is of a kind that `packing` can't express."""
        self._model = model
        self._packing: Packing = packing
        self._limits = {"max_tokens": max_tokens, "max_samples": max_samples}
        self._compute_dtype = compute_dtype
        self._window = _sliding_window(model.config)
        self._predictors: torch.Tensor | None = None
        if packing != "padded":
            _check_packable(model)
        model.get_output_embeddings().register_forward_pre_hook(self._select_predictors)

    def split(self, batch: TensorDict) -> list[list[int]]:
        """Return the rows of each micro-batch of `batch` (on the host)."""
        return split_micro_batches(batch, self._packing, **self._limits)

    def score(self, micro_batch: TensorDict, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies of the response tokens, fp32 [B, R] on the model's device, 0 elsewhere.

        With gradient if the caller has it enabled and the weights ask for it.
        """
        packed = pack(micro_batch.to("cpu"), self._packing)
        device = self._model.device
        if not len(packed.targets):
            zeros = torch.zeros(packed.shape, device=device)
            return zeros, zeros
        self._check_window(packed)
        logits = self._logits(packed)
        found = token_log_probs(logits, packed.targets.to(device), temperature=temperature, consume_logits=True)
        assert found.entropy is not None
        return packed.spread(found.log_probs), packed.spread(found.entropy)

    def _logits(self, packed: PackedRows) -> torch.Tensor:
        """Return the logits [T, V] that predict the response tokens."""
        device = self._model.device
        mask = packed.attention_mask.to(device)
        if mask.ndim == 4 and self._model.config._attn_implementation == "eager":
            mask = torch.zeros(mask.shape, device=device).masked_fill_(~mask, torch.finfo(torch.float32).min)
        self._predictors = packed.predictors.to(device)
        try:
            with self._autocast():
                output = self._model(
                    input_ids=packed.input_ids.to(device),
                    attention_mask=mask,
                    position_ids=packed.position_ids.to(device),
                    use_cache=False,
                )
        finally:
            self._predictors = None
        return output.logits[0]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._model.device.type, dtype=self._compute_dtype)

    def _select_predictors(self, _head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self._predictors is None:
            return inputs
        hidden = inputs[0].flatten(0, 1)
        return (hidden.index_select(0, self._predictors)[None], *inputs[1:])

    def _check_window(self, packed: PackedRows) -> None:
        longest = int(packed.position_ids.max()) + 1
        if self._packing != "padded" and self._window is not None and longest > self._window:
            raise ValueError(
                f"A sequence of {longest} tokens passes the model's attention window of {self._window}, which packed "
                'rows do not express; set packing to "padded".'
            )


def _sliding_window(config: PretrainedConfig) -> int | None:
    """Return the attention window of the model's windowed layers, or None where every layer sees all."""
    keys = config.get_text_config(decoder=True).to_dict()
    layer_types = keys.get("layer_types")
    if keys.get("use_sliding_window") is False or (layer_types and "sliding_attention" not in layer_types):
        return None
    window = keys.get("sliding_window")
    return int(window) if window else None


def _check_packable(model: PreTrainedModel) -> None:
    keys = model.config.get_text_config(decoder=True).to_dict()
    other = sorted(set(keys.get("layer_types") or ()) - _PACKABLE_LAYERS)
    implementation = model.config._attn_implementation
    if other or implementation not in ("sdpa", "eager"):
        kind = f"{', '.join(other)} layers" if other else f"{implementation} attention"
        raise ValueError(f'{type(model).__name__} has {kind}, which packed rows do not suit; set packing to "padded".')
