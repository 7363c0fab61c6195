"""Layouts from arithmetic alone: a model spec, a mesh and rules. No device, no process, no weights.

Note: styles
    ``plain``: every checkpoint tensor is its own storage; a rank holds a dense shard of it (DTensor, FSDP2 and tensor
    parallelism on top). ``megatron``: ``linear_qkv`` holds, per group of key/value heads, its queries, its key, its
    value, and tensor parallelism cuts those rows evenly, through a head if need be; ``linear_fc1`` holds a rank's
    gate rows, then its up rows; the vocabulary is padded to a multiple of 128 times the tensor parallel size.
    ``vllm``: ``qkv_proj`` holds a rank's queries, keys and values, key/value heads being replicated where there are
    fewer than ranks; ``gate_up_proj`` likewise; experts are stacked in ``w13_weight`` and ``w2_weight``; the
    vocabulary is padded to a multiple of 64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from reshard.boxes import ranges
from reshard.errors import LayoutError
from reshard.layout import Entry, Layout
from reshard.mesh import Mesh
from reshard.parallel_cuts import Box, Cutter
from reshard.pattern import IntArray, Pattern, make_pattern
from reshard.spec import ModelSpec, ModelTensor

Style = Literal["plain", "megatron", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the mesh's axes are used. Axes ``pp``, ``tp`` and ``ep`` mean what they say; all others hold replicas.

    ``fsdp`` names an axis along which every shard is cut once more, in ceil chunks of dim 0 (plain style only).
    ``stages`` are layers per stage in model order, by default as even as can be, early stages first; with ``virtual``
    > 1 stage ``s`` runs chunks ``s, s + pp, ...`` and ``stages`` has ``pp * virtual`` entries. ``memory`` labels the
    address space.
    """

    style: Style = "plain"
    fsdp: str | None = None
    stages: Sequence[int] | None = None
    virtual: int = 1
    memory: str | None = None


def layout_from_parallel(
    model: ModelSpec, mesh: Mesh, *, rules: Rules | None = None, expert_mesh: Mesh | None = None
) -> Layout:
    """The Layout of a model on a mesh.

    ``expert_mesh``, over the same ranks and stages, places routed experts: its axis ``ep`` deals out whole experts
    and its ``tp`` cuts each. Without it, ``mesh`` places them (with its own ``ep``, if any). Raises LayoutError
    naming tensor, dim, size and axis where a size does not divide.
    """
    rules = Rules() if rules is None else rules
    experts = mesh if expert_mesh is None else expert_mesh
    if sorted(experts.ranks) != sorted(mesh.ranks):
        raise LayoutError(f"expert mesh {experts} and mesh {mesh} have different ranks")
    if experts.axis_size("pp") != mesh.axis_size("pp"):
        raise LayoutError(f"expert mesh {experts} and mesh {mesh} differ in pp")
    if rules.fsdp is not None and rules.style != "plain":
        raise LayoutError(f"fsdp={rules.fsdp!r} needs style='plain', got {rules.style!r}")
    builder = _Builder(model, rules, _Grid(mesh, rules), _Grid(experts, rules), model.num_experts)
    return builder.build()


def stage_of_layers(num_layers: int, num_stages: int, rules: Rules) -> list[int]:
    """Stage of every layer; LayoutError when ``rules.stages`` does not add up."""
    chunks = num_stages * rules.virtual
    if rules.stages is None:
        sizes = [num_layers // chunks + (chunk < num_layers % chunks) for chunk in range(chunks)]
    else:
        sizes = list(rules.stages)
    if len(sizes) != chunks or sum(sizes) != num_layers:
        raise LayoutError(
            f"stages={sizes} describes {len(sizes)} chunks of {sum(sizes)} layers: expected pp * virtual = "
            f"{chunks} chunks of "
            f"{num_layers} layers"
        )
    return [chunk % num_stages for chunk, size in enumerate(sizes) for _ in range(size)]


class _Grid:
    """Indices of every rank of a mesh along the axes that matter."""

    def __init__(self, mesh: Mesh, rules: Rules) -> None:
        self.mesh = mesh
        if rules.fsdp is not None and rules.fsdp not in mesh.axes:
            raise LayoutError(f"fsdp={rules.fsdp!r} is not an axis of mesh {mesh}")
        coordinates = dict(zip(mesh.axes, np.indices(mesh.shape).reshape(len(mesh.axes), -1), strict=True))
        zeros = np.zeros(mesh.size, np.int64)
        self.ranks: IntArray = np.array(mesh.ranks, np.int64)
        self.pp = coordinates.get("pp", zeros)
        self.ep = coordinates.get("ep", zeros)
        self.num_tp, self.num_pp, self.num_ep = (mesh.axis_size(axis) for axis in ("tp", "pp", "ep"))
        self.num_fsdp = 1 if rules.fsdp is None else mesh.axis_size(rules.fsdp)
        fsdp = zeros if rules.fsdp is None else coordinates[rules.fsdp]
        self.shard = coordinates.get("tp", zeros) * self.num_fsdp + fsdp


@dataclass(slots=True)
class _Builder:
    model: ModelSpec
    rules: Rules
    dense: _Grid
    experts: _Grid
    num_experts: int

    def build(self) -> Layout:
        stages = stage_of_layers(self.model.num_layers, self.dense.num_pp, self.rules)
        cutters = {grid: Cutter(self.model, self.rules.style, grid.num_tp) for grid in (self.dense, self.experts)}
        patterns: dict[tuple[object, ...], Pattern] = {}
        entries = []
        for tensor in self.model.tensors:
            grid = self.dense if tensor.expert is None else self.experts
            owners = self._stages(tensor, stages)
            part, local = self._expert_place(tensor, grid)
            stacked = local if self.rules.style == "vllm" else 0
            key = (tensor.spec.shape, tensor.cut, tensor.head_dim, tensor.spec.dtype, owners, part, stacked, id(grid))
            if key not in patterns:
                chosen = np.isin(grid.pp, owners) & ((grid.ep == part) if tensor.expert is not None else True)
                patterns[key] = _pattern(tensor, grid, np.flatnonzero(chosen), cutters[grid], stacked)
            storage = cutters[grid].storage(tensor, local)
            entries.append(Entry(tensor.spec, patterns[key], (storage,)))
        return Layout(entries, ranks=self.dense.mesh.ranks, memory=self.rules.memory, ties=self.model.ties)

    def _stages(self, tensor: ModelTensor, stages: Sequence[int]) -> tuple[int, ...]:
        """Stages that hold a tensor; the last one too where the embedding is also the head."""
        if tensor.layer is not None:
            return (stages[tensor.layer],)
        last = self.dense.num_pp - 1
        if tensor.is_output:
            return (last,)
        is_head = tensor.spec.name in self.model.ties.values()
        return (0, last) if is_head and last else (0,)

    def _expert_place(self, tensor: ModelTensor, grid: _Grid) -> tuple[int, int]:
        """Expert parallel rank of a routed expert, and its number there."""
        if tensor.expert is None:
            return 0, 0
        num = self.num_experts
        if num % grid.num_ep:
            good = [size for size in range(1, num + 1) if num % size == 0]
            raise LayoutError(
                f"{num} experts per layer ({tensor.spec.name}) don't divide among ep={grid.num_ep}: use one of {good}"
            )
        return divmod(tensor.expert, num // grid.num_ep)


def _pattern(tensor: ModelTensor, grid: _Grid, members: IntArray, cutter: Cutter, local: int) -> Pattern:
    """Holdings of the ranks at ``members``, each with the boxes of its shard."""
    boxes: list[list[Box]] = []
    for tp_idx in range(grid.num_tp):
        own = cutter.boxes(tensor, tp_idx, local)
        boxes += [own] if grid.num_fsdp == 1 else _chunks(own, grid.num_fsdp)
    flat = [box for shard in boxes for box in shard]
    counts = np.array([len(shard) for shard in boxes], np.int64)
    firsts = np.cumsum(counts) - counts
    shard = grid.shard[members]
    row = ranges(firsts[shard], counts[shard])
    num, ndim = len(flat), len(tensor.spec.shape)
    return make_pattern(
        tensor.spec.shape,
        ranks=np.repeat(grid.ranks[members], counts[shard]),
        starts=np.array([box.start for box in flat], np.int64).reshape(num, ndim)[row],
        stops=np.array([box.stop for box in flat], np.int64).reshape(num, ndim)[row],
        slots=np.zeros(len(row), np.int64),
        offsets=np.array([box.offset for box in flat], np.int64)[row] * tensor.spec.dtype.itemsize,
        strides=np.array([box.strides for box in flat], np.int64).reshape(num, ndim)[row],
        dtypes=np.full(len(row), tensor.spec.dtype.code, np.int64),
    )


def _chunks(boxes: Sequence[Box], num_chunks: int) -> list[list[Box]]:
    """A dense shard cut along dim 0 in ceil chunks, each dense in its own storage; a scalar goes to the first."""
    (box,) = boxes
    if not box.start:
        return [[box], *([] for _ in range(num_chunks - 1))]
    low, high = box.start[0], box.stop[0]
    size = max(math.ceil((high - low) / num_chunks), 1)
    cuts = [(min(low + size * k, high), min(low + size * (k + 1), high)) for k in range(num_chunks)]
    return [[Box((a, *box.start[1:]), (b, *box.stop[1:]), 0, box.strides)] if a < b else [] for a, b in cuts]
