"""Model specs: every checkpoint tensor of a model with its shape and how parallel engines cut it, from config numbers
alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reshard.dtype import DType
from reshard.errors import LayoutError
from reshard.layout import TensorSpec

Cut = Literal["none", "rows", "columns", "vocab", "query", "key", "value", "gate", "up"]
SPECS = Path(__file__).with_name("specs")


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A checkpoint tensor and its place in the model.

    ``cut`` says how tensor parallelism splits it: ``columns`` along dim 1, the rest but ``none`` along dim 0;
    ``query``, ``key`` and ``value`` by whole heads of ``head_dim`` rows, and engines may fuse the three, as they may
    ``gate`` and ``up``. ``layer`` is None outside the layers: then ``is_output`` tells the last stage from the first.
    ``expert`` numbers routed experts. ``fused``, of an uncut tensor that engines fuse with others, is its first row in
    the fused parameter and how many rows that has.
    """

    spec: TensorSpec
    cut: Cut
    layer: int | None = None
    expert: int | None = None
    head_dim: int = 1
    is_output: bool = False
    is_shared_expert: bool = False
    fused: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec:
    """All tensors of a model. ``ties`` maps a tensor's further names to the one listed; ``origin`` says where numbers
    are from.
    """

    name: str
    origin: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    tensors: tuple[ModelTensor, ...]
    ties: Mapping[str, str]

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors, tied ones once."""
        return sum(tensor.spec.numel for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in their own dtypes."""
        return sum(tensor.spec.numel * tensor.spec.dtype.itemsize for tensor in self.tensors)

    @property
    def num_experts(self) -> int:
        """Routed experts per layer; 0 for a dense model."""
        return max((tensor.expert + 1 for tensor in self.tensors if tensor.expert is not None), default=0)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, name: str = "", dtype: DType | None = None) -> "ModelSpec":
        """From the fields of a ``config.json``. LayoutError names a missing field, or the model types that are known.

        Multi-token-prediction layers and vision towers are no part of it.
        """
        from reshard.spec_families import build_tensors

        return build_tensors(config, name=name, dtype=dtype)

    @classmethod
    def load(cls, name_or_path: str, *, dtype: DType | None = None) -> "ModelSpec":
        """A bundled spec by name (``"llama3-8b"``), or a path to a ``config.json`` or a folder with one."""
        path = Path(name_or_path)
        if path.is_dir():
            path = path / "config.json"
        if name_or_path in bundled_names() and not path.exists():
            return cls.from_config(json.loads(_bundle()[name_or_path]), name=name_or_path, dtype=dtype)
        if not path.is_file():
            known = ", ".join(bundled_names())
            raise LayoutError(f"no model {name_or_path!r}: give the path of a config.json, or one of {known}")
        try:
            fields = json.loads(path.read_text())
        except ValueError as error:
            raise LayoutError(f"{path} is not JSON: {error}") from None
        return cls.from_config(fields, name=str(name_or_path), dtype=dtype)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Spec of every tensor, in model order."""
        return tuple(tensor.spec for tensor in self.tensors)


def bundled_names() -> Sequence[str]:
    """Names that ``ModelSpec.load`` knows."""
    return tuple(_bundle())


def _bundle() -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(SPECS.glob("*.json"))}
