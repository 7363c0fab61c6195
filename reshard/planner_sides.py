"""Both sides of a class of tensors (those with one source pattern and one destination pattern), ready for matching."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from reshard.boxes import Atoms, Pieces, join, ranges, refine
from reshard.layout import Layout
from reshard.pattern import IntArray, Pattern
from reshard.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Node and GPU of every rank below ``num_ranks``, GPUs numbered so that those of one node are adjacent.

    Nodes are numbered from 0; ``node_names`` are the topology's own numbers of them. ``replica`` numbers the ranks that
    hold the same regions of the source, each from 0: in a mesh, ranks with one number are one data-parallel replica.
    """

    num_ranks: int
    node: IntArray
    gpu: IntArray
    replica: IntArray
    shares_gpus: bool
    fan_out: bool
    node_names: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, topology: Topology | None, ranks: IntArray, source: Layout) -> "Places":
        """Places of the ranks that take part; without a topology all are on one node, one per GPU."""
        num = int(ranks.max(initial=-1)) + 1
        replica = replica_numbers(source, num)
        node, gpu = np.zeros(num, np.int64), np.arange(num, dtype=np.int64)
        if topology is None:
            return cls(num, node, gpu, replica, shares_gpus=False, fan_out=False)
        names, node[ranks] = np.unique(topology.nodes_of(ranks), return_inverse=True)
        gpu[ranks] = topology.gpus_of(ranks)
        _, dense_gpu = np.unique(node * (gpu.max(initial=0) + 1) + gpu, return_inverse=True)
        shares = len(np.unique(dense_gpu[ranks])) < len(ranks)
        gpu = dense_gpu.astype(np.int64)
        return cls(num, node, gpu, replica, shares, topology.fan_out, tuple(names.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Holdings grouped by atom: ``holding[ptr[a]:ptr[a + 1]]`` hold atom ``a``, by node, GPU, rank and row of the
    pattern.

    ``by_node`` and ``by_gpu`` are sort keys (atom-major) along ``holding``, for range searches. ``by_rank`` is sorted
    apart, with ``rank_holding`` beside it, and so is ``by_replica``, with the places in ``holding`` in ``replica_at``.
    """

    pattern: Pattern
    atoms: Atoms
    ptr: IntArray
    holding: IntArray
    by_node: IntArray
    by_gpu: IntArray
    by_rank: IntArray
    rank_holding: IntArray
    by_replica: IntArray
    replica_at: IntArray

    @classmethod
    def of(cls, pattern: Pattern, places: Places) -> "Side":
        """The side of one pattern."""
        atoms = refined_boxes(pattern)
        rows_of_box = np.argsort(pattern.box_of, kind="stable")
        box_ptr = np.searchsorted(pattern.box_of[rows_of_box], np.arange(len(pattern.boxes_start) + 1))
        counts = box_ptr[atoms.members + 1] - box_ptr[atoms.members]
        holding = rows_of_box[ranges(box_ptr[atoms.members], counts)]
        atom = np.repeat(np.repeat(np.arange(atoms.num), np.diff(atoms.ptr)), counts)
        rank = pattern.ranks[holding]
        order = np.lexsort((holding, rank, places.gpu[rank], atom))
        holding, atom, rank = holding[order], atom[order], rank[order]
        size = places.num_ranks + 1
        by_rank = atom * size + rank
        sorted_by_rank = np.argsort(by_rank, kind="stable")
        by_replica = atom * size + places.replica[rank]
        sorted_by_replica = np.argsort(by_replica, kind="stable")
        return cls(
            pattern=pattern,
            atoms=atoms,
            ptr=np.searchsorted(atom, np.arange(atoms.num + 1)).astype(np.int64),
            holding=holding,
            by_node=atom * size + places.node[rank],
            by_gpu=atom * size + places.gpu[rank],
            by_rank=by_rank[sorted_by_rank],
            rank_holding=holding[sorted_by_rank],
            by_replica=by_replica[sorted_by_replica],
            replica_at=sorted_by_replica,
        )


class GeometryCache:
    """Refined boxes and their intersections, kept by content: layers and experts repeat the same few."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[bytes, bytes], Pieces] = {}

    def pieces(self, source: Side, destination: Side) -> Pieces:
        """Intersections of the source's atoms with the destination's."""
        key = (source.pattern.boxes_key, destination.pattern.boxes_key)
        if key not in self._pieces:
            a, b = source.atoms, destination.atoms
            src, dst, start, stop = join(a.start, a.stop, b.start, b.stop)
            self._pieces[key] = Pieces(start, stop, src, dst)
        return self._pieces[key]


def refined_boxes(pattern: Pattern) -> Atoms:
    """Disjoint atoms of the pattern's boxes."""
    return _refined(pattern.boxes_start.tobytes(), pattern.boxes_stop.tobytes(), len(pattern.boxes_start), pattern.ndim)


@lru_cache(maxsize=1024)
def _refined(start: bytes, stop: bytes, num: int, ndim: int) -> Atoms:
    shape = (num, ndim)
    return refine(np.frombuffer(start, np.int64).reshape(shape), np.frombuffer(stop, np.int64).reshape(shape))


def replica_numbers(source: Layout, num_ranks: int) -> IntArray:
    """Number of every rank among those that hold the same boxes of the same tensors, in order of ranks."""
    signature = np.zeros(num_ranks, np.uint64)
    for index, pattern in enumerate(source.patterns):
        salt = np.uint64(index + 1) << np.uint64(32)
        np.add.at(signature, pattern.ranks, _mixed(salt + pattern.box_of.astype(np.uint64)))
    order = np.argsort(signature, kind="stable")
    fresh = np.ones(num_ranks, np.bool_)
    fresh[1:] = np.diff(signature[order]) != 0
    number = np.empty(num_ranks, np.int64)
    at = np.arange(num_ranks)
    number[order] = at - np.maximum.accumulate(np.where(fresh, at, 0))
    return number


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Well-spread hashes (the finaliser of SplitMix64), wrapping around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
