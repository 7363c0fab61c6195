"""Weights of real model shapes in labelled memory: the trainer's separate matrices and the engine's fused ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder: sizes in elements."""

    hidden: int
    intermediate: int
    num_layers: int
    query: int
    key_value: int
    vocab: int
    tied: bool


MODELS = {
    "7B": ModelShape(  # Qwen2.5-7B
        hidden=3584, intermediate=18944, num_layers=28, query=3584, key_value=512, vocab=152064, tied=False
    ),
    "0.5B": ModelShape(  # Qwen2.5-0.5B
        hidden=896, intermediate=4864, num_layers=24, query=896, key_value=128, vocab=151936, tied=True
    ),
    "135M": ModelShape(  # SmolLM2-135M
        hidden=576, intermediate=1536, num_layers=30, query=576, key_value=192, vocab=49152, tied=True
    ),
    "tiny": ModelShape(hidden=64, intermediate=160, num_layers=2, query=64, key_value=32, vocab=512, tied=True),
}


def fused_shapes(model: ModelShape) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Each destination matrix and the rows of the sources that it is fused from (vectors are matrices of one row)."""
    for _ in range(model.num_layers):
        yield (
            (model.query + 2 * model.key_value, model.hidden),
            [model.query, model.key_value, model.key_value],
        )
        yield (model.hidden, model.query), [model.hidden]
        yield (2 * model.intermediate, model.hidden), [model.intermediate, model.intermediate]
        yield (model.hidden, model.intermediate), [model.hidden]
        yield (1, model.hidden), [1]
        yield (1, model.hidden), [1]
    for _ in range(1 if model.tied else 2):
        yield (model.vocab, model.hidden), [model.vocab]
    yield (1, model.hidden), [1]


@dataclass(frozen=True, slots=True)
class Weights:
    """Sources, and the views of the fused destinations that they belong in, in the same order."""

    sources: list[torch.Tensor]
    views: list[torch.Tensor]

    @property
    def num_elements(self) -> int:
        """Elements that one transition copies."""
        return sum(source.numel() for source in self.sources)

    def relabel(self, step: int) -> None:
        """Give every source values of its own, other ones each step, exact in float32."""
        for idx, source in enumerate(self.sources):
            flat = source.view(-1)
            values = torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)
            flat.copy_(values.remainder_(65_521).add_(idx + step))

    def check(self) -> None:
        """Compare every destination with its source, bit for bit; AssertionError names the first that differs."""
        for idx, (view, source) in enumerate(zip(self.views, self.sources, strict=True)):
            assert torch.equal(view, source.to(view.dtype)), f"source {idx} of shape {tuple(source.shape)} differs"


def make_weights(
    name: str, *, source: torch.dtype, destination: torch.dtype, device: str, num_layers: int | None = None
) -> Weights:
    """Allocate both sides of the model called ``name``, or of its first ``num_layers`` layers and the rest."""
    model = MODELS[name] if num_layers is None else replace(MODELS[name], num_layers=num_layers)
    sources, views = [], []
    for shape, rows in fused_shapes(model):
        fused = torch.zeros(shape, dtype=destination, device=device)
        views += fused.split(rows)
        sources += [torch.zeros(num_rows, shape[1], dtype=source, device=device) for num_rows in rows]
    return Weights(sources, views)
