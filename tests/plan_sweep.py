"""Plans of many tensors at once, each with a layout of its own on both sides, for volume: thousands of pairs of layouts
in seconds. Everything follows from a seed; what a pair is (its kinds) is measured on the pair itself.
"""

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from plan_cases import FLOATS, Boxes, Shelf, grid, scattered, topology

from reshard import DType, Layout, Plan, Region, TensorSpec, Topology, make_plan
from reshard.layout import Entry
from reshard.pattern import Pattern, make_pattern, pattern_from_rows

NUM_SHAPES, NUM_SIDES = 4, 8
KINDS = (
    *("uneven", "replicated", "overlapping", "empty", "strided", "fused", "cast", "mixed", "tied", "scalar"),
    *("like", "in place", "crossing", "passed on"),
)


@dataclass(frozen=True, eq=False)
class Placement:
    """How one tensor lies on one side, wherever its storages begin: a pattern, and what it is an example of."""

    pattern: Pattern
    num_bytes: int
    dtype: DType
    kinds: frozenset[str]


@dataclass(frozen=True, eq=False)
class Batch:
    """Both sides of one plan. ``pairs`` has, per destination tensor, its placements and kinds."""

    seed: int
    source: Layout
    destination: Layout
    topology: Topology | None
    pairs: dict[str, tuple[Placement, Placement, frozenset[str]]]

    def plan(self) -> Plan:
        return make_plan(self.source, self.destination, topology=self.topology)


def fsdp_on_tp(rng: random.Random, name: str, shape: tuple[int, ...], ranks: Sequence[int]) -> Boxes:
    """Ceil chunks over tensor parallel ranks, each cut in ceil chunks once more: FSDP2 on tensor parallelism."""
    num_tp = rng.randint(1, max(len(ranks) // 2, 1))
    num_fsdp = len(ranks) // num_tp
    tp_dim = rng.randrange(len(shape))
    held = []
    for index, rank in enumerate(ranks[: num_fsdp * num_tp]):
        fsdp, tp = divmod(index, num_tp)
        start, stop = [0] * len(shape), list(shape)
        for dim, part, parts in ((tp_dim, tp, num_tp), (0, fsdp, num_fsdp)):
            size = -(-(stop[dim] - start[dim]) // parts)
            low, high = start[dim], stop[dim]
            start[dim], stop[dim] = min(low + size * part, high), min(low + size * (part + 1), high)
        held.append((rank, Region(name, tuple(start), tuple(stop))))
    return held


def place(rng: random.Random, shape: tuple[int, ...], ranks: Sequence[int], *, is_source: bool) -> Placement:
    """A layout of one tensor. A source covers the tensor; a destination may not."""
    boxes = fsdp_on_tp(rng, "t", shape, ranks) if shape and rng.random() < 0.35 else grid(rng, "t", shape, ranks)
    if rng.random() < 0.2:
        more = scattered(rng, "t", shape, ranks)
        boxes = boxes + more if is_source or rng.random() < 0.5 else more
    dtype = rng.choice(FLOATS)
    is_mixed = not is_source and rng.random() < 0.1
    shelf, rows = Shelf(), []
    for rank, region in dict.fromkeys(boxes):
        own = rng.choice(FLOATS) if is_mixed else dtype
        order = rng.sample(range(len(shape)), len(shape))
        if region.is_empty:
            continue
        at = shelf.place(rank, "", region, own, order, rng.randint(0, 1)).address
        rows.append((rank, region.start, region.stop, 0, at.offset_bytes, at.strides, own.code))
    pattern = pattern_from_rows(shape, rows)
    return Placement(pattern, max(shelf.used.values(), default=0), dtype, _kinds(boxes, pattern, shape))


def _kinds(boxes: Boxes, pattern: Pattern, shape: tuple[int, ...]) -> frozenset[str]:
    kinds = set()
    extents = pattern.boxes_stop - pattern.boxes_start
    volumes = extents.prod(axis=1)
    if not shape:
        kinds.add("scalar")
    if any(region.is_empty for _, region in boxes):
        kinds.add("empty")
    if len(set(volumes.tolist())) > 1:
        kinds.add("uneven")
    if pattern.num > len(pattern.boxes_start):
        kinds.add("replicated")
    covered = np.zeros(shape, np.int64)
    for low, high in zip(pattern.boxes_start.tolist(), pattern.boxes_stop.tolist(), strict=True):
        covered[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] += 1
    if covered.max(initial=0) > 1:
        kinds.add("overlapping")
    elif shape and len(extents) > 1 and (np.diff(pattern.starts()[:, 0]) < 0).any():
        kinds.add("strided")
    if len(set(pattern.dtypes.tolist())) > 1:
        kinds.add("mixed")
    return frozenset(kinds)


class _Builder:
    """Collects both sides of a batch. The fused tensors of a side lie one behind the other in one storage."""

    def __init__(self, rng: random.Random, memory: str | None) -> None:
        self.rng = rng
        self.memory = memory
        self.entries: tuple[list[Entry], list[Entry]] = ([], [])
        self.ties: tuple[dict[str, str], dict[str, str]] = ({}, {})
        self.used = [0, 0]
        self.pairs: dict[str, tuple[Placement, Placement, frozenset[str]]] = {}

    def pair(self, name: str, source: Placement, destination: Placement) -> None:
        """One tensor; now and then several alike, under further names, or already in place."""
        kinds = set(source.kinds | destination.kinds)
        kinds |= {"cast"} if set(source.pattern.dtypes.tolist()) != set(destination.pattern.dtypes.tolist()) else set()
        chance = self.rng.random()
        if self.memory and chance < 0.1:
            for side in range(2):
                self.entries[side].append(Entry(_spec(name, source), source.pattern, (name,)))
            self.pairs[name] = (source, source, source.kinds | {"in place"})
            return
        if chance > 0.94:
            kinds.add("tied")
            self._tie(name, source, destination, kinds)
        else:
            kinds |= self._add(0, name, source) | self._add(1, name, destination)
        self.pairs[name] = (source, destination, frozenset(kinds))
        if 0.1 < chance < 0.14:
            self.pairs[name] = (source, destination, frozenset({*kinds, "like"}))
            for number in range(self.rng.randint(1, 3)):
                self._add(0, f"{name}.like{number}", source)
                self._add(1, f"{name}.like{number}", destination)

    def _tie(self, name: str, source: Placement, destination: Placement, kinds: set[str]) -> None:
        """A name that only one side ties to another: the source has it under one, the destination under both or the
        other one."""
        further = f"{name}.further"
        if self.rng.random() < 0.5:
            self.ties[0][further] = name
            kinds |= self._add(0, name, source) | self._add(1, name, destination) | self._add(1, further, destination)
        else:
            self.ties[1][further] = name
            kinds |= self._add(0, further, source) | self._add(1, name, destination)

    def _add(self, side: int, name: str, placement: Placement) -> set[str]:
        storage = ("", "engine.")[side]
        if self.rng.random() < 0.7:
            self.entries[side].append(Entry(_spec(name, placement), placement.pattern, (f"{storage}{name}",)))
            return set()
        old = placement.pattern
        moved = make_pattern(
            old.shape,
            ranks=old.ranks,
            starts=old.starts(),
            stops=old.stops(),
            slots=old.slots,
            offsets=old.offsets + self.used[side],
            strides=old.strides,
            dtypes=old.dtypes,
        )
        self.used[side] += -(-placement.num_bytes // 4) * 4
        self.entries[side].append(Entry(_spec(name, placement), moved, (f"{storage}fused",)))
        return {"fused"}


def _spec(name: str, placement: Placement) -> TensorSpec:
    return TensorSpec(name, placement.pattern.shape, placement.dtype)


def make_batch(seed: int, *, max_extent: int = 5, max_ranks: int = 6) -> Batch:
    """Every source placement of a shape with every destination placement of it."""
    rng = random.Random(seed)
    builder = _Builder(rng, "one" if rng.random() < 0.25 else None)
    ranks = [
        sorted(rng.sample(range(max_ranks + 1), rng.randint(1 if rng.random() < 0.05 else 3, max_ranks)))
        for _ in range(2)
    ]
    for number in range(NUM_SHAPES):
        num_dims = 0 if number == 0 and seed % 8 == 0 else rng.choice([1, 2, 2, 3])
        shape = tuple(rng.randint(1 if rng.random() < 0.2 else 3, max_extent) for _ in range(num_dims))
        shape = tuple(min(extent, 3) for extent in shape) if num_dims == 3 else shape
        sides = [[place(rng, shape, ranks[side], is_source=not side) for _ in range(NUM_SIDES)] for side in range(2)]
        for (i, source), (j, destination) in itertools.product(*map(enumerate, sides)):
            builder.pair(f"s{number}.{i}.{j}", source, destination)
    layouts = [
        Layout(builder.entries[side], ranks=ranks[side], ties=builder.ties[side], memory=builder.memory)
        for side in range(2)
    ]
    places = topology(rng, sorted({*layouts[0].ranks, *layouts[1].ranks}))
    return Batch(seed, *layouts, places, builder.pairs)


def kinds_of(batch: Batch, plan: Plan) -> dict[str, frozenset[str]]:
    """Kinds per pair, with those that only the plan shows: bytes that cross nodes, or are passed on inside one."""
    table, names = plan.table, plan.table.names
    crossing: set[str] = set()
    if batch.topology is not None:
        nodes = batch.topology.nodes_of
        crosses = nodes(table.src_rank.astype(np.int64)) != nodes(table.dst_rank.astype(np.int64))
        crossing = {names[index] for index in np.unique(table.name_idx[crosses]).tolist()}
    passed = {names[index] for index in np.unique(table.name_idx[table.hop > 0]).tolist()}
    return {
        name: kinds | ({"crossing"} if name in crossing else set()) | ({"passed on"} if name in passed else set())
        for name, (_, _, kinds) in batch.pairs.items()
    }


def count(batch: Batch, plan: Plan, counted: Counter[str], distinct: set[bytes]) -> None:
    """Add a batch's pairs to the counts by kind, and to the set of distinct pairs of placements."""
    for kinds in kinds_of(batch, plan).values():
        counted.update(kinds)
    where = repr(None if batch.topology is None else batch.topology.to_json()).encode()
    for source, destination, _ in batch.pairs.values():
        distinct.add(hashlib.sha256(source.pattern.key + destination.pattern.key + where).digest()[:12])
