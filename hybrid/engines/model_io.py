"""Loading of Transformers causal language models, and the names of the tensors that are a model's weights."""

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging


def load_model(
    source: str | Path | PretrainedConfig, *, dtype: torch.dtype, device: str | torch.device
) -> PreTrainedModel:
    """Return a causal language model in evaluation mode (no dropout), its weights of `dtype` on `device`.

    Args:
        source: a folder that Transformers loads, or a config for random weights (torch's global generator).
        dtype: of the weights; those that the model's class keeps in fp32 stay in fp32.
        device: where the weights live.

    Raises:
        FileNotFoundError: `source` is a path at which there is no model folder.
    """
    with _without_progress_bar():
        if isinstance(source, PretrainedConfig):
            model = AutoModelForCausalLM.from_config(source, dtype=dtype)
        else:
            if not (Path(source) / "config.json").is_file():
                raise FileNotFoundError(f"Expected a model folder at {source}, but there is no config.json in it.")
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


def named_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the live tensors that a checkpoint of `model` holds, by name: parameters and persistent buffers.

    Tied parameters appear once, under the name that comes first in the model. Buffers that follow from the config
    (rotary frequencies) are left out. The tensors share the model's storage: writing to them changes the model.
    """
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    in_checkpoint = model.state_dict().keys()
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in in_checkpoint})
    return tensors


def max_positions(model: PreTrainedModel) -> int | None:
    """Return how many positions the model's config allows a sequence to have, or None where it sets no limit."""
    try:
        limit = model.config.get_text_config(decoder=True).max_position_embeddings
    except AttributeError:
        return None
    return int(limit) if limit else None


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name by which this model's forward takes a cache; it changed between Transformers releases."""
    names = inspect.signature(model.forward).parameters
    for name in ("past_key_values", "cache"):
        if name in names:
            return name
    raise ValueError(f"{type(model).__name__} takes no key-value cache, which generation needs; use another model.")


@contextlib.contextmanager
def _without_progress_bar() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
