"""Plan one class of tensors: who sends which piece to whom.

Note: sources
    A rank that holds a piece itself copies it locally. Otherwise the source is on the same GPU if one is there, else
    on the same node, else anywhere. Among equally near sources, pieces rotate: the class has ``m`` like tensors, a
    piece is wanted by ``n`` ranks and held by ``k`` sources, and the ``m * n`` sends go round the ``k`` sources in
    turn, so that loads differ by at most one send. Where ``m * n`` is no multiple of ``k`` and pieces are large, the
    last tensors are cut into parts, and the parts go round. Where every source of its own replica serves as many ranks
    as the others do, a rank takes from its own replica instead, which turns transitions between meshes into regular
    gathers. Every choice depends on the class alone: a rank that
    plans its own part chooses as all others do.

Note: fan-out
    When no source is on the node of a rank, all ranks of that node that want the piece (in one dtype) elect a leader,
    again in rotation. The leader receives the piece from outside; the others copy it from the leader's destination,
    in the next hop. Further holdings of one rank that want the same bytes copy them from its first, one hop later.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard.boxes import Pieces, merge_adjacent, ranges, volumes
from reshard.pattern import IntArray
from reshard.planner_sides import Places, Side

MIN_PART_BYTES = 1 << 20
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ClassCopies:
    """Copies of a class: tensor number in the class, holdings, hop, box. ``src`` is a destination row where ``hop`` >
    0.
    """

    tensor: IntArray
    src: IntArray
    dst: IntArray
    hop: IntArray
    start: IntArray
    stop: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One row per piece and destination holding. ``local`` is a source holding of the same rank or -1; ``primary``
    the first row of the same piece, rank and dtype."""

    piece: IntArray
    dst: IntArray
    rank: IntArray
    local: IntArray
    primary: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """How remote rows choose: send ``ordinal`` of ``size`` that share ``num_near`` sources from ``first_near`` on.

    ``team`` rows of one node share a leader: members are rows ``team_first + (0 .. team_size)``, this row is
    ``member``, and the team is number ``team`` of ``num_teams`` of its size on its node. ``partner`` is a place in
    the source's ``holding`` to take always, or -1.
    """

    row: IntArray
    first_near: IntArray
    num_near: IntArray
    ordinal: IntArray
    size: IntArray
    team_first: IntArray
    team_size: IntArray
    member: IntArray
    team: IntArray
    num_teams: IntArray
    partner: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Instances:
    """The tensors of a class, the last of them cut in parts: part ``part`` of ``num_parts`` of tensor ``tensor``."""

    tensor: IntArray
    part: IntArray
    num_parts: IntArray


def plan_class(
    source: Side,
    destination: Side,
    pieces: Pieces,
    *,
    places: Places,
    num_tensors: int,
    seed: int,
    itemsize: int,
    scope: BoolArray | None,
) -> ClassCopies:
    """All copies of the class that touch a rank in ``scope`` (a mask over ranks; None is every rank)."""
    rows = _rows(source, destination, pieces, places)
    demand = _demand(source, pieces, rows, destination, places)
    instances = _instances(pieces, demand, rows, num_tensors=num_tensors, itemsize=itemsize)
    kept = _visible(source, rows, demand, places, scope)
    parts = [_local_copies(rows, pieces, num_tensors, scope)]
    remote = _Remote(source, rows, pieces, demand, instances, seed)
    parts.append(remote.copies(kept))
    parts.append(remote.duplicates(_visible_duplicates(rows, scope)))
    merged = _concatenate(parts)
    if scope is not None:
        merged = _restrict(merged, source, destination, scope)
    refined = source.atoms.num != len(source.pattern.boxes_start) or destination.atoms.num != len(
        destination.pattern.boxes_start
    )
    return _merge(merged) if refined or len(instances.tensor) != num_tensors else merged


def _rows(source: Side, destination: Side, pieces: Pieces, places: Places) -> Rows:
    counts = destination.ptr[pieces.dst + 1] - destination.ptr[pieces.dst]
    piece = np.repeat(np.arange(len(pieces.dst), dtype=np.int64), counts)
    dst = destination.holding[ranges(destination.ptr[pieces.dst], counts)]
    rank = destination.pattern.ranks[dst]
    order = np.lexsort((dst, rank, destination.pattern.dtypes[dst], places.node[rank], piece))
    piece, dst, rank = piece[order], dst[order], rank[order]
    dtype = destination.pattern.dtypes[dst]
    fresh = np.ones(len(piece), np.bool_)
    fresh[1:] = (piece[1:] != piece[:-1]) | (rank[1:] != rank[:-1]) | (dtype[1:] != dtype[:-1])
    wanted = pieces.src[piece] * (places.num_ranks + 1) + rank
    at = np.minimum(np.searchsorted(source.by_rank, wanted), len(source.by_rank) - 1)
    local = np.where(source.by_rank[at] == wanted, source.rank_holding[at], -1)
    return Rows(piece, dst, rank, local, np.maximum.accumulate(np.where(fresh, np.arange(len(piece)), 0)))


def _demand(source: Side, pieces: Pieces, rows: Rows, destination: Side, places: Places) -> Demand:
    row = np.flatnonzero((rows.local < 0) & (rows.primary == np.arange(len(rows.piece))))
    piece, rank = rows.piece[row], rows.rank[row]
    atom = pieces.src[piece]
    size = places.num_ranks + 1
    first = np.searchsorted(source.by_node, atom * size + places.node[rank], "left")
    last = np.searchsorted(source.by_node, atom * size + places.node[rank], "right")
    if places.shares_gpus:
        first_gpu = np.searchsorted(source.by_gpu, atom * size + places.gpu[rank], "left")
        last_gpu = np.searchsorted(source.by_gpu, atom * size + places.gpu[rank], "right")
        first, last = np.where(last_gpu > first_gpu, [first_gpu, last_gpu], [first, last])
    outside = last == first
    first = np.where(outside, source.ptr[atom], first).astype(np.int64)
    last = np.where(outside, source.ptr[atom + 1], last).astype(np.int64)
    in_team = outside & places.fan_out
    dtype = destination.pattern.dtypes[rows.dst[row]]
    if in_team.any():
        label = np.where(in_team, places.node[rank] * 256 + dtype, -1 - np.arange(len(row)))
        member, team_size, team_first = _ordinals(piece, label)
    else:
        member, team_size, team_first = _alone(len(row))
    is_head = (member == 0).astype(np.int64)
    ordinal, group_size, _ = _alone(len(row))
    if (last - first > 1).any():
        ordinal, group_size = _head_ordinals(is_head, team_first, first, last)
    team, num_teams, _ = _alone(len(row))
    if (team_size > 1).any():
        team, num_teams = _head_ordinals(is_head, team_first, places.node[rank], team_size)
    partner = _partners(source, places, atom, rank, first, last, team_size == 1)
    return Demand(
        row, first, last - first, ordinal, group_size, team_first, team_size, member, team, num_teams, partner
    )


def _partners(
    source: Side,
    places: Places,
    atom: IntArray,
    rank: IntArray,
    first: IntArray,
    last: IntArray,
    alone: BoolArray,
) -> IntArray:
    """Places of the near sources in each row's own replica, where all rows are alone and taking those is level; else
    -1.
    """
    if (last - first <= 1).all():
        return np.full(len(first), -1, np.int64)
    wanted = atom * (places.num_ranks + 1) + places.replica[rank]
    at = np.minimum(np.searchsorted(source.by_replica, wanted), len(source.by_replica) - 1)
    found = source.replica_at[at]
    fits = (source.by_replica[at] == wanted) & (found >= first) & (found < last)
    if not fits.any():
        return np.full(len(first), -1, np.int64)
    _, size, head = _ordinals(first, last)
    _, uses, _ = _ordinals(first, last, np.where(fits, found, -1))
    uneven = ~fits | ~alone | (uses * (last - first) != size)
    spoiled = np.zeros(len(first), np.bool_)
    np.logical_or.at(spoiled, head, uneven)
    return np.where(spoiled[head], -1, found)


def _alone(num: int) -> tuple[IntArray, IntArray, IntArray]:
    """``_ordinals`` of ``num`` elements that are all unlike, which sorting need not find out."""
    return np.zeros(num, np.int64), np.ones(num, np.int64), np.arange(num, dtype=np.int64)


def _ordinals(*keys: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Per element: its number among those with equal keys, how many those are, and the index of the first of them.

    Elements with equal keys must be in a stable order; members of a group need not be adjacent.
    """
    num = len(keys[0])
    order = np.lexsort(tuple(reversed(keys)))
    fresh = np.zeros(num, np.bool_)
    fresh[:1] = True
    for key in keys:
        fresh[1:] |= key[order][1:] != key[order][:-1]
    heads = np.flatnonzero(fresh)
    group = np.cumsum(fresh) - 1
    sizes = np.diff(np.append(heads, num))
    ordinal, size, first = np.empty(num, np.int64), np.empty(num, np.int64), np.empty(num, np.int64)
    ordinal[order] = np.arange(num) - heads[group]
    size[order] = sizes[group]
    first[order] = order[heads[group]]
    return ordinal, size, first


def _head_ordinals(is_head: IntArray, team_first: IntArray, *keys: IntArray) -> tuple[IntArray, IntArray]:
    """Number every team among the teams with equal keys; members carry their team's number and how many there are."""
    heads = np.flatnonzero(is_head)
    ordinal, size, _ = _ordinals(*(key[heads] for key in keys))
    spread_ordinal, spread_size = np.zeros(len(is_head), np.int64), np.zeros(len(is_head), np.int64)
    spread_ordinal[heads], spread_size[heads] = ordinal, size
    return spread_ordinal[team_first], spread_size[team_first]


def _instances(pieces: Pieces, demand: Demand, rows: Rows, *, num_tensors: int, itemsize: int) -> Instances:
    uneven_sources = demand.num_near[(num_tensors * demand.size) % demand.num_near != 0]
    uneven_teams = demand.team_size[(num_tensors * demand.num_teams) % demand.team_size != 0]
    ways = int(max(uneven_sources.max(initial=1), uneven_teams.max(initial=1)))
    largest = int(volumes(pieces.start, pieces.stop)[rows.piece[demand.row]].max(initial=0)) * itemsize
    num_parts = max(min(ways, largest // MIN_PART_BYTES), 1)
    num_cut = num_tensors % ways if num_parts > 1 else 0
    whole = num_tensors - num_cut
    return Instances(
        tensor=np.concatenate([np.arange(whole), np.repeat(np.arange(whole, num_tensors), num_parts)]),
        part=np.concatenate([np.zeros(whole, np.int64), np.tile(np.arange(num_parts), num_cut)]),
        num_parts=np.concatenate([np.ones(whole, np.int64), np.full(num_cut * num_parts, num_parts)]),
    )


def _visible(source: Side, rows: Rows, demand: Demand, places: Places, scope: BoolArray | None) -> IntArray:
    """Demand rows that may touch the scope, as sender, receiver or leader."""
    everything = np.arange(len(demand.row), dtype=np.int64)
    if scope is None or scope[source.pattern.ranks].any():
        return everything
    touched = np.zeros(int(places.node.max(initial=0)) + 1, np.bool_)
    touched[places.node[np.flatnonzero(scope)]] = True
    rank = rows.rank[demand.row]
    return np.flatnonzero(scope[rank] | ((demand.team_size > 1) & touched[places.node[rank]]))


def _visible_duplicates(rows: Rows, scope: BoolArray | None) -> IntArray:
    further = (rows.local < 0) & (rows.primary != np.arange(len(rows.piece)))
    return np.flatnonzero(further if scope is None else further & scope[rows.rank])


def _local_copies(rows: Rows, pieces: Pieces, num_tensors: int, scope: BoolArray | None) -> ClassCopies:
    own = np.flatnonzero(rows.local >= 0 if scope is None else (rows.local >= 0) & scope[rows.rank])
    tensor = np.repeat(np.arange(num_tensors, dtype=np.int64), len(own))
    row = np.tile(own, num_tensors)
    piece = rows.piece[row]
    return ClassCopies(
        tensor, rows.local[row], rows.dst[row], np.zeros(len(row), np.int64), pieces.start[piece], pieces.stop[piece]
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Remote:
    """Copies that cross ranks, and those that depend on them."""

    source: Side
    rows: Rows
    pieces: Pieces
    demand: Demand
    instances: Instances
    seed: int

    def copies(self, chosen: IntArray) -> ClassCopies:
        """Copies of the chosen demand rows, for every instance."""
        at, instance = self._product(chosen)
        row = self.demand.row[at]
        src, hop = self._choose(at, instance)
        start, stop = self._boxes(row, instance)
        return _drop_empty(ClassCopies(self.instances.tensor[instance], src, self.rows.dst[row], hop, start, stop))

    def duplicates(self, chosen: IntArray) -> ClassCopies:
        """Copies into further holdings of a rank from its first, one hop after that one arrived."""
        demand_of_row = np.full(len(self.rows.piece), -1, np.int64)
        demand_of_row[self.demand.row] = np.arange(len(self.demand.row))
        row_at, instance = self._product(chosen)
        primary = self.rows.primary[row_at]
        _, hop = self._choose(demand_of_row[primary], instance)
        start, stop = self._boxes(row_at, instance)
        tensor = self.instances.tensor[instance]
        return _drop_empty(ClassCopies(tensor, self.rows.dst[primary], self.rows.dst[row_at], hop + 1, start, stop))

    def _product(self, chosen: IntArray) -> tuple[IntArray, IntArray]:
        num = len(self.instances.tensor)
        return np.tile(chosen, num), np.repeat(np.arange(num, dtype=np.int64), len(chosen))

    def _choose(self, at: IntArray, instance: IntArray) -> tuple[IntArray, IntArray]:
        """Source holding (or the leader's destination holding) and hop of demand rows ``at``."""
        demand = self.demand
        size, num_near = demand.size[at], demand.num_near[at]
        rounds = instance // (num_near // np.gcd(size, num_near))
        turn = (
            instance * size + demand.ordinal[at] + rounds + self.seed + self.pieces.src[self.rows.piece[demand.row[at]]]
        )
        partner = demand.partner[at]
        src = self.source.holding[np.where(partner >= 0, partner, demand.first_near[at] + turn % num_near)]
        num_teams, team_size = demand.num_teams[at], demand.team_size[at]
        rounds = instance // (team_size // np.gcd(num_teams, team_size))
        leader = (instance * num_teams + demand.team[at] + rounds + self.seed) % team_size
        follows = leader != demand.member[at]
        team_rows = demand.row[np.minimum(demand.team_first[at] + leader, len(demand.row) - 1)]
        return np.where(follows, self.rows.dst[team_rows], src), follows.astype(np.int64)

    def _boxes(self, row: IntArray, instance: IntArray) -> tuple[IntArray, IntArray]:
        piece = self.rows.piece[row]
        start, stop = self.pieces.start[piece], self.pieces.stop[piece]
        num_parts, part = self.instances.num_parts[instance], self.instances.part[instance]
        if start.shape[1] == 0 or not (num_parts > 1).any():
            return start, stop
        extents = stop - start
        wide = extents >= num_parts[:, None]
        dim = np.where(wide.any(axis=1), wide.argmax(axis=1), extents.argmax(axis=1))
        each = np.arange(len(start))
        low, extent = start[each, dim], extents[each, dim]
        start, stop = start.copy(), stop.copy()
        start[each, dim] = low + extent * part // num_parts
        stop[each, dim] = low + extent * (part + 1) // num_parts
        return start, stop


def _concatenate(parts: list[ClassCopies]) -> ClassCopies:
    return ClassCopies(
        tensor=np.concatenate([part.tensor for part in parts]),
        src=np.concatenate([part.src for part in parts]),
        dst=np.concatenate([part.dst for part in parts]),
        hop=np.concatenate([part.hop for part in parts]),
        start=np.concatenate([part.start for part in parts]),
        stop=np.concatenate([part.stop for part in parts]),
    )


def _select(copies: ClassCopies, keep: BoolArray | IntArray) -> ClassCopies:
    return ClassCopies(
        copies.tensor[keep], copies.src[keep], copies.dst[keep], copies.hop[keep], copies.start[keep], copies.stop[keep]
    )


def _drop_empty(copies: ClassCopies) -> ClassCopies:
    filled: BoolArray = np.logical_and.reduce(copies.start < copies.stop, axis=1)
    return copies if filled.all() else _select(copies, filled)


def _restrict(copies: ClassCopies, source: Side, destination: Side, scope: BoolArray) -> ClassCopies:
    sender = np.where(
        copies.hop > 0,
        destination.pattern.ranks[np.where(copies.hop > 0, copies.src, 0)],
        source.pattern.ranks[np.where(copies.hop > 0, 0, copies.src)],
    )
    return _select(copies, scope[sender] | scope[destination.pattern.ranks[copies.dst]])


def _merge(copies: ClassCopies) -> ClassCopies:
    """Neighbouring boxes with the same tensor, holdings and hop become one copy."""
    keys = np.stack([copies.tensor, copies.src, copies.dst, copies.hop], axis=1)
    distinct, label = np.unique(keys, axis=0, return_inverse=True)
    label, start, stop = merge_adjacent(label.reshape(-1).astype(np.int64), copies.start, copies.stop)
    tensor, src, dst, hop = distinct[label].T
    return ClassCopies(tensor, src, dst, hop, start, stop)
