"""Learn an engine's layout from its own weight loader, with no weights: run it once on the meta device and watch it
copy.

The engine's ``load_weights`` gets a meta tensor per checkpoint tensor. Views of them keep their storage, so every
``copy_`` into a parameter tells, by offsets, sizes and strides, which box of which checkpoint tensor lands where.
Copies that arithmetic or an unknown operator hides make their parameter *opaque*: it is named, and needs the engine's
own reload path.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reshard.errors import LayoutError
from reshard.layout import Address, Holding, Layout, TensorSpec
from reshard.region import Region
from reshard.strided_view import Dim, Span, boxes_of_view, dense_strides
from reshard.torch_layout import dtype_of, torch_dtype

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
_aten = torch.ops.aten
_SAME_VALUES = frozenset({_aten._to_copy.default, _aten.clone.default, _aten.contiguous.default})
_CONSTANT_WRITES = frozenset({_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor})


@dataclass(frozen=True, slots=True)
class LoaderTrace:
    """What a loader did: the Layout of one rank, checkpoint tensors that it never read, parameters that it never
    wrote.
    """

    layout: Layout
    unread: tuple[str, ...]
    unwritten: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Origin:
    """A dense run of a storage, from element ``base`` on, whose ``shape`` repeats a strided view of a checkpoint
    tensor.
    """

    name: str
    base: int
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


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
    tracer = _Tracer(specs, parameters)
    weights = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta") for name, spec in specs.items()
    }
    for name, tensor in weights.items():
        shape = tuple(tensor.shape)
        tracer.know(tensor, [_Origin(name, 0, shape, 0, dense_strides(shape))])
    with tracer, torch.no_grad():
        load_weights(iter(weights.items()))
    return tracer.result(rank, memory)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(slots=True)
class _Write:
    name: str
    spans: tuple[Span, ...]
    dtype: torch.dtype
    place: tuple[int, tuple[int, ...], tuple[int, ...]]


class _Tracer(TorchDispatchMode):
    """Follows checkpoint tensors by storage through a loader."""

    def __init__(self, specs: Mapping[str, TensorSpec], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._specs = specs
        self._parameters = parameters
        self._owner: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []
        for name, tensor in parameters.items():
            self._owner.setdefault(_storage(tensor), name)
            self._kept.append(tensor.detach())
        self._origins: dict[int, Sequence[_Origin]] = {}
        self._writes: dict[str, list[_Write]] = {}
        self._opaque: set[str] = set()
        self._read: set[str] = set()

    def know(self, tensor: torch.Tensor, origins: Sequence[_Origin]) -> None:
        """Remember what a storage holds; keeps the storage alive, as its address is its identity."""
        self._origins[_storage(tensor)] = origins
        self._kept.append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _aten.copy_.default:
            self._copy(args[0], args[1])
        elif func in _SAME_VALUES:
            self._same_values(args[0], result)
        elif func is _aten.cat.default:
            self._cat(args[0], int(args[1]) if len(args) > 1 else 0, result)
        elif func._schema.is_mutable:
            self._mutate(args[0], constant=func in _CONSTANT_WRITES)
        return result

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        owner = self._owner.get(_storage(destination))
        if owner is None:
            self._same_values(source.expand(destination.shape), destination)
            return
        writes = self._writes.setdefault(owner, [])
        if destination.numel() == 0:
            self._read.update(origin.name for origin in self._origins.get(_storage(source), ()))
            return
        traced = self._trace(source.expand(destination.shape), destination)
        place = (int(destination.storage_offset()), tuple(destination.shape), tuple(destination.stride()))
        if traced is None:
            self._opaque.add(owner)
            return
        name, spans = traced
        self._read.add(name)
        writes[:] = [write for write in writes if write.place != place]
        writes.append(_Write(name, spans, destination.dtype, place))

    def _trace(self, source: torch.Tensor, destination: torch.Tensor) -> tuple[str, tuple[Span, ...]] | None:
        """Boxes of the checkpoint tensor that a view holds, with the places where ``destination`` has them."""
        view = _View.of(source, destination)
        for origin in self._origins.get(_storage(source), ()):
            inner = (
                boxes_of_view(
                    origin.shape, view.dims, src_offset=view.src_offset - origin.base, dst_offset=view.dst_offset
                )
                if view.src_offset >= origin.base
                else None
            )
            if inner is None:
                continue
            whole = self._specs[origin.name].shape
            spans: list[Span] = []
            for span in inner:
                start = sum(low * stride for low, stride in zip(span.start, origin.strides, strict=True))
                dims = [
                    Dim(high - low, stride, moved)
                    for low, high, stride, moved in zip(
                        span.start, span.stop, origin.strides, span.dst_strides, strict=True
                    )
                ]
                outer = boxes_of_view(whole, dims, src_offset=origin.offset + start, dst_offset=span.dst_offset)
                if outer is None:
                    return None
                spans += outer
            return origin.name, tuple(spans)
        return None

    def _same_values(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """``result``, a tensor of its own, holds what the view ``source`` holds."""
        dense = tuple(result.stride()) == dense_strides(result.shape) or result.numel() <= 1
        traced = self._trace(source, source) if dense and result.storage_offset() == 0 else None
        origins = self._origins.get(_storage(source), ())
        if traced is None or len(origins) != 1 or origins[0].strides != dense_strides(origins[0].shape):
            return
        (origin,) = origins
        offset = origin.offset + int(source.storage_offset()) - origin.base
        self.know(result, [_Origin(origin.name, 0, tuple(result.shape), offset, tuple(source.stride()))])

    def _cat(self, tensors: Sequence[torch.Tensor], dim: int, result: torch.Tensor) -> None:
        """Along dim 0, each part is a dense run of the result."""
        if dim not in (0, -result.dim()):
            return
        found: list[_Origin] = []
        base = 0
        for tensor in tensors:
            origins = self._origins.get(_storage(tensor), ())
            if len(origins) != 1 or origins[0].strides != dense_strides(origins[0].shape):
                return
            offset = origins[0].offset + int(tensor.storage_offset()) - origins[0].base
            found.append(_Origin(origins[0].name, base, tuple(tensor.shape), offset, tuple(tensor.stride())))
            base += tensor.numel()
        self.know(result, found)

    def _mutate(self, target: object, *, constant: bool) -> None:
        if not isinstance(target, torch.Tensor):
            return
        owner = self._owner.get(_storage(target))
        if owner is not None and (not constant or self._writes.get(owner)):
            self._opaque.add(owner)
        self._origins.pop(_storage(target), None)

    def result(self, rank: int, memory: str | None) -> LoaderTrace:
        """The trace, once the loader is done."""
        rebound = {name for name, t in self._parameters.items() if _storage(t) not in self._owner}
        for name in sorted(rebound):
            self._writes.pop(name, None)
        opaque = sorted(self._opaque | rebound)
        written = {name: writes for name, writes in self._writes.items() if name not in opaque and writes}
        holdings = [
            Holding(rank, Region(write.name, span.start, span.stop), _address(owner, span, write.dtype))
            for owner, writes in written.items()
            for write in writes
            for span in write.spans
        ]
        used = {holding.region.name for holding in holdings}
        dtypes = {h.region.name: h.address.dtype for h in holdings}
        specs = [TensorSpec(name, spec.shape, dtypes[name]) for name, spec in self._specs.items() if name in used]
        layout = Layout.from_holdings(specs, holdings, ranks=[rank], memory=memory, opaque={rank: opaque})
        touched = {*self._writes, *opaque}
        shared = {name for name, t in self._parameters.items() if self._owner.get(_storage(t)) in touched}
        return LoaderTrace(
            layout,
            unread=tuple(sorted(set(self._specs) - self._read)),
            unwritten=tuple(sorted(set(self._parameters) - touched - shared)),
        )


def _address(owner: str, span: Span, dtype: torch.dtype) -> Address:
    kind = dtype_of(dtype)
    return Address(owner, span.dst_offset * kind.itemsize, span.dst_strides, kind)


@dataclass(frozen=True, slots=True)
class _View:
    """A copy as loops over two storages."""

    dims: tuple[Dim, ...]
    src_offset: int
    dst_offset: int

    @classmethod
    def of(cls, source: torch.Tensor, destination: torch.Tensor) -> "_View":
        strides = zip(destination.shape, source.stride(), destination.stride(), strict=True)
        dims = tuple(Dim(int(extent), int(src), int(dst)) for extent, src, dst in strides)
        return cls(dims, int(source.storage_offset()), int(destination.storage_offset()))
