"""The plan oracle: checks a plan element by element, by brute force, sharing no code with the planner.

It gives every element of every source tensor a label, lays the labels out in simulated memory as the source Layout
says, runs the copies hop by hop, and looks at what arrived. Time and memory grow with elements times ranks: for small
layouts only.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reshard.dtype import DType
from reshard.errors import PlanError
from reshard.layout import Address, Layout
from reshard.plan import Copy, Plan
from reshard.region import Region
from reshard.topology import Tier, Topology

IntArray = npt.NDArray[np.int64]
Bytes = dict[int, int]
Place = tuple[str, int, str]


def check_plan(plan: Plan) -> None:
    """Raise PlanError that lists what is wrong with a whole plan; see ``faults_of``."""
    faults = faults_of(plan)
    if faults:
        raise PlanError("the plan is wrong: " + "; ".join(faults[:10]))


def faults_of(plan: Plan) -> list[str]:
    """Every fault found, as text; empty for a right plan.

    A right plan puts the right label into every element of the destination, writes every byte once, reads nothing
    that the same hop writes, never sends a rank an element twice, one that it holds or one that it does not need,
    receives exactly the floor, takes every element from a nearest holder, and lets it enter every node at most once.
    Its certificate says the same.
    """
    truth = _Truth(plan)
    run = _Run(plan, truth)
    run.execute()
    return [*run.faults, *truth.missing(run), *_traffic_faults(plan, truth), *_certificate_faults(plan, truth)]


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


class _Truth:
    """What every rank holds and needs, as sets of labels (source tensor, element)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.feeds = {name: _feed(plan, name) for name in plan.destination.specs}
        self.held: dict[int, set[tuple[str, int]]] = defaultdict(set)
        self.needed: dict[tuple[int, DType], set[tuple[str, int]]] = defaultdict(set)
        self.src_dtype: dict[str, DType] = {}
        self.memory: dict[Place, Bytes] = defaultdict(dict)
        self.labels: dict[tuple[str, int], int] = {}
        self.holders: dict[tuple[str, int], set[int]] = defaultdict(set)
        self._read_source(plan.source)
        for name in plan.destination.specs:
            for holding in plan.destination.holders(name):
                items = self.items(self.feeds[name], holding.region)
                self.needed[holding.rank, holding.address.dtype].update(items)

    def items(self, source_name: str, region: Region) -> list[tuple[str, int]]:
        shape = self.plan.source.specs[source_name].shape
        return [(source_name, index) for index in elements(region, shape).tolist()]

    def label(self, item: tuple[str, int]) -> int:
        return self.labels.setdefault(item, len(self.labels))

    def _read_source(self, source: Layout) -> None:
        for name in source.specs:
            for holding in source.holders(name):
                items = self.items(name, holding.region)
                self.held[holding.rank].update(items)
                self.src_dtype[name] = holding.address.dtype
                memory = self.memory[place(self.plan, 0, holding.rank, holding.address)]
                for item, offset in zip(items, byte_offsets(holding.region, holding.address).tolist(), strict=True):
                    memory[offset] = self.label(item)
                    self.holders[item].add(holding.rank)

    def wire_bytes(self, item: tuple[str, int], dtype: DType) -> int:
        return min(self.src_dtype[item[0]].itemsize, dtype.itemsize)

    def floor(self, rank: int) -> tuple[int, int]:
        """Bytes needed and bytes held of them."""
        needed = held = 0
        for (owner, dtype), items in self.needed.items():
            if owner == rank:
                needed += sum(self.wire_bytes(item, dtype) for item in items)
                held += sum(self.wire_bytes(item, dtype) for item in items & self.held[rank])
        return needed, held

    def node_floor(self, topology: Topology, node: int) -> int:
        ranks = {r for r in (*self.plan.source.ranks, *self.plan.destination.ranks) if topology.node(r) == node}
        there = set().union(*(self.held[rank] for rank in ranks))
        wanted: dict[DType, set[tuple[str, int]]] = defaultdict(set)
        for (owner, dtype), items in self.needed.items():
            if owner in ranks:
                wanted[dtype] |= items - there
        return sum(self.wire_bytes(item, dtype) for dtype, items in wanted.items() for item in items)

    def missing(self, run: "_Run") -> list[str]:
        """Destination elements that don't have their label after the run."""
        faults = []
        for name in self.plan.destination.specs:
            for holding in self.plan.destination.holders(name):
                memory = self.memory[place(self.plan, 1, holding.rank, holding.address)]
                items = self.items(self.feeds[name], holding.region)
                offsets = byte_offsets(holding.region, holding.address).tolist()
                wrong = sum(memory.get(at) != self.label(item) for item, at in zip(items, offsets, strict=True))
                if wrong:
                    faults.append(f"{wrong} elements of {holding.region} are wrong on rank {holding.rank}")
                run.expected[place(self.plan, 1, holding.rank, holding.address)].update(offsets)
        stray = {where: run.written[where].keys() - run.expected[where] for where in run.written}
        faults += [f"writes outside the destination in {where}" for where, extra in stray.items() if extra]
        return faults


def _feed(plan: Plan, name: str) -> str:
    names = [name, *(further for further, target in plan.destination.ties.items() if target == name)]
    found = [plan.source.resolve(candidate) for candidate in names]
    return next(candidate for candidate in found if candidate is not None)


def place(plan: Plan, hop_or_side: int, rank: int, address: Address) -> Place:
    """Key of a storage: sides share storages only where both layouts carry one memory label."""
    shared = plan.source.memory is not None and plan.source.memory == plan.destination.memory
    side = "both" if shared else ("destination" if hop_or_side else "source")
    return side, rank, address.storage


@dataclass(slots=True)
class _Run:
    """Executes a plan on labels."""

    plan: Plan
    truth: _Truth
    faults: list[str] = field(default_factory=list)
    written: dict[Place, dict[int, Copy]] = field(default_factory=lambda: defaultdict(dict))
    expected: dict[Place, set[int]] = field(default_factory=lambda: defaultdict(set))

    def execute(self) -> None:
        copies = sorted(self.plan.copies, key=lambda copy: copy.hop)
        for _, group in itertools.groupby(copies, key=lambda copy: copy.hop):
            self._run_hop(list(group))

    def _run_hop(self, copies: list[Copy]) -> None:
        reads = []
        for copy in copies:
            memory = self.truth.memory[place(self.plan, copy.hop, copy.src_rank, copy.src)]
            offsets = byte_offsets(copy.region, copy.src).tolist()
            reads.append([memory.get(offset) for offset in offsets])
        for copy, labels in zip(copies, reads, strict=True):
            where = place(self.plan, 1, copy.dst_rank, copy.dst)
            if copy.is_alias and (copy.src != copy.dst or where[0] != "both" or not copy.is_local):
                self.faults.append(f"{copy.region} is called in place on rank {copy.dst_rank} and is not")
            for label, offset in zip(labels, byte_offsets(copy.region, copy.dst).tolist(), strict=True):
                if offset in self.written[where]:
                    self.faults.append(f"rank {copy.dst_rank} gets an element of {copy.region} twice")
                    break
                self.written[where][offset] = copy
                if label is None:
                    self.faults.append(f"{copy.region} reads bytes of rank {copy.src_rank} that hold nothing")
                    break
                self.truth.memory[where][offset] = label
        self._check_races(copies)

    def _check_races(self, copies: list[Copy]) -> None:
        for copy in copies:
            if copy.is_alias:
                continue
            where = place(self.plan, copy.hop, copy.src_rank, copy.src)
            for offset in byte_offsets(copy.region, copy.src).tolist():
                writer = self.written[where].get(offset)
                if writer is not None and writer.hop >= copy.hop and not writer.is_alias:
                    self.faults.append(
                        f"hop {copy.hop} reads {copy.region} from rank {copy.src_rank} while it is written"
                    )
                    break


def _traffic_faults(plan: Plan, truth: _Truth) -> list[str]:
    faults = []
    arrived: dict[tuple[int, DType], set[tuple[str, int]]] = defaultdict(set)
    for copy in plan.copies:
        items = set(truth.items(truth.feeds[copy.region.name], copy.region))
        if copy.is_local:
            continue
        receiver = (copy.dst_rank, copy.dst.dtype)
        if items & arrived[receiver]:
            faults.append(f"rank {copy.dst_rank} receives elements of {copy.region} twice")
        if items & truth.held[copy.dst_rank]:
            faults.append(f"rank {copy.dst_rank} receives elements of {copy.region} that it holds")
        if items - truth.needed[receiver]:
            faults.append(f"rank {copy.dst_rank} receives elements of {copy.region} that it does not need")
        arrived[receiver] |= items
        faults += _distance_faults(plan, truth, copy, items)
    return faults


def _distance_faults(plan: Plan, truth: _Truth, copy: Copy, items: set[tuple[str, int]]) -> list[str]:
    topology = plan.inputs.topology
    if topology is None:
        return []
    used = topology.tier(copy.src_rank, copy.dst_rank)
    if copy.hop:
        return [] if used < Tier.CLUSTER else [f"{copy.region} is passed on from rank {copy.src_rank} across nodes"]
    for item in items:
        nearest = min(topology.tier(rank, copy.dst_rank) for rank in truth.holders[item])
        if nearest < used:
            return [f"rank {copy.dst_rank} takes {copy.region} from rank {copy.src_rank} though a nearer rank holds it"]
    return []


def _certificate_faults(plan: Plan, truth: _Truth) -> list[str]:
    faults = []
    cert = plan.certificate
    for rank in sorted({*plan.source.ranks, *plan.destination.ranks}):
        needed, held = truth.floor(rank)
        if plan.received_bytes(rank) != needed - held:
            faults.append(f"rank {rank} receives {plan.received_bytes(rank)} bytes, the floor is {needed - held}")
        if (cert.needed_bytes.get(rank), cert.held_bytes.get(rank)) != (needed, held):
            faults.append(f"the certificate of rank {rank} is wrong: {needed} bytes are needed and {held} held")
    topology = plan.inputs.topology
    if topology is None or not topology.fan_out:
        return faults
    for node in sorted({topology.node(rank) for rank in (*plan.source.ranks, *plan.destination.ranks)}):
        crossing = [c for c in plan.copies if topology.node(c.dst_rank) == node != topology.node(c.src_rank)]
        entered, floor = sum(copy.moved_bytes for copy in crossing), truth.node_floor(topology, node)
        if entered != floor:
            faults.append(f"{entered} bytes enter node {node}, the floor is {floor}")
    return faults
