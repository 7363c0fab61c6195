"""What a plan would take on given hardware: an alpha-beta model over links, and the memory of weights by phase.

Each hop of a plan takes as long as its busiest link: bytes over bandwidth, plus a latency for every peer that a rank
talks to. Memory, NVLink and network work at the same time; a hop begins when the one before has ended. Bandwidths are
what links are specified for, times ``efficiency``; nothing here is a measurement.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from reshard.copy_table import ITEMSIZES, CopyTable
from reshard.errors import PlanError
from reshard.pattern import IntArray
from reshard.plan import Plan
from reshard.topology import Topology

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Hardware:
    """Specified bandwidths in bytes per second, each way: device memory and NVLink per GPU, network per node."""

    name: str
    origin: str
    memory_bytes: int
    memory_bandwidth: float
    nvlink_bandwidth: float
    network_bandwidth: float
    latency_s: float = 20e-6
    efficiency: float = 0.8


HARDWARE: Mapping[str, Hardware] = {
    "a100": Hardware(
        "a100",
        "A100-80GB data sheet; NVLink3; 200 Gb/s per node, as HybridFlow's cluster",
        80 * 10**9,
        2.0e12,
        300e9,
        25e9,
    ),
    "h100": Hardware("h100", "H100 SXM data sheet; NVLink4; 400 Gb/s per GPU", 80 * 10**9, 3.35e12, 450e9, 400e9),
    "h200": Hardware("h200", "H200 data sheet; NVLink4; 400 Gb/s per GPU", 141 * 10**9, 4.8e12, 450e9, 400e9),
    "gb200": Hardware("gb200", "GB200 data sheet; NVLink5; 400 Gb/s per GPU", 186 * 10**9, 8.0e12, 900e9, 400e9),
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per rank (or node) by way: the larger of what goes out and comes in."""

    in_place: IntArray
    local: IntArray
    nvlink: IntArray
    network: IntArray


@dataclass(frozen=True, slots=True)
class Simulation:
    """Predicted seconds of a transition, per hop and in all, and bytes of weights of the fullest rank by phase.

    ``transition_bytes`` counts what a rank holds on both sides once, as memory that both sides share does.
    """

    hardware: Hardware
    hop_seconds: tuple[float, ...]
    bound_by: tuple[str, ...]
    train_bytes: int
    transition_bytes: int
    generate_bytes: int
    rounds: int

    @property
    def seconds(self) -> float:
        """All hops together."""
        return sum(self.hop_seconds)


def simulate(plan: Plan, hardware: Hardware, *, staging_bytes: int | None = None) -> Simulation:
    """Predict a whole plan; ``staging_bytes`` cuts every hop into rounds that move at most so much into a rank.

    Raises PlanError for a plan of only some ranks, whose links carry more than it knows.
    """
    if plan.inputs.ranks is not None:
        raise PlanError("a plan for some ranks does not know what the others send: simulate the plan of all ranks")
    topology = plan.inputs.topology or Topology.single_node(plan.scope)
    table = plan.table
    seconds, bounds, rounds = [], [], 1
    for hop in range(int(table.hop.max(initial=0)) + 1):
        chosen = table.hop == hop
        spent = _hop_seconds(table, chosen, topology, hardware)
        most = _largest(table, chosen)
        num_rounds = 1 if staging_bytes is None else max(math.ceil(most / staging_bytes), 1)
        rounds = max(rounds, num_rounds)
        bound = max(spent, key=lambda link: spent[link])
        seconds.append(spent[bound] + (num_rounds - 1) * hardware.latency_s)
        bounds.append(bound)
    train = {rank: _held(plan, rank, source=True) for rank in plan.scope}
    generate = {rank: _held(plan, rank, source=False) for rank in plan.scope}
    shared = {rank: plan.certificate.held_bytes[rank] for rank in plan.scope}
    return Simulation(
        hardware=hardware,
        hop_seconds=tuple(seconds),
        bound_by=tuple(bounds),
        train_bytes=max(train.values()),
        transition_bytes=max(train[rank] + generate[rank] - shared[rank] for rank in plan.scope),
        generate_bytes=max(generate.values()),
        rounds=rounds,
    )


def traffic(plan: Plan) -> Traffic:
    """Bytes per rank by way: kept in place, copied within the rank, received over NVLink, received from other nodes."""
    topology = plan.inputs.topology or Topology.single_node(plan.scope)
    table = plan.table
    size = max(plan.scope) + 1
    outside = _crosses_nodes(table, topology)
    local = table.src_rank == table.dst_rank
    written = table.numel * ITEMSIZES[table.dst_dtype]
    dst = table.dst_rank.astype(np.int64)
    return Traffic(
        in_place=_sum(dst, written * (table.alias != 0), size),
        local=_sum(dst, written * (local & (table.alias == 0)), size),
        nvlink=_sum(dst, table.moved_bytes * (~local & ~outside), size),
        network=_sum(dst, table.moved_bytes * outside, size),
    )


def scaled(hardware: Hardware, *, efficiency: float) -> Hardware:
    """The same hardware with another share of the specified bandwidth."""
    return replace(hardware, efficiency=efficiency)


def gather_seconds(model_bytes: int, *, num_ranks: int, ranks_per_node: int, hardware: Hardware) -> float:
    """A ring all-gather of the whole model to every rank, which is what a full gather costs.

    Every GPU receives ``(n-1)/n`` of the model over NVLink; where there are several nodes, that much enters each node
    too.
    """
    part = (num_ranks - 1) / num_ranks * model_bytes
    inside = part / (hardware.nvlink_bandwidth * hardware.efficiency)
    nodes = math.ceil(num_ranks / ranks_per_node)
    outside = (nodes - 1) / nodes * model_bytes / (hardware.network_bandwidth * hardware.efficiency)
    return max(inside, outside) + (num_ranks - 1) * hardware.latency_s


def _hop_seconds(table: CopyTable, chosen: BoolArray, topology: Topology, hardware: Hardware) -> dict[str, float]:
    src, dst = table.src_rank.astype(np.int64), table.dst_rank.astype(np.int64)
    size = int(max(src.max(initial=0), dst.max(initial=0))) + 1
    outside = _crosses_nodes(table, topology) & chosen
    inside = chosen & (src != dst) & ~outside
    copied = chosen & (src == dst) & (table.alias == 0)
    moved = table.moved_bytes
    touched = table.numel * (ITEMSIZES[table.src_dtype] + ITEMSIZES[table.dst_dtype]) * copied
    nvlink = max(_sum(end, moved * inside, size).max(initial=0) for end in (src, dst))
    num_nodes = max(topology.nodes_of(np.array(topology.ranks)).max(initial=0) + 1, 1)
    nodes = (topology.nodes_of(src), topology.nodes_of(dst)) if len(src) else (src, dst)
    network = max(_sum(end, moved * outside, int(num_nodes)).max(initial=0) for end in nodes)
    share = hardware.efficiency
    return {
        "memory": float(_sum(dst, touched, size).max(initial=0)) / (hardware.memory_bandwidth * share),
        "nvlink": float(nvlink) / (hardware.nvlink_bandwidth * share)
        + _most_peers(src, dst, inside) * hardware.latency_s,
        "network": float(network) / (hardware.network_bandwidth * share)
        + _most_peers(src, dst, outside) * hardware.latency_s,
    }


def _crosses_nodes(table: CopyTable, topology: Topology) -> BoolArray:
    if not table.num:
        return np.zeros(0, np.bool_)
    src, dst = table.src_rank.astype(np.int64), table.dst_rank.astype(np.int64)
    crosses: BoolArray = topology.nodes_of(src) != topology.nodes_of(dst)
    return crosses


def _most_peers(src: IntArray, dst: IntArray, chosen: BoolArray) -> int:
    pairs = np.unique(np.stack([src[chosen], dst[chosen]], axis=1), axis=0)
    return int(max((np.bincount(pairs[:, side]).max(initial=0) for side in (0, 1)), default=0)) if len(pairs) else 0


def _largest(table: CopyTable, chosen: BoolArray) -> int:
    dst = table.dst_rank.astype(np.int64)
    return int(_sum(dst, table.moved_bytes * chosen, int(dst.max(initial=0)) + 1).max(initial=0))


def _sum(index: IntArray, values: IntArray, size: int) -> IntArray:
    found = np.zeros(size, np.int64)
    np.add.at(found, index, values)
    return found


def _held(plan: Plan, rank: int, *, source: bool) -> int:
    layout = plan.source if source else plan.destination
    return layout.held_bytes(rank) if rank in layout.ranks else 0
