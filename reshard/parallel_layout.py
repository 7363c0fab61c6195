"""Layouts from arithmetic alone: a model spec, a mesh and rules. No device, no process, no weights.

Note: styles
    ``plain``: every checkpoint tensor is a parameter of its own; a rank holds a dense shard of it (DTensor).
    ``megatron``: ``linear_qkv`` holds, per group of key/value heads, its queries, its key, its value, and tensor
    parallelism cuts those rows evenly, through a head if need be; ``linear_fc1`` holds a rank's gate rows, then its up
    rows; the vocabulary is padded to a multiple of 128 times the tensor parallel size.
    ``vllm``: ``qkv_proj`` holds a rank's queries, keys and values, key/value heads being replicated where there are
    fewer than ranks; ``gate_up_proj`` likewise; ``fused_qkv_a_proj`` holds both down-projections of latent attention,
    whole on every rank; routed experts are stacked in ``w13_weight`` and ``w2_weight``, and expert parallel ranks may
    have unlike numbers of them; the vocabulary is padded to a multiple of 64; layers that are left over when stages
    are dealt out go to the last stages but one. Where vLLM's own data parallelism spans engines, experts are cut or
    dealt out over all their ranks: say so with ``expert_mesh``.

Note: FSDP
    FSDP2 cuts every *parameter* of a tensor parallel rank once more along its dim 0, in ceil chunks, of which the last
    may be short or empty. So ranks in order do not hold rows in order, chunks of a fused parameter go through queries,
    keys and values, chunks of a padded vocabulary may be padding alone, and chunks of stacked experts are whole
    experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from reshard.boxes import ranges
from reshard.errors import LayoutError
from reshard.layout import Entry, Layout
from reshard.mesh import Mesh
from reshard.parallel_cuts import Box, Cutter, ExpertPlace, indivisible
from reshard.pattern import IntArray, Pattern, make_pattern
from reshard.spec import ModelSpec, ModelTensor

Style = Literal["plain", "megatron", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the mesh's axes are used. Axes ``pp``, ``tp`` and ``ep`` mean what they say; all others hold replicas.

    ``fsdp`` names an axis along which every parameter is cut once more (note "FSDP"); routed experts are cut along it
    only where their own mesh has it. ``stages`` are layers per stage in model order, by default as even as can be,
    early stages first (``vllm``: as vLLM does); with ``virtual`` > 1 stage ``s`` runs chunks ``s, s + pp, ...`` and
    ``stages`` has ``pp * virtual`` entries. ``whole_shared_experts``: shared experts are not cut but lie whole on every
    rank, as in vLLM with sequence parallel experts. ``memory`` labels the address space.
    """

    style: Style = "plain"
    fsdp: str | None = None
    stages: Sequence[int] | None = None
    virtual: int = 1
    whole_shared_experts: bool = False
    memory: str | None = None


def layout_from_parallel(
    model: ModelSpec, mesh: Mesh, *, rules: Rules | None = None, expert_mesh: Mesh | None = None
) -> Layout:
    """The Layout of a model on a mesh.

    ``expert_mesh``, over the same ranks and stages, places routed experts: its axis ``ep`` deals out whole experts
    and its ``tp`` cuts each. Without it, ``mesh`` places them (with its own ``ep``, if any). Raises LayoutError
    naming tensor, dim, size and axis, and sizes that would do, where a size does not divide.
    """
    rules = Rules() if rules is None else rules
    if rules.fsdp is not None and rules.fsdp not in mesh.axes:
        raise LayoutError(f"fsdp={rules.fsdp!r} is not an axis of mesh {mesh}")
    experts = mesh if expert_mesh is None else expert_mesh
    _check_same_ranks(mesh, experts)
    builder = _Builder(model, rules, _Grid(mesh, rules), _Grid(experts, rules), model.num_experts)
    return builder.build()


def _check_same_ranks(mesh: Mesh, experts: Mesh) -> None:
    missing, extra = sorted(set(mesh.ranks) - set(experts.ranks)), sorted(set(experts.ranks) - set(mesh.ranks))
    if missing or extra:
        raise LayoutError(
            f"expert mesh {experts} and mesh {mesh} have different ranks: left over are {missing or extra}, which only "
            f"{'the mesh' if missing else 'the expert mesh'} has"
        )
    if experts.axis_size("pp") != mesh.axis_size("pp"):
        raise LayoutError(f"expert mesh {experts} and mesh {mesh} differ in pp")
    moved = [rank for rank in mesh.ranks if mesh.index(rank, "pp") != experts.index(rank, "pp")]
    if moved:
        raise LayoutError(f"expert mesh {experts} puts ranks {moved[:8]} on other stages than mesh {mesh} does")


def stage_of_layers(num_layers: int, num_stages: int, rules: Rules) -> list[int]:
    """Stage of every layer; LayoutError when ``rules.stages`` does not add up."""
    chunks = num_stages * rules.virtual
    if rules.stages is not None:
        sizes = list(rules.stages)
    else:
        base, left_over = divmod(num_layers, chunks)
        first = chunks - 1 - left_over if rules.style == "vllm" and left_over else 0
        sizes = [base + (first <= chunk < first + left_over) for chunk in range(chunks)]
    if len(sizes) != chunks or sum(sizes) != num_layers:
        raise LayoutError(
            f"stages={sizes} describes {len(sizes)} chunks of {sum(sizes)} layers: expected pp * virtual = {chunks} "
            f"chunks of {num_layers} layers"
        )
    return [chunk % num_stages for chunk, size in enumerate(sizes) for _ in range(size)]


class _Grid:
    """Indices of every rank of a mesh along the axes that matter."""

    def __init__(self, mesh: Mesh, rules: Rules) -> None:
        self.mesh = mesh
        coordinates = dict(zip(mesh.axes, np.indices(mesh.shape).reshape(len(mesh.axes), -1), strict=True))
        zeros = np.zeros(mesh.size, np.int64)
        self.ranks: IntArray = np.array(mesh.ranks, np.int64)
        self.pp = coordinates.get("pp", zeros)
        self.ep = coordinates.get("ep", zeros)
        self.num_tp, self.num_pp, self.num_ep = (mesh.axis_size(axis) for axis in ("tp", "pp", "ep"))
        self.num_fsdp = 1 if rules.fsdp is None else mesh.axis_size(rules.fsdp)
        fsdp = zeros if rules.fsdp is None else coordinates.get(rules.fsdp, zeros)
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
        style, whole = self.rules.style, self.rules.whole_shared_experts
        cutters = {
            grid: Cutter(self.model, style, grid.num_tp, whole_shared_experts=whole)
            for grid in (self.dense, self.experts)
        }
        patterns: dict[tuple[object, ...], Pattern] = {}
        entries = []
        for tensor in self.model.tensors:
            grid = self.dense if tensor.expert is None else self.experts
            owners = self._stages(tensor, stages)
            place = self._expert_place(tensor, grid)
            stacked = place.local if style == "vllm" else 0
            kind = (tensor.spec.shape, tensor.spec.dtype, tensor.cut, tensor.head_dim, tensor.is_shared_expert)
            key = (*kind, tensor.fused, owners, place.part, stacked, id(grid))
            if key not in patterns:
                chosen = np.isin(grid.pp, owners) & ((grid.ep == place.part) if tensor.expert is not None else True)
                patterns[key] = _pattern(tensor, grid, np.flatnonzero(chosen), cutters[grid], place)
            entries.append(Entry(tensor.spec, patterns[key], (cutters[grid].storage(tensor, place),)))
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

    def _expert_place(self, tensor: ModelTensor, grid: _Grid) -> ExpertPlace:
        """Expert parallel rank of a routed expert, and its number there."""
        if tensor.expert is None:
            return ExpertPlace()
        num = self.num_experts
        if num % grid.num_ep and self.rules.style != "vllm":
            raise indivisible(tensor.spec.name, f"the number of experts per layer, {num},", "ep", grid.num_ep, num)
        return ExpertPlace.of(tensor.expert, num_experts=num, num_parts=grid.num_ep)


def _pattern(tensor: ModelTensor, grid: _Grid, members: IntArray, cutter: Cutter, place: ExpertPlace) -> Pattern:
    """Holdings of the ranks at ``members``, each with the boxes of its shard."""
    boxes: list[list[Box]] = []
    for tp_idx in range(grid.num_tp):
        own = cutter.shard(tensor, tp_idx, place)
        boxes += [own.chunk(index, grid.num_fsdp) for index in range(grid.num_fsdp)]
    flat = [box for own_boxes in boxes for box in own_boxes]
    counts = np.array(list(map(len, boxes)), np.int64)
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
