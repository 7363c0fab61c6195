"""Layout: which regions of which tensors every rank holds, and where. The one description that both sides share."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.dtype import ITEMSIZE_BY_CODE, DType
from reshard.errors import LayoutError
from reshard.pattern import IntArray, Pattern, pattern_from_rows, pattern_rows
from reshard.region import Region

if TYPE_CHECKING:
    from reshard.mesh import Mesh
    from reshard.parallel_layout import Rules
    from reshard.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A canonical tensor: the checkpoint's own name, its global shape, its element type."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a region's first element lies on its rank.

    ``storage`` is the owner's own name of a live tensor, ``offset_bytes`` counts from the first byte of that tensor's
    *storage* (``tensor.untyped_storage()``, not ``tensor.data_ptr()``), ``strides`` count elements of ``dtype`` per
    dim.
    """

    storage: str
    offset_bytes: int
    strides: tuple[int, ...]
    dtype: DType

    def advance(self, steps: Sequence[int]) -> "Address":
        """The address ``steps[d]`` elements further along every dim ``d``."""
        shift = sum(step * stride for step, stride in zip(steps, self.strides, strict=True))
        return Address(self.storage, self.offset_bytes + shift * self.dtype.itemsize, self.strides, self.dtype)


@dataclass(frozen=True, slots=True)
class Holding:
    """A region that a rank holds, at an address."""

    rank: int
    region: Region
    address: Address


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a Layout: its spec, its pattern, and the storage names that the pattern's slots number."""

    spec: TensorSpec
    pattern: Pattern
    storages: tuple[str, ...]


class Layout:
    """For every rank, the holdings of every canonical tensor. Immutable; compact inside (see ``reshard.pattern``).

    ``ties`` maps further names of a tensor to the name that ``specs`` lists. ``memory`` labels the address space:
    when two Layouts carry the same label, equal addresses are the same bytes. ``opaque`` lists, per rank, storages
    whose contents this Layout can't describe. Build one with the class methods below.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        *,
        ranks: Iterable[int] | None = None,
        memory: str | None = None,
        ties: Mapping[str, str] | None = None,
        opaque: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self._entries = {entry.spec.name: entry for entry in sorted(entries, key=lambda entry: entry.spec.name)}
        interned: dict[bytes, Pattern] = {}
        for entry in self._entries.values():
            interned.setdefault(entry.pattern.key, entry.pattern)
        self.patterns = tuple(interned.values())
        number = {key: index for index, key in enumerate(interned)}
        self.pattern_of: IntArray = np.array([number[e.pattern.key] for e in self._entries.values()], np.int64)
        held = {rank for pattern in self.patterns for rank in np.unique(pattern.ranks).tolist()}
        self.ranks = tuple(sorted(held | set(ranks or ())))
        self.memory = memory
        self.ties: Mapping[str, str] = MappingProxyType(dict(sorted((ties or {}).items())))
        self._opaque = {rank: tuple(names) for rank, names in sorted((opaque or {}).items()) if names}
        self._check()

    def _check(self) -> None:
        empty = [name for name, entry in self._entries.items() if entry.spec.numel == 0]
        if empty:
            raise LayoutError(
                f"tensors without elements: {_some(empty)}; a placeholder of a partitioned or offloaded parameter was "
                "passed, pass the live tensor or leave the name out"
            )
        for name, target in self.ties.items():
            if target not in self._entries or name in self._entries:
                raise LayoutError(f"tie {name!r} -> {target!r}: expected a new name tied to a tensor of this layout")

    @classmethod
    def from_holdings(
        cls,
        specs: Iterable[TensorSpec],
        holdings: Iterable[Holding],
        *,
        ranks: Iterable[int] | None = None,
        memory: str | None = None,
        ties: Mapping[str, str] | None = None,
        opaque: Mapping[int, Sequence[str]] | None = None,
    ) -> "Layout":
        """From explicit records. Raises LayoutError on a holding of an unknown tensor, or outside its shape."""
        by_name: dict[str, tuple[TensorSpec, list[Holding]]] = {spec.name: (spec, []) for spec in specs}
        unknown: set[str] = set()
        for holding in holdings:
            if holding.region.name in by_name:
                by_name[holding.region.name][1].append(holding)
            else:
                unknown.add(holding.region.name)
        if unknown:
            raise LayoutError(f"holdings of unknown tensors: {_some(sorted(unknown))}; list them in specs")
        known: dict[object, Pattern] = {}
        entries = (_entry(spec, own, known) for spec, own in by_name.values())
        return cls(entries, ranks=ranks, memory=memory, ties=ties, opaque=opaque)

    @classmethod
    def from_tensors(
        cls,
        named: Mapping[str, Any],
        *,
        rank: int | None = None,
        memory: str | None = None,
        ties: Mapping[str, str] | None = None,
    ) -> "Layout":
        """What one rank holds, from its live tensors; see ``reshard.torch_layout.layout_from_tensors``."""
        from reshard.torch_layout import layout_from_tensors

        return layout_from_tensors(named, rank=rank, memory=memory, ties=ties)

    @classmethod
    def from_loader(
        cls,
        load_weights: Callable[[Any], object],
        checkpoint: Iterable[TensorSpec],
        parameters: Mapping[str, Any],
        *,
        rank: int = 0,
        memory: str | None = None,
    ) -> "Layout":
        """What an engine's own loader does with a checkpoint; see ``reshard.loader_layout.trace_loader``."""
        from reshard.loader_layout import layout_from_loader

        return layout_from_loader(load_weights, checkpoint, parameters, rank=rank, memory=memory)

    @classmethod
    def from_parallel(
        cls, model: "ModelSpec", mesh: "Mesh", *, rules: "Rules | None" = None, expert_mesh: "Mesh | None" = None
    ) -> "Layout":
        """By arithmetic, with no device; see ``reshard.parallel_layout.layout_from_parallel``."""
        from reshard.parallel_layout import layout_from_parallel

        return layout_from_parallel(model, mesh, rules=rules, expert_mesh=expert_mesh)

    @classmethod
    def merge(cls, parts: Iterable["Layout"]) -> "Layout":
        """One Layout from parts that describe different ranks; LayoutError lists tensors on which they disagree."""
        from reshard.layout_merge import merge_layouts

        return merge_layouts(parts)

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Spec of every canonical tensor, sorted by name."""
        return MappingProxyType({name: entry.spec for name, entry in self._entries.items()})

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Spec, pattern and storages per name, sorted by name."""
        return MappingProxyType(self._entries)

    def resolve(self, name: str) -> str | None:
        """The canonical name that ``name`` is or is tied to; None when this Layout does not know it."""
        name = self.ties.get(name, name)
        return name if name in self._entries else None

    def holdings(self, rank: int) -> Sequence[Holding]:
        """Every holding of one rank, by tensor name; LayoutError when the rank is not part of this Layout."""
        if rank not in self.ranks:
            raise LayoutError(f"rank {rank} is not part of this layout, whose ranks are {_some(self.ranks)}")
        present = {index for index, pattern in enumerate(self.patterns) if (pattern.ranks == rank).any()}
        chosen = zip(self._entries.values(), self.pattern_of.tolist(), strict=True)
        return [h for entry, index in chosen if index in present for h in _holdings(entry, rank)]

    def holders(self, name: str) -> Sequence[Holding]:
        """Every holding of one tensor (or of the tensor that the name is tied to), by rank."""
        canonical = self.resolve(name)
        if canonical is None:
            raise LayoutError(f"layout has no tensor {name!r}")
        return _holdings(self._entries[canonical], None)

    def opaque(self, rank: int) -> Sequence[str]:
        """Storages of the rank that this Layout can't describe; they need their owner's own reload path."""
        return self._opaque.get(rank, ())

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """A short digest per tensor name; equal Layouts have equal digests on every rank."""
        return MappingProxyType({name: _entry_digest(entry) for name, entry in self._entries.items()})

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in this Layout, as hex."""
        whole = hashlib.sha256(repr((self.ranks, dict(self.ties), self._opaque, self.memory)).encode())
        for name, digest in self.digests.items():
            whole.update(f"\n{name}\0{digest}".encode())
        return whole.hexdigest()

    @cached_property
    def bytes_by_rank(self) -> Mapping[int, int]:
        """Bytes of everything that each rank holds, tied tensors once."""
        total = np.zeros(max(self.ranks, default=-1) + 1, np.int64)
        itemsizes = np.array(ITEMSIZE_BY_CODE, np.int64)
        counts = np.bincount(self.pattern_of, minlength=len(self.patterns))
        for pattern, count in zip(self.patterns, counts.tolist(), strict=True):
            sizes = (pattern.stops() - pattern.starts()).prod(axis=1, dtype=np.int64) * itemsizes[pattern.dtypes]
            np.add.at(total, pattern.ranks, sizes * count)
        return MappingProxyType({rank: int(total[rank]) for rank in self.ranks})

    def held_bytes(self, rank: int) -> int:
        """Bytes that one rank holds."""
        return self.bytes_by_rank[rank]

    def opaque_map(self) -> dict[int, tuple[str, ...]]:
        """All opaque storages by rank."""
        return dict(self._opaque)

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Layout({len(self._entries)} tensors on {len(self.ranks)} ranks, {self.digest[:12]})"


def _entry(spec: TensorSpec, holdings: Sequence[Holding], known: dict[object, Pattern]) -> Entry:
    """The entry of a tensor; ``known`` are the patterns so far, as most tensors of a model lie like others."""
    slots: dict[str, int] = {}
    rows = []
    for holding in sorted(holdings, key=lambda h: (h.rank, h.address.storage)):
        address = holding.address
        slot = slots.setdefault(address.storage, len(slots))
        code = address.dtype.code
        region = holding.region
        rows.append((holding.rank, region.start, region.stop, slot, address.offset_bytes, address.strides, code))
    for row in rows:
        if len(row[1]) != len(spec.shape) or len(row[5]) != len(spec.shape):
            raise LayoutError(f"rank {row[0]} holds {spec.name!r} with {len(row[1])} dims, its shape is {spec.shape}")
    try:
        key = (spec.shape, *rows)
        if key not in known:
            known[key] = pattern_from_rows(spec.shape, rows)
        return Entry(spec, known[key], tuple(slots))
    except LayoutError as error:
        raise LayoutError(f"tensor {spec.name!r}: {error}") from None


def _holdings(entry: Entry, rank: int | None) -> list[Holding]:
    return [
        Holding(row[0], Region(entry.spec.name, row[1], row[2]), _address(entry, row[3:]))
        for row in pattern_rows(entry.pattern, rank)
    ]


def _address(entry: Entry, fields: tuple[int, int, tuple[int, ...], int]) -> Address:
    slot, offset_bytes, strides, code = fields
    return Address(entry.storages[slot], offset_bytes, strides, DType.from_code(code))


def _entry_digest(entry: Entry) -> str:
    head = repr((entry.spec.shape, entry.spec.dtype.value, entry.storages)).encode()
    return hashlib.sha256(head + entry.pattern.key).hexdigest()[:16]


def _some(items: Sequence[object], limit: int = 8) -> str:
    shown = ", ".join(str(item) for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
