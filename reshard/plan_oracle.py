"""The plan oracle: checks a plan element by element, by brute force, sharing no code with the planner.

It gives every element of every source tensor a label, lays the labels out in simulated memory, byte by byte, as the
source Layout says, runs the copies hop by hop, and looks at what arrived. Time and memory grow with elements times
ranks: for small layouts only, of which one plan may hold hundreds.
"""

from dataclasses import dataclass, field

import numpy as np

from reshard.copy_table import ITEMSIZES
from reshard.errors import PlanError
from reshard.layout import Address
from reshard.plan import Copies, Plan
from reshard.plan_oracle_boxes import (
    BoolArray,
    Boxes,
    Elements,
    IntArray,
    Numbers,
    copy_boxes,
    layout_boxes,
    row_major_steps,
)
from reshard.region import Region
from reshard.topology import Tier, Topology

_BYTES = 16
_DTYPES = 256


def check_plan(plan: Plan) -> None:
    """Raise PlanError that lists what is wrong with a whole plan; see ``faults_of``."""
    faults = faults_of(plan)
    if faults:
        raise PlanError("the plan is wrong: " + "; ".join(faults[:10]))


def faults_of(plan: Plan) -> list[str]:
    """Every fault found, as text, a kind of fault once per copy or holding; empty for a right plan.

    A right plan puts the right label into every element of the destination, writes every byte once, reads nothing
    that the same hop writes, never sends a rank an element twice, one that it holds or one that it does not need,
    receives exactly the floor, takes every element from a nearest holder, and lets it enter every node at most once.
    Its certificate says the same.
    """
    world = _World(plan)
    world.run()
    world.check_arrived()
    world.check_traffic()
    world.check_floors()
    return world.faults


def elements(region: Region, shape: tuple[int, ...]) -> IntArray:
    """Flat indices, in the tensor's row-major order, of the region's elements."""
    grid = np.meshgrid(*(np.arange(a, b) for a, b in zip(region.start, region.stop, strict=True)), indexing="ij")
    flat = np.zeros(region.shape, np.int64)
    for axis, extent in zip(grid, shape, strict=True):
        flat = flat * extent + axis
    return flat.reshape(-1)


def byte_offsets(region: Region, address: Address) -> IntArray:
    """Byte offset of every element of the region, in the order of ``elements``."""
    flat = np.full(region.shape, address.offset_bytes, np.int64)
    for dim, (extent, stride) in enumerate(zip(region.shape, address.strides, strict=True)):
        steps = np.arange(extent) * stride * address.dtype.itemsize
        flat = flat + steps.reshape([-1 if d == dim else 1 for d in range(len(region.shape))])
    return flat.reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class _Labelled:
    """Elements of boxes with their labels and the cells, bytes of simulated memory, that they begin at."""

    boxes: Boxes
    row: IntArray
    label: IntArray
    cell: IntArray

    @property
    def rank(self) -> IntArray:
        return self.boxes.rank[self.row]

    @property
    def dtype(self) -> IntArray:
        return self.boxes.dtype[self.row]

    @property
    def itemsize(self) -> IntArray:
        found: IntArray = ITEMSIZES[self.dtype]
        return found

    def take(self, chosen: BoolArray) -> "_Labelled":
        return _Labelled(self.boxes, self.row[chosen], self.label[chosen], self.cell[chosen])


class _Memory:
    """Bytes of all storages of all ranks: ``_BYTES`` times the label of the element that a byte is of, plus its
    number in it; -1 where nothing is.
    """

    def __init__(self, num_bytes: int) -> None:
        self.held = np.full(num_bytes, -1, np.int64)

    def write(self, cell: IntArray, itemsize: IntArray, label: IntArray) -> None:
        """Put labels; a negative one leaves rubbish."""
        for byte in range(int(itemsize.max(initial=0))):
            there = itemsize > byte
            self.held[cell[there] + byte] = np.where(label[there] < 0, -1, label[there] * _BYTES + byte)

    def read(self, cell: IntArray, itemsize: IntArray) -> IntArray:
        """Labels of whole elements; -1 where the bytes are not those of one element."""
        first = self.held[cell]
        whole = (first >= 0) & (first % _BYTES == 0)
        for byte in range(1, int(itemsize.max(initial=0))):
            there = itemsize > byte
            whole[there] &= self.held[cell[there] + byte] == first[there] + byte
        return np.where(whole, first // _BYTES, -1)


@dataclass(slots=True)
class _World:
    """Labels, memory and what a plan does to them."""

    plan: Plan
    faults: list[str] = field(init=False)
    numbers: Numbers = field(init=False)
    num_labels: int = field(init=False)
    src_itemsize: IntArray = field(init=False)
    held: _Labelled = field(init=False)
    needed: _Labelled = field(init=False)
    read: _Labelled = field(init=False)
    written: _Labelled = field(init=False)
    memory: _Memory = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.faults = []
        self.numbers = Numbers(plan)
        source, destination = plan.source.specs, plan.destination.specs
        shapes = [spec.shape for spec in source.values()]
        width = max((len(shape) for shape in shapes), default=0)
        steps = row_major_steps(shapes, width)
        sizes = np.array([spec.numel for spec in source.values()], np.int64)
        first, self.num_labels = np.cumsum(sizes) - sizes, int(sizes.sum())
        number = {name: index for index, name in enumerate(source)}
        feed = np.array([number[_feed(plan, name)] for name in destination], np.int64)
        held = layout_boxes(plan.source, self.numbers, width, is_destination=False)
        needed = layout_boxes(plan.destination, self.numbers, width, is_destination=True)
        order = {name: index for index, name in enumerate(destination)}
        read, written = copy_boxes(plan, self.numbers, order, width)
        sides = (held, needed, read, written)
        base, num_bytes = self._lay_out(sides)
        own = np.arange(len(shapes))
        labelled = []
        for boxes, source_of in zip(sides, (own, feed, feed, feed), strict=True):
            every = Elements.of(boxes)
            label = first[source_of][boxes.tensor[every.row]] + every.flat(boxes, steps[source_of])
            cell = base[boxes.place[every.row]] + every.offsets(boxes)
            labelled.append(_Labelled(boxes, every.row, label, cell))
        self.held, self.needed, self.read, self.written = labelled
        self.memory = _Memory(num_bytes)
        self.memory.write(self.held.cell, self.held.itemsize, self.held.label)
        self.src_itemsize = np.zeros(self.num_labels, np.int64)
        self.src_itemsize[self.held.label] = self.held.itemsize

    def _lay_out(self, sides: tuple[Boxes, ...]) -> tuple[IntArray, int]:
        """Where in the simulated memory every place begins, and how large it is."""
        size = np.zeros(max((int(boxes.place.max(initial=-1)) for boxes in sides), default=-1) + 1, np.int64)
        for boxes in sides:
            reach = ((boxes.stop - boxes.start - 1) * boxes.strides).sum(axis=1) + 1
            np.maximum.at(size, boxes.place, boxes.offset + reach * ITEMSIZES[boxes.dtype])
        base: IntArray = np.cumsum(size) - size
        return base, int(size.sum())

    def run(self) -> None:
        """Execute the copies, hop by hop: all reads of a hop before its writes."""
        table = self.plan.table
        alias = table.alias != 0
        moved = self.read.cell != self.written.cell
        moved |= (self.read.dtype != self.written.dtype) | (self.read.rank != self.written.rank)
        self._blame(self.written.row[alias[self.written.row] & moved], "is called in place on rank {dst} and is not")
        self._check_written_once()
        hop_of = table.hop[self.read.row]
        written_in = np.full(len(self.memory.held), -1, np.int64)
        for hop in np.unique(table.hop).tolist():
            now = hop_of == hop
            read, written = self.read.take(now), self.written.take(now)
            label = self.memory.read(read.cell, read.itemsize)
            self._blame(read.row[label < 0], "reads bytes of rank {src} that hold nothing")
            self.memory.write(written.cell, written.itemsize, label)
            copied = ~alias[read.row]
            _mark(written_in, written.take(copied), hop)
            raced = copied & (_largest(written_in, read) >= hop)
            self._blame(read.row[raced], f"is read by hop {hop} from rank {{src}} while it is written")

    def _check_written_once(self) -> None:
        times = np.zeros(len(self.memory.held), np.int64)
        written, itemsize = self.written, self.written.itemsize
        for byte in range(int(itemsize.max(initial=0))):
            np.add.at(times, written.cell[itemsize > byte] + byte, 1)
        twice = _largest(times, written) > 1
        self._blame(written.row[twice], "is written on rank {dst} where something else is written too: twice")

    def check_arrived(self) -> None:
        """Every element of the destination has its label, and nothing else was written."""
        needed = self.needed
        wrong = self.memory.read(needed.cell, needed.itemsize) != needed.label
        counts = np.bincount(needed.row[wrong], minlength=len(needed.boxes.rank))
        names = list(self.plan.destination.specs)
        for row in np.flatnonzero(counts).tolist():
            boxes = needed.boxes
            ndim = len(self.plan.destination.specs[names[boxes.tensor[row]]].shape)
            bounds = boxes.start[row, :ndim].tolist(), boxes.stop[row, :ndim].tolist()
            region = Region(names[boxes.tensor[row]], tuple(bounds[0]), tuple(bounds[1]))
            self.faults.append(f"{counts[row]} elements of {region} are wrong on rank {boxes.rank[row]}")
        expected = np.zeros(len(self.memory.held), np.int64)
        _mark(expected, needed, 1)
        stray = _least(expected, self.written) == 0
        places = np.unique(self.written.boxes.place[self.written.row[stray]]).tolist()
        self.faults += [f"writes outside the destination in {self.numbers.name(place)}" for place in places]

    def check_traffic(self) -> None:
        """Nothing travels twice, needlessly, or from farther than it must."""
        remote = self.read.rank != self.written.rank
        arrived, sent = self.written.take(remote), self.read.take(remote)
        key = self._receiver(arrived)
        distinct, times = np.unique(key, return_counts=True)
        twice = np.isin(key, distinct[times > 1])
        self._blame(arrived.row[twice], "is received by rank {dst} twice")
        held = np.isin(self._at(arrived.rank, arrived.label), self._at(self.held.rank, self.held.label))
        self._blame(arrived.row[held], "is received by rank {dst}, which holds elements of it")
        unneeded = ~np.isin(key, self._receiver(self.needed))
        self._blame(arrived.row[unneeded], "is received by rank {dst}, which does not need it all")
        topology = self.plan.inputs.topology
        if topology is not None:
            self._check_distances(topology, sent, arrived)

    def _check_distances(self, topology: Topology, sent: _Labelled, arrived: _Labelled) -> None:
        used = np.full(len(sent.row), int(Tier.CLUSTER))
        nearest = used.copy()
        for tier, where in ((Tier.NODE, topology.nodes_of), (Tier.GPU, topology.gpus_of)):
            used[where(sent.rank) == where(arrived.rank)] = tier
            there = self._at(where(self.held.rank), self.held.label)
            nearest[np.isin(self._at(where(arrived.rank), arrived.label), there)] = tier
        first = self.plan.table.hop[arrived.row] == 0
        self._blame(arrived.row[first & (nearest < used)], "goes from rank {src} to rank {dst} though a nearer has it")
        self._blame(arrived.row[~first & (used == Tier.CLUSTER)], "is passed on from rank {src} across nodes")

    def check_floors(self) -> None:
        """What ranks and nodes receive is the floor, and the certificate says so."""
        plan, table = self.plan, self.plan.table
        ranks = np.arange(self.numbers.num_ranks)
        needed, held = self._floors(ranks)
        counts = np.bincount(self.read.row, minlength=table.num)
        moved = counts * ITEMSIZES[table.wire_dtype] * (table.src_rank != table.dst_rank)
        received = _sum(table.dst_rank.astype(np.int64), moved, len(ranks))
        cert = plan.certificate
        for rank in sorted({*plan.source.ranks, *plan.destination.ranks}):
            floor = int(needed[rank] - held[rank])
            if {int(received[rank]), plan.received_bytes(rank)} != {floor}:
                self.faults.append(f"rank {rank} receives {received[rank]} bytes, the floor is {floor}")
            if (cert.needed_bytes.get(rank), cert.held_bytes.get(rank)) != (needed[rank], held[rank]):
                told = f"{needed[rank]} bytes are needed and {held[rank]} held"
                self.faults.append(f"the certificate of rank {rank} is wrong: {told}")
        topology = plan.inputs.topology
        if topology is not None and topology.fan_out:
            self._check_node_floors(topology, moved)

    def _check_node_floors(self, topology: Topology, moved: IntArray) -> None:
        plan, table = self.plan, self.plan.table
        ranks = np.array(sorted({*plan.source.ranks, *plan.destination.ranks}), np.int64)
        node_of = np.zeros(self.numbers.num_ranks, np.int64)
        node_of[ranks] = topology.nodes_of(ranks)
        needed, held = self._floors(node_of)
        crosses = node_of[table.src_rank] != node_of[table.dst_rank]
        entered = _sum(node_of[table.dst_rank], moved * crosses, len(needed))
        floors = {node: int(needed[node] - held[node]) for node in np.unique(node_of[ranks]).tolist()}
        for node, floor in floors.items():
            if entered[node] != floor:
                self.faults.append(f"{entered[node]} bytes enter node {node}, the floor is {floor}")
        told = dict(plan.certificate.node_floor_bytes)
        if told != floors:
            self.faults.append(f"the certificate of nodes is wrong: it has {told}, the floors are {floors}")

    def _floors(self, receiver_of: IntArray) -> tuple[IntArray, IntArray]:
        """Bytes needed per receiver, a rank or a node, and those of them that are held there."""
        needed, size = self.needed, int(receiver_of.max(initial=-1)) + 1
        receiver = receiver_of[needed.rank]
        wanted = np.unique(self._at(receiver * _DTYPES + needed.dtype, needed.label))
        key, label = np.divmod(wanted, max(self.num_labels, 1))
        receiver, dtype = np.divmod(key, _DTYPES)
        weight = np.minimum(self.src_itemsize[label], ITEMSIZES[dtype])
        there = np.isin(self._at(receiver, label), self._at(receiver_of[self.held.rank], self.held.label))
        return _sum(receiver, weight, size), _sum(receiver, weight * there, size)

    def _receiver(self, what: _Labelled) -> IntArray:
        return self._at(what.rank * _DTYPES + what.dtype, what.label)

    def _at(self, where: IntArray, label: IntArray) -> IntArray:
        return where * max(self.num_labels, 1) + label

    def _blame(self, rows: IntArray, what: str) -> None:
        """A fault for every copy among ``rows``."""
        for copy in Copies(self.plan.table, np.unique(rows)):
            self.faults.append(f"{copy.region} " + what.format(src=copy.src_rank, dst=copy.dst_rank))


def _feed(plan: Plan, name: str) -> str:
    """The source tensor that a destination tensor is filled from: of its own name, or of one that is tied to it."""
    names = [name, *(further for further, target in plan.destination.ties.items() if target == name)]
    found = [plan.source.resolve(candidate) for candidate in names]
    return next(candidate for candidate in found if candidate is not None)


def _mark(cells: IntArray, what: _Labelled, value: int) -> None:
    itemsize = what.itemsize
    for byte in range(int(itemsize.max(initial=0))):
        cells[what.cell[itemsize > byte] + byte] = value


def _largest(cells: IntArray, what: _Labelled) -> IntArray:
    """The largest value among the bytes of every element."""
    itemsize, found = what.itemsize, cells[what.cell]
    for byte in range(1, int(itemsize.max(initial=0))):
        there = itemsize > byte
        found[there] = np.maximum(found[there], cells[what.cell[there] + byte])
    return found


def _least(cells: IntArray, what: _Labelled) -> IntArray:
    return -_largest(-cells, what)


def _sum(index: IntArray, values: IntArray, size: int) -> IntArray:
    found = np.zeros(size, np.int64)
    np.add.at(found, index, values)
    return found
