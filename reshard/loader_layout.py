"""Learn an engine's layout from its own weight loader, with no weights: run it once on the meta device and watch it
copy.

The engine's ``load_weights`` gets a meta tensor per checkpoint tensor. Views of them keep their storage, so every copy
into a parameter tells, by offsets, sizes and strides, which box of which checkpoint tensor lands where; values are
followed through tensors that the loader makes on the way (see ``loader_tracer``). Parameters with any element that is
computed from the checkpoint are *opaque*: they are named, and need the engine's own reload path.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from reshard.dtype import DType
from reshard.errors import LayoutError
from reshard.layout import Address, Holding, Layout, TensorSpec
from reshard.loader_memory import Memory
from reshard.loader_tracer import LoaderTracer, storage_id
from reshard.region import Region
from reshard.strided_view import Dim, Span, boxes_of_view, dense_strides
from reshard.torch_layout import dtype_of, torch_dtype

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True, slots=True)
class LoaderTrace:
    """What a loader did.

    Attributes:
        layout: the Layout of one rank; its opaque storages are parameters with computed elements.
        unread: checkpoint tensors that reached no parameter.
        unwritten: parameters that nothing of the checkpoint reached.
        sources: per parameter, opaque ones too, the checkpoint tensors that reached it.
    """

    layout: Layout
    unread: tuple[str, ...]
    unwritten: tuple[str, ...]
    sources: Mapping[str, tuple[str, ...]]


def layout_from_loader(
    load_weights: LoadWeights,
    checkpoint: Iterable[TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    *,
    rank: int = 0,
    memory: str | None = None,
) -> Layout:
    """The Layout that ``trace_loader`` finds."""
    return trace_loader(load_weights, checkpoint, parameters, rank=rank, memory=memory).layout


def trace_loader(
    load_weights: LoadWeights,
    checkpoint: Iterable[TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    *,
    rank: int = 0,
    memory: str | None = None,
) -> LoaderTrace:
    """Run ``load_weights`` on meta tensors of the checkpoint and record where each box lands.

    ``parameters`` are the engine's own tensors by name, on the meta device; the live ones must have the same storage
    offsets and strides (build the engine's model a second time under ``torch.device("meta")``). One process is one
    ``rank``; merge the Layouts of all. Raises LayoutError when a parameter is not on the meta device: tracing must
    never write live weights.
    """
    live = [name for name, tensor in parameters.items() if tensor.device.type != "meta"]
    if live:
        raise LayoutError(
            f"parameters {live[:8]} are not on the meta device: trace a copy of the model, never the live one"
        )
    specs = {spec.name: spec for spec in checkpoint}
    tracer = LoaderTracer()
    for tensor in parameters.values():
        if tracer.memory(tensor) is None:
            tracer.add(tensor, Memory(_storage_shape(tensor), dtype_of(tensor.dtype)))
    weights = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta") for name, spec in specs.items()
    }
    for name, tensor in weights.items():
        tracer.add(tensor, Memory.of_checkpoint(name, specs[name].shape, specs[name].dtype))
    with tracer, torch.no_grad():
        load_weights(iter(weights.items()))
    return _Result.of(tracer, specs, parameters).trace(rank, memory)


def _storage_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape that a parameter's storage is seen in: its own if it is dense and fills the storage."""
    num = tensor.untyped_storage().nbytes() // tensor.element_size()
    fills = tensor.numel() == num and tensor.is_contiguous()
    return tuple(tensor.shape) if fills else (num,)


@dataclass(slots=True)
class _Result:
    """What the storages of the parameters hold once the loader is done."""

    specs: Mapping[str, TensorSpec]
    owners: dict[str, Memory]
    sharers: dict[str, str]
    written: frozenset[str]

    @classmethod
    def of(
        cls, tracer: LoaderTracer, specs: Mapping[str, TensorSpec], parameters: Mapping[str, torch.Tensor]
    ) -> "_Result":
        owners: dict[str, Memory] = {}
        owner_of: dict[int, str] = {}
        written = set()
        for name, tensor in parameters.items():
            owner = owner_of.setdefault(storage_id(tensor), name)
            owners.setdefault(owner, tracer.watched(tensor))
            if tracer.was_written(tensor):
                written.add(owner)
        sharers = {name: owner_of[storage_id(tensor)] for name, tensor in parameters.items()}
        return cls(specs, owners, sharers, frozenset(written))

    def trace(self, rank: int, memory: str | None) -> LoaderTrace:
        found = {name: _holdings(self.specs, name, owner, rank) for name, owner in self.owners.items()}
        opaque = sorted(name for name, holdings in found.items() if holdings is None)
        holdings = [holding for own in found.values() for holding in own or ()]
        dtypes = {holding.region.name: holding.address.dtype for holding in holdings}
        specs = [TensorSpec(n, spec.shape, dtypes[n]) for n, spec in self.specs.items() if n in dtypes]
        layout = Layout.from_holdings(specs, holdings, ranks=[rank], memory=memory, opaque={rank: opaque})
        read = {source for owner in self.owners.values() for source in owner.sources}
        return LoaderTrace(
            layout,
            unread=tuple(sorted(set(self.specs) - read)),
            unwritten=tuple(sorted(name for name, owner in self.sharers.items() if owner not in self.written)),
            sources={name: tuple(sorted(self.owners[owner].sources)) for name, owner in self.sharers.items()},
        )


def _holdings(specs: Mapping[str, TensorSpec], storage: str, memory: Memory, rank: int) -> list[Holding] | None:
    """What a storage holds of the checkpoint; None if any element is computed from it."""
    found: list[Holding] = []
    steps = dense_strides(memory.shape)
    for piece in memory.resolved():
        content = piece.content
        if content.kind == "constant":
            continue
        if content.kind == "computed" or content.rounded not in (None, memory.dtype):
            return None
        extents = [high - low for low, high in zip(piece.start, piece.stop, strict=True)]
        dims = tuple(map(Dim, extents, piece.strides, steps))
        at = sum(low * step for low, step in zip(piece.start, steps, strict=True))
        spans = boxes_of_view(specs[content.name].shape, dims, src_offset=piece.offset, dst_offset=at)
        if spans is None:
            return None
        found += [
            Holding(rank, Region(content.name, span.start, span.stop), _address(storage, span, memory.dtype))
            for span in spans
        ]
    return found


def _address(storage: str, span: Span, dtype: DType) -> Address:
    return Address(storage, span.dst_offset * dtype.itemsize, span.dst_strides, dtype)
