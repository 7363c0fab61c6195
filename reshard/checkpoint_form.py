"""Between the tensors that Transformers trains and those that checkpoints, and engines, know.

Transformers may hold several tensors of a checkpoint as one (all experts of a layer in one stack). Its own conversion
for saving tells how: run once on the meta device under the loader's tracer, it gives, for every box of a trained
tensor, the checkpoint's tensor that it is and where it lies in that. With this *form*, a Layout of trained tensors, in
whatever shards, becomes one of the checkpoint's tensors, at the same addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from reshard.errors import LayoutError
from reshard.layout import Address, Holding, Layout, TensorSpec
from reshard.loader_layout import trace_loader
from reshard.region import Region
from reshard.strided_view import dense_strides
from reshard.torch_layout import dtype_of


@dataclass(frozen=True, slots=True)
class CheckpointForm:
    """How trained tensors map to the checkpoint's.

    Attributes:
        boxes: by trained name, its boxes; a box's address is its place in the checkpoint's tensor ``address.storage``.
        shapes: of the checkpoint's tensors.
    """

    boxes: Mapping[str, tuple[Holding, ...]]
    shapes: Mapping[str, tuple[int, ...]]

    def apply(self, layout: Layout) -> Layout:
        """``layout``, of trained tensors, as one of the checkpoint's tensors at the same addresses.

        Raises:
            LayoutError: it has a tensor that the model which this form is of does not have.
        """
        unknown = [name for name in layout.specs if name not in self.boxes]
        if unknown:
            raise LayoutError(
                f"{len(unknown)} tensors are none of the model's ({', '.join(unknown[:4])}): pass the module itself, "
                "or all tensors by their checkpoint names"
            )
        specs: dict[str, TensorSpec] = {}
        holdings = []
        for held in (held for rank in layout.ranks for held in layout.holdings(rank)):
            for part in _parts(held, self.boxes[held.region.name], self.shapes):
                name = part.region.name
                specs.setdefault(name, TensorSpec(name, self.shapes[name], layout.specs[held.region.name].dtype))
                holdings.append(part)
        ties = {name: target for name, target in layout.ties.items() if target in specs}
        return Layout.from_holdings(specs.values(), holdings, ranks=layout.ranks, memory=layout.memory, ties=ties)


def checkpoint_form(model: nn.Module) -> CheckpointForm | None:
    """How ``model``, a Transformers model, maps to its checkpoint; None where both have the same tensors.

    Built from its config on the meta device: no memory is taken and the model is not touched. Shards (FSDP2, tensor
    parallel) don't matter, as the model built is whole.

    Raises:
        LayoutError: the conversion computes values, so that no box of a trained tensor is the checkpoint's.
    """
    from transformers import AutoModelForCausalLM, PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return None
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(model.config)  # type: ignore[no-untyped-call]
    trained: dict[str, torch.Tensor] = twin.state_dict()
    saved: dict[str, torch.Tensor] = revert_weight_conversion(twin, dict(trained))
    if saved.keys() == trained.keys():
        return None
    targets = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in saved.items()}

    def save(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in revert_weight_conversion(twin, dict(weights)).items():
            targets[name].copy_(tensor)

    specs = [TensorSpec(name, tuple(t.shape), dtype_of(t.dtype)) for name, t in trained.items()]
    trace = trace_loader(save, specs, targets)
    hidden = sorted({*trace.layout.opaque(0), *trace.unwritten})
    if hidden:
        raise LayoutError(
            f"Transformers computes {len(hidden)} tensors of the checkpoint of {type(model).__name__} when it saves "
            f"({', '.join(hidden[:4])}): pass the tensors by their checkpoint names instead of the module"
        )
    boxes: dict[str, list[Holding]] = {}
    for box in trace.layout.holdings(0):
        boxes.setdefault(box.region.name, []).append(box)
    return CheckpointForm(
        boxes={name: tuple(found) for name, found in boxes.items()},
        shapes={name: tuple(t.shape) for name, t in saved.items()},
    )


def _parts(held: Holding, boxes: Iterable[Holding], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Holding]:
    """The checkpoint's boxes inside one held box of a trained tensor."""
    for box in boxes:
        shared = held.region.intersect(box.region)
        if shared.is_empty:
            continue
        name, strides = box.address.storage, box.address.strides
        whole = dense_strides(shapes[name])
        steps = [low - origin for low, origin in zip(shared.start, box.region.start, strict=True)]
        first = box.address.offset_bytes // box.address.dtype.itemsize
        first += sum(step * stride for step, stride in zip(steps, strides, strict=True))
        start, stop, along = [], [], []
        for dim, stride in enumerate(whole):
            low = first // stride % shapes[name][dim]
            source = next((d for d, s in enumerate(strides) if s == stride and shared.shape[d] > 1), None)
            start.append(low)
            stop.append(low + (1 if source is None else shared.shape[source]))
            along.append(1 if source is None else held.address.strides[source])
        ahead = [low - origin for low, origin in zip(shared.start, held.region.start, strict=True)]
        at = held.address.advance(ahead)
        address = Address(at.storage, at.offset_bytes, tuple(along), at.dtype)
        yield Holding(held.rank, Region(name, tuple(start), tuple(stop)), address)
