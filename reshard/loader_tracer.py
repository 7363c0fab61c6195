"""Follow checkpoint tensors through a loader that runs on the meta device, by the storages that its operators touch.

Views keep their storage, so they need no rule. Copies, conversions, concatenations, stacks, selections by real indices
and pads move values unchanged. Whatever else reads checkpoint values makes *computed* values.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reshard.errors import LayoutError
from reshard.loader_memory import COMPUTED, CONSTANT, Loops, Memory
from reshard.strided_view import Dim
from reshard.torch_layout import dtype_of

_aten = torch.ops.aten
_CONVERSIONS = frozenset({_aten._to_copy.default, _aten.clone.default, _aten.contiguous.default})
_CONSTANT_WRITES = frozenset({_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor})
_REBINDINGS = frozenset({_aten.set_.source_Tensor, _aten.set_.source_Storage_storage_offset})
_MAX_INDEX_RUNS = 1 << 14


_dtype = functools.cache(dtype_of)


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage as long as the storage lives."""
    return int(tensor.untyped_storage()._cdata)


class LoaderTracer(TorchDispatchMode):
    """Knows, for every storage that checkpoint values reach, what it holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories: dict[int, Memory] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._kept: list[torch.Tensor] = []
        self._scalars: dict[float, torch.Tensor] = {}
        self._written: set[int] = set()

    def add(self, tensor: torch.Tensor, memory: Memory) -> None:
        """Watch a storage; it is kept alive, as its address is its identity."""
        self._memories[storage_id(tensor)] = memory
        self._kept.append(tensor.detach())

    def memory(self, tensor: torch.Tensor) -> Memory | None:
        """What a tensor's storage holds, if the tracer knows it."""
        return self._memories.get(storage_id(tensor))

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Whether the loader copied anything, be it no element, to a tensor's storage, or computed it."""
        return storage_id(tensor) in self._written

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default and self.memory(args[0]) is not None:
            return self._number_of(args[0])
        sources = {name for tensor in _tensors((args, kwargs)) for name in self.sources(tensor)}
        result = self._run(func, args, kwargs, sources)
        if func in _HANDLERS:
            _HANDLERS[func](self, args, kwargs, result)
        elif func._schema.is_mutable:
            self._mutate(func, args, kwargs, sources)
        else:
            self.compute(result, sources)
        return result

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], sources: set[str]) -> Any:
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if not sources:
                raise
            raise LayoutError(
                f"the loader passes {sorted(sources)[:4]} to {func}, which has no kernel for the meta device: its "
                "layout can't be learnt; build the model without that step (for example without online quantisation)"
            ) from error

    def sources(self, tensor: torch.Tensor) -> set[str]:
        """Checkpoint tensors from which anything in a tensor's storage came."""
        memory = self.memory(tensor)
        return set() if memory is None else memory.sources

    def _number_of(self, tensor: torch.Tensor) -> float:
        """A number that stands for a checkpoint scalar: no other has it, so a fill with it is a copy of the scalar."""
        memory = self.watched(tensor)
        held = self._read(memory, tensor, (), 0)
        if [loops.content.kind for loops in held] != ["values"] or not tensor.is_floating_point():
            raise LayoutError(
                f"the loader branches on values that it computes from {sorted(memory.sources)[:4]}: its layout depends "
                "on the weights and can't be learnt without them"
            )
        number = float.fromhex("0x1p1000") * (1 + (len(self._scalars) + 1) * 2.0**-40)
        self._scalars[number] = tensor.detach().reshape(())
        return number

    def watched(self, tensor: torch.Tensor) -> Memory:
        """Like ``memory``, but begins to watch a storage that is new, seen in the shape that it was made with."""
        found = self.memory(tensor)
        if found is None:
            num = tensor.untyped_storage().nbytes() // tensor.element_size()
            shape = self._shapes.get(storage_id(tensor), ())
            found = Memory(shape if torch.Size(shape).numel() == num else (num,), dtype_of(tensor.dtype))
            self.add(tensor, found)
        return found

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """``destination`` now holds what ``source`` holds, converted to its type."""
        origin = self.memory(source)
        if origin is None and self.memory(destination) is None:
            return
        target = self.watched(destination)
        if origin is not None:
            self._written.add(storage_id(destination))
            target.sources |= origin.sources
        if destination.numel() == 0:
            return
        seen = source.expand(destination.shape)
        strides = zip(destination.shape, seen.stride(), destination.stride(), strict=True)
        dims = tuple(Dim(int(extent), int(src), int(dst)) for extent, src, dst in strides)
        for loops in self._read(origin, seen, dims, int(destination.storage_offset())):
            content = loops.content.cast(_dtype(source.dtype), _dtype(destination.dtype))
            if target.dtype is not _dtype(destination.dtype) and content.kind != "constant":
                content = COMPUTED
            target.write(Loops(content, loops.dims, loops.src_offset, loops.dst_offset))

    def _read(self, origin: Memory | None, source: torch.Tensor, dims: tuple[Dim, ...], at: int) -> list[Loops]:
        if origin is None:
            return [Loops(CONSTANT, tuple(Dim(dim.extent, 0, dim.dst) for dim in dims), 0, at)]
        if origin.dtype is not _dtype(source.dtype):
            return [Loops(COMPUTED, tuple(Dim(dim.extent, 0, dim.dst) for dim in dims), 0, at)]
        return origin.read(dims, src_offset=int(source.storage_offset()), dst_offset=at)

    def fill(self, destination: torch.Tensor, value: object) -> None:
        """``destination`` now holds one constant, or a checkpoint scalar that the loader read as a number."""
        scalar = value if isinstance(value, torch.Tensor) else self._scalars.get(_as_float(value))
        if isinstance(scalar, torch.Tensor):
            self.copy(destination, scalar)
        else:
            self._overwrite(destination, computed=False)

    def _overwrite(self, destination: torch.Tensor, *, computed: bool) -> None:
        memory = self.memory(destination)
        if memory is None or destination.numel() == 0:
            return
        strides = zip(destination.shape, destination.stride(), strict=True)
        dims = tuple(Dim(int(extent), 0, int(stride)) for extent, stride in strides)
        content = COMPUTED if computed else CONSTANT
        memory.write(Loops(content, dims, 0, int(destination.storage_offset())))

    def _mutate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], sources: set[str]) -> None:
        """An operator that writes in place: what it writes is computed if anything that it saw is from the
        checkpoint.
        """
        for target in _written_arguments(func, args, kwargs):
            if sources:
                self.watched(target).sources |= sources
                self._written.add(storage_id(target))
            self._overwrite(target, computed=bool(sources))

    def compute(self, result: Any, sources: set[str]) -> None:
        """A view keeps its storage; anything else computes a new tensor."""
        for tensor in _tensors(result):
            identity = storage_id(tensor)
            if identity in self._memories:
                continue
            if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
                self._shapes[identity] = _made_shape(tensor)
            if sources:
                memory = self.watched(tensor)
                memory.sources |= sources
                memory.write_everywhere(COMPUTED)

    def join(self, result: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """``result`` is new and made of ``parts``: views of it, and the tensors that fill them."""
        if storage_id(result) in self._memories:
            return
        self._shapes[storage_id(result)] = _made_shape(result)
        for view, source in parts:
            self.copy(view, source)


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether an operator only looks at its argument's storage in another shape."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _as_float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[index] if index < len(args) else kwargs.get(argument.name))


def _made_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Sizes of a dense tensor, the widest stride first: how its storage reads row by row."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim))
    return tuple(int(tensor.shape[dim]) for dim in order)


def _copy(tracer: LoaderTracer, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    tracer.copy(args[0], args[1])


def _fill(tracer: LoaderTracer, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    tracer.fill(args[0], args[1] if len(args) > 1 else 0)


def _convert(tracer: LoaderTracer, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    tracer.join(result, [(result, args[0])])


def _nothing(tracer: LoaderTracer, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    pass


def _cat(tracer: LoaderTracer, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    dim = int(args[1] if len(args) > 1 else kwargs.get("dim", 0))
    filled = [tensor for tensor in args[0] if tensor.dim() == result.dim()]
    sizes = [int(tensor.shape[dim]) for tensor in filled]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    views = [result.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]
    tracer.join(result, list(zip(views, filled, strict=True)))


def _stack(tracer: LoaderTracer, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    dim = int(args[1] if len(args) > 1 else kwargs.get("dim", 0))
    tracer.join(result, [(result.select(dim, index), tensor) for index, tensor in enumerate(args[0])])


def _pad(tracer: LoaderTracer, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    view, source = result, args[0]
    amounts: Sequence[int] = args[1]
    for index, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = result.dim() - 1 - index
        source = source.narrow(dim, max(-before, 0), source.shape[dim] - max(-before, 0) - max(-after, 0))
        view = view.narrow(dim, max(before, 0), source.shape[dim])
    tracer.join(result, [(view, source)])


def _index_select(tracer: LoaderTracer, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    _select(tracer, args[0], int(args[1]), args[2], result)


def _index(tracer: LoaderTracer, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    given = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
    dim, index = given[0]
    if len(given) == 1 and index.dim() == 1 and index.dtype in (torch.int32, torch.int64):
        _select(tracer, args[0], dim, index, result)
    else:
        tracer.compute(result, tracer.sources(args[0]))


def _select(tracer: LoaderTracer, source: torch.Tensor, dim: int, index: torch.Tensor, result: torch.Tensor) -> None:
    """Rows of one dim, in any order, by indices whose values are known."""
    known = index.device.type != "meta" and index.numel() <= _MAX_INDEX_RUNS
    if not known:
        tracer.compute(result, tracer.sources(source))
        return
    picked = enumerate(index.tolist())
    tracer.join(result, [(result.select(dim, at), source.select(dim, row)) for at, row in picked])


_Handler = Callable[[LoaderTracer, Sequence[Any], Mapping[str, Any], Any], None]
_HANDLERS: dict[Any, _Handler] = {
    _aten.copy_.default: _copy,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.constant_pad_nd.default: _pad,
    _aten.index_select.default: _index_select,
    _aten.index.Tensor: _index,
    **dict.fromkeys(_CONVERSIONS, _convert),
    **dict.fromkeys(_CONSTANT_WRITES, _fill),
    **dict.fromkeys(_REBINDINGS, _nothing),
}
