"""Make plans: exact, deterministic, for all ranks or for some. How sources are chosen: notes in ``planner_class``."""

import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard.boxes import volumes
from reshard.certificate import Certificate
from reshard.copy_table import ITEMSIZES, CopyTable
from reshard.errors import PlanError
from reshard.layout import Layout
from reshard.pattern import IntArray
from reshard.plan import Plan, PlanInputs
from reshard.plan_names import Casts, Pair, check_dtypes, expand_casts, match_names
from reshard.planner_class import BoolArray, plan_class
from reshard.planner_floor import FloorCounter
from reshard.planner_hazards import check_no_hazards
from reshard.planner_overlaps import check_no_overlaps
from reshard.planner_sides import GeometryCache, Places, Side
from reshard.planner_table import TableBuilder
from reshard.topology import Topology


def make_plan(
    source: Layout,
    destination: Layout,
    *,
    allow_casts: Casts = "floating",
    topology: Topology | None = None,
    ranks: Collection[int] | None = None,
    ignore: Iterable[str] = (),
) -> Plan:
    """The copies that make ``destination`` true, given ``source``; every rank receives exactly the bytes that it lacks.

    ``allow_casts`` are (from, to) pairs, or ``"floating"`` for all between float32, bfloat16 and float16.
    ``topology`` makes near sources preferred and bytes enter each node once; without it all ranks are equally near.
    ``ranks`` limits the plan to what those send and receive, which equals their part of the whole plan. ``ignore``
    lists source tensors (names or shell patterns) that are not meant to travel.

    Raises PlanError when names, shapes, ties or dtypes don't match, the source holds a needed region nowhere, or the
    destination holds different elements at the same bytes; LayoutError when the topology has no place for a rank.
    """
    inputs = PlanInputs(
        source=source,
        destination=destination,
        casts=expand_casts(allow_casts),
        topology=topology,
        ignore=tuple(sorted(ignore)),
        ranks=None if ranks is None else tuple(sorted(set(ranks))),
    )
    return _plan(inputs)


def invert(plan: Plan) -> Plan:
    """The plan from the destination of ``plan`` back to its source; PlanError when the destination lacks a tensor.

    What one tensor of the source fills, several of the destination's may hold: that of its own name goes back.
    """
    inputs = plan.inputs
    return _plan(
        PlanInputs(
            source=inputs.destination,
            destination=inputs.source,
            casts=frozenset((b, a) for a, b in inputs.casts),
            topology=inputs.topology,
            ignore=tuple(sorted(inputs.source.ties)),
            ranks=inputs.ranks,
        )
    )


@dataclass(frozen=True, slots=True)
class _Class:
    """Tensors with one pattern on each side, by destination name."""

    pairs: list[Pair]


def _plan(inputs: PlanInputs) -> Plan:
    source, destination = inputs.source, inputs.destination
    all_ranks = np.array(sorted({*source.ranks, *destination.ranks}), np.int64)
    scope = _scope(inputs.ranks, all_ranks)
    pairs = match_names(source, destination, ignore=inputs.ignore)
    classes = _classes(pairs, scope)
    check_dtypes([group.pairs for group in classes], inputs.casts)
    check_no_overlaps(destination, scope)
    places = Places.of(inputs.topology, all_ranks, source)
    builder = TableBuilder(same_memory=source.memory is not None and source.memory == destination.memory)
    by_rank = FloorCounter(np.arange(places.num_ranks))
    by_node = FloorCounter(places.node) if scope is None and places.fan_out else None
    _Planner(places, scope, builder, by_rank, by_node).run(classes)
    table = builder.finish()
    if builder.same_memory:
        check_no_hazards(table)
    covered = all_ranks if scope is None else np.flatnonzero(scope)
    return Plan(inputs, table, _certificate(table, covered, places, by_rank, by_node))


def _scope(ranks: Sequence[int] | None, all_ranks: IntArray) -> BoolArray | None:
    if ranks is None:
        return None
    unknown = sorted(set(ranks) - set(all_ranks.tolist()))
    if unknown:
        raise PlanError(f"ranks {unknown} are in neither layout: plan for ranks of {all_ranks[:16].tolist()}")
    mask = np.zeros(int(all_ranks.max()) + 1, np.bool_)
    mask[list(ranks)] = True
    return mask


def _classes(pairs: Sequence[Pair], scope: BoolArray | None) -> list[_Class]:
    grouped: dict[tuple[bytes, bytes], list[Pair]] = {}
    for pair in pairs:
        grouped.setdefault((pair.source.pattern.place_key, pair.destination.pattern.place_key), []).append(pair)
    if scope is None:
        return [_Class(members) for members in grouped.values()]
    touched: dict[bytes, bool] = {}
    for members in grouped.values():
        for entry in (members[0].source, members[0].destination):
            if entry.pattern.place_key not in touched:
                touched[entry.pattern.place_key] = bool(scope[entry.pattern.ranks].any())
    return [_Class(members) for keys, members in grouped.items() if touched[keys[0]] or touched[keys[1]]]


@dataclass(slots=True)
class _Planner:
    """Runs class after class into the builder and the floor counters."""

    places: Places
    scope: BoolArray | None
    builder: TableBuilder
    by_rank: FloorCounter
    by_node: FloorCounter | None

    def run(self, classes: Sequence[_Class]) -> None:
        geometry = GeometryCache()
        sources: dict[bytes, Side] = {}
        destinations: dict[bytes, Side] = {}
        lacking: list[str] = []
        for group in classes:
            first = group.pairs[0]
            source = self._side(sources, first.source.pattern.place_key, first)
            destination = self._side(destinations, first.destination.pattern.place_key, first, of_source=False)
            gaps = _gaps(source, destination, geometry)
            if gaps:
                lacking += [f"{name}{gaps}" for pair in group.pairs for name in pair.names]
            else:
                self._add(group, source, destination, geometry)
        if lacking:
            raise PlanError(
                f"no source rank holds these regions, which the destination needs: {', '.join(lacking[:8])}"
                f"{'' if len(lacking) <= 8 else f' and {len(lacking) - 8} more'}; merge the layouts of all source ranks"
            )

    def _side(self, known: dict[bytes, Side], key: bytes, pair: Pair, *, of_source: bool = True) -> Side:
        if key not in known:
            known[key] = Side.of((pair.source if of_source else pair.destination).pattern, self.places)
        return known[key]

    def _add(self, group: _Class, source: Side, destination: Side, geometry: GeometryCache) -> None:
        num_tensors = len(group.pairs)
        if not destination.pattern.num:
            return
        dtypes = np.concatenate([source.pattern.dtypes[:1], destination.pattern.dtypes])
        copies = plan_class(
            source,
            destination,
            geometry.pieces(source, destination),
            places=self.places,
            num_tensors=num_tensors,
            seed=zlib.crc32(group.pairs[0].destination.spec.name.encode()),
            itemsize=int(ITEMSIZES[dtypes].min()),
            scope=self.scope,
        )
        self.builder.add(group.pairs, copies)
        self.by_rank.add(source.pattern, destination.pattern, num_tensors=num_tensors)
        if self.by_node is not None:
            self.by_node.add(source.pattern, destination.pattern, num_tensors=num_tensors)


def _gaps(source: Side, destination: Side, geometry: GeometryCache) -> str:
    """What of the destination's boxes no source box covers, as text; empty when all is covered."""
    pieces = geometry.pieces(source, destination)
    found = np.zeros(destination.atoms.num, np.int64)
    np.add.at(found, pieces.dst, volumes(pieces.start, pieces.stop))
    short = np.flatnonzero(found < volumes(destination.atoms.start, destination.atoms.stop))
    if not len(short):
        return ""
    low, high = destination.atoms.start[short[0]].tolist(), destination.atoms.stop[short[0]].tolist()
    box = ", ".join(f"{a}:{b}" for a, b in zip(low, high, strict=True))
    further = "" if len(short) == 1 else f" and {len(short) - 1} more"
    return f"[{box}]{further}, of which {int(found[short[0]])} elements are there"


def _certificate(
    table: CopyTable, ranks: npt.NDArray[np.int64], places: Places, by_rank: FloorCounter, by_node: FloorCounter | None
) -> Certificate:
    """The floors, checked against the plan: a difference is a fault of the planner."""
    moved = table.moved_bytes
    received = np.zeros(places.num_ranks, np.int64)
    np.add.at(received, table.dst_rank, moved)
    floor = by_rank.needed_bytes - by_rank.held_bytes
    assert (received[ranks] == floor[ranks]).all(), f"received {received[ranks]}, floor {floor[ranks]}"
    entered = np.zeros(int(places.node.max(initial=0)) + 1, np.int64)
    if by_node is not None:
        crosses = places.node[table.src_rank] != places.node[table.dst_rank]
        np.add.at(entered, places.node[table.dst_rank[crosses]], moved[crosses])
        node_floor = by_node.needed_bytes - by_node.held_bytes
        assert (entered == node_floor).all(), f"bytes entering nodes {entered} differ from their floor {node_floor}"
    return Certificate(
        needed_bytes={rank: int(by_rank.needed_bytes[rank]) for rank in ranks.tolist()},
        held_bytes={rank: int(by_rank.held_bytes[rank]) for rank in ranks.tolist()},
        node_floor_bytes={} if by_node is None else dict(zip(places.node_names, entered.tolist(), strict=True)),
    )
