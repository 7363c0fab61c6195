"""Topology: which GPU and which node every rank runs on, so that plans prefer near sources."""

import enum
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from reshard.errors import LayoutError


class Tier(enum.IntEnum):
    """Distance between two ranks; smaller is nearer."""

    RANK = 0
    GPU = 1
    NODE = 2
    CLUSTER = 3


class Topology:
    """Places of ranks: ``nodes[rank]`` and ``gpus[rank]`` are numbers, GPUs numbered over the whole cluster.

    With ``fan_out`` (the default) a planner lets each byte cross into a node once and passes it on inside the node.
    """

    __slots__ = ("_gpus", "_nodes", "fan_out")

    def __init__(
        self, nodes: Mapping[int, int], *, gpus: Mapping[int, int] | None = None, fan_out: bool = True
    ) -> None:
        if any(rank < 0 for rank in nodes):
            raise LayoutError(f"topology names negative ranks: {sorted(rank for rank in nodes if rank < 0)}")
        if gpus is not None and set(gpus) != set(nodes):
            raise LayoutError(f"topology places GPUs of ranks {sorted(set(gpus) ^ set(nodes))} on only one of its maps")
        self.fan_out = fan_out
        size = max(nodes, default=-1) + 1
        self._nodes = np.full(size, -1, np.int64)
        self._gpus = np.full(size, -1, np.int64)
        for rank, node in nodes.items():
            self._nodes[rank] = node
            self._gpus[rank] = rank if gpus is None else gpus[rank]
        self._check_gpus_in_one_node()

    def _check_gpus_in_one_node(self) -> None:
        node_of_gpu: dict[int, int] = {}
        for rank in np.flatnonzero(self._nodes >= 0).tolist():
            gpu, node = int(self._gpus[rank]), int(self._nodes[rank])
            if node_of_gpu.setdefault(gpu, node) != node:
                raise LayoutError(
                    f"GPU {gpu} of rank {rank} is on nodes {node_of_gpu[gpu]} and {node}: number GPUs over "
                    f"the whole cluster"
                )

    @classmethod
    def regular(cls, ranks: Iterable[int], *, ranks_per_node: int = 8, fan_out: bool = True) -> "Topology":
        """Rank ``r`` on node ``r // ranks_per_node``, one rank per GPU."""
        if ranks_per_node < 1:
            raise LayoutError(f"ranks_per_node is {ranks_per_node}: expected at least 1")
        return cls({rank: rank // ranks_per_node for rank in ranks}, fan_out=fan_out)

    @classmethod
    def single_node(cls, ranks: Iterable[int]) -> "Topology":
        """Every rank on one node, one rank per GPU."""
        return cls(dict.fromkeys(ranks, 0))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that has a place, ascending."""
        return tuple(np.flatnonzero(self._nodes >= 0).tolist())

    @property
    def num_nodes(self) -> int:
        """Number of distinct nodes."""
        return len(set(self._nodes[self._nodes >= 0].tolist()))

    def node(self, rank: int) -> int:
        """Node of a rank."""
        return int(self.nodes_of(np.array([rank]))[0])

    def tier(self, first: int, second: int) -> Tier:
        """How far apart two ranks are."""
        if first == second:
            return Tier.RANK
        pair = np.array([first, second])
        if len(set(self.gpus_of(pair).tolist())) == 1:
            return Tier.GPU
        return Tier.NODE if len(set(self.nodes_of(pair).tolist())) == 1 else Tier.CLUSTER

    def nodes_of(self, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Node per rank; LayoutError names ranks without a place."""
        self._check_known(ranks)
        return self._nodes[ranks]

    def gpus_of(self, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """GPU per rank; LayoutError names ranks without a place."""
        self._check_known(ranks)
        return self._gpus[ranks]

    def _check_known(self, ranks: npt.NDArray[np.int64]) -> None:
        if ranks.size == 0:
            return
        inside = ranks < len(self._nodes)
        if not inside.all() or (self._nodes[ranks] < 0).any():
            unknown = sorted({rank for rank in ranks.tolist() if rank >= len(self._nodes) or self._nodes[rank] < 0})
            raise LayoutError(f"topology has no place for ranks {unknown[:16]}: give every rank of both layouts a node")

    def to_json(self) -> dict[str, object]:
        """Plain values that ``from_json`` reads back."""
        known = list(self.ranks)
        return {
            "ranks": known,
            "nodes": self._nodes[known].tolist(),
            "gpus": self._gpus[known].tolist(),
            "fan_out": self.fan_out,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, list[int]]) -> "Topology":
        """Inverse of ``to_json``."""
        ranks = fields["ranks"]
        return cls(
            dict(zip(ranks, fields["nodes"], strict=True)),
            gpus=dict(zip(ranks, fields["gpus"], strict=True)),
            fan_out=bool(fields["fan_out"]),
        )
