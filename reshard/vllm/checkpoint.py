"""The tensors that a model's published checkpoint has, from its config alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from reshard.errors import LayoutError
from reshard.layout import TensorSpec
from reshard.spec import ModelSpec
from reshard.spec_transformers import checkpoint_from_transformers
from reshard.torch_layout import dtype_of


def checkpoint_specs(
    config: Mapping[str, Any] | str | Path, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[TensorSpec, ...]:
    """Names, shapes and dtypes of a model's tensors as Hugging Face hosts them, tied ones once.

    ``config`` is a ``config.json``: its fields, its path, or the folder that it lies in. Experts are one tensor each,
    whatever Transformers makes of them in memory; tensors that must stay float32 do. Raises LayoutError for a model
    that neither Transformers nor ``ModelSpec`` knows.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    fields = dict(config) if isinstance(config, Mapping) else _read(Path(config))
    fields.pop("quantization_config", None)
    kind = fields.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        return ModelSpec.from_config({**fields, "model_type": kind}, dtype=dtype_of(dtype)).specs()
    return checkpoint_from_transformers(AutoConfig.for_model(kind, **fields), dtype=dtype_of(dtype)).tensors


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise LayoutError(f"no model config at {path}: give the path of a config.json or of its folder")
    fields: dict[str, Any] = json.loads(file.read_text())
    return fields
