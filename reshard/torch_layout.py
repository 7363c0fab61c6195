"""Layouts of live tensors: plain ones and DTensors (FSDP2, tensor parallel, both on one dim, replicas)."""

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from reshard.dtype import DType
from reshard.errors import LayoutError
from reshard.layout import Address, Holding, Layout, TensorSpec
from reshard.layout_merge import layout_from_bytes, layout_to_bytes, merge_layouts
from reshard.plan import Plan
from reshard.plan_digest import DigestReport, check_reports, digest_report
from reshard.region import Region

Runs = tuple[tuple[int, int], ...]


def dtype_of(dtype: torch.dtype) -> DType:
    """The DType of a torch dtype."""
    return DType.parse(str(dtype))


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of a DType."""
    found: torch.dtype = torch.__dict__[dtype.value]
    return found


def layout_from_tensors(
    named: Mapping[str, torch.Tensor],
    *,
    rank: int | None = None,
    memory: str | None = None,
    ties: Mapping[str, str] | None = None,
) -> Layout:
    """What one rank holds: each tensor whole, each DTensor as its placements say. Reads no element, moves nothing.

    ``named`` maps canonical names (global layer numbers under pipeline parallelism) to this rank's live parameters and
    buffers. ``rank`` is this process's global rank, by default that of ``torch.distributed``, or 0 without it.
    Tensors that share storage, offset, shape and strides are one tensor under the name that comes first; the others
    become its ties. ``ties`` adds ties between equal tensors in different storages (name -> the name it follows):
    both then are replicas of one.

    The Layout refers to the tensors by name and owns nothing. Merge the parts of all ranks with ``Layout.merge`` or
    ``gather_layout``. Raises LayoutError on a tensor without elements, on a DTensor that is a partial sum, and on a
    local shard whose shape is not what its placements imply.
    """
    rank = _own_rank() if rank is None else rank
    declared = dict(ties or {})
    _check_ties(declared, named)
    found: dict[object, str] = {}
    all_ties: dict[str, str] = {}
    specs: dict[str, TensorSpec] = {}
    holdings: list[Holding] = []
    for name, tensor in named.items():
        canonical = declared.get(name, name)
        first = found.setdefault(_identity(tensor), name)
        if canonical != name:
            all_ties[name] = canonical
        if first != name:
            if canonical == name:
                all_ties[name] = all_ties.get(first, first)
            continue
        spec = TensorSpec(canonical, tuple(tensor.shape), dtype_of(tensor.dtype))
        _check_same(specs.setdefault(canonical, spec), spec, name)
        holdings += _holdings_of(name, canonical, tensor, rank)
    return Layout.from_holdings(specs.values(), holdings, ranks=[rank], memory=memory, ties=all_ties)


def gather_layout(part: Layout, group: dist.ProcessGroup | None = None) -> Layout:
    """The merged Layout of all ranks of a process group (default: the world), equal on each of them. Collective."""
    return merge_layouts(layout_from_bytes(data) for data in gather_bytes(layout_to_bytes(part), group))


def check_plan_across(plan: Plan, rank: int, group: dist.ProcessGroup | None = None) -> None:
    """Raise PlanError on every rank of the group unless all planned from the same inputs. Collective.

    The message names the ranks that differ and the first difference; see ``reshard.plan_digest.check_reports``.
    """
    own = digest_report(plan, rank).to_bytes()
    check_reports([DigestReport.from_bytes(data) for data in gather_bytes(own, group)])


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Every rank's bytes, in the group's rank order. Collective; nothing is unpickled."""
    is_nccl = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    size = torch.tensor([own.numel()], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return [data[: int(size)].cpu().numpy().tobytes() for data, size in zip(received, sizes, strict=True)]


def _own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _check_ties(ties: Mapping[str, str], named: Mapping[str, torch.Tensor]) -> None:
    chained = sorted(name for name, target in ties.items() if target in ties or name == target)
    if chained:
        raise LayoutError(f"ties of {chained} don't end at one tensor: tie every name to the same first name")
    unknown = sorted(name for name in ties if name not in named)
    if unknown:
        raise LayoutError(f"ties name tensors that were not passed: {unknown}")


def _check_same(known: TensorSpec, new: TensorSpec, name: str) -> None:
    if known != new:
        raise LayoutError(f"{name!r} is tied to {known.name!r} but is {new.dtype.value}{list(new.shape)}, not {known}")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _identity(tensor: torch.Tensor) -> object:
    """Equal for two tensors that are the same elements of the same storage."""
    local = _local(tensor)
    if local.numel() == 0:
        return id(tensor)
    place = (local.untyped_storage()._cdata, local.storage_offset(), tuple(local.shape), local.stride(), local.dtype)
    return (place, tuple(tensor.shape), tensor.placements) if isinstance(tensor, DTensor) else place


def _holdings_of(name: str, canonical: str, tensor: torch.Tensor, rank: int) -> list[Holding]:
    if not isinstance(tensor, DTensor):
        return [_holding(canonical, (0,) * tensor.dim(), tuple(tensor.shape), _address(name, tensor), rank)]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    local = _local(tensor)
    per_dim = shard_runs(
        tuple(tensor.shape),
        tensor.placements,
        mesh_shape=tuple(tensor.device_mesh.shape),
        coordinate=coordinate,
        name=name,
    )
    expected = tuple(sum(stop - start for start, stop in runs) for runs in per_dim)
    if tuple(local.shape) != expected and (local.numel() or 0 not in expected):
        raise LayoutError(
            f"{name!r} on rank {rank}: placements {tensor.placements} of global shape {tuple(tensor.shape)} "
            f"imply a local shard "
            f"{expected}, but it is {tuple(local.shape)}; a DTensor made with from_local needs its global "
            f"shape= and stride="
        )
    base = _address(name, local)
    return [_holding(canonical, start, stop, base.advance(steps), rank) for start, stop, steps in _local_boxes(per_dim)]


def _address(storage: str, local: torch.Tensor) -> Address:
    offset_bytes = int(local.storage_offset()) * local.element_size()
    return Address(storage, offset_bytes, tuple(local.stride()), dtype_of(local.dtype))


def _holding(name: str, start: tuple[int, ...], stop: tuple[int, ...], address: Address, rank: int) -> Holding:
    return Holding(rank, Region(name, start, stop), address)


def _local_boxes(per_dim: Sequence[Runs]) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Boxes of the local shard: global start, global stop, local start. An empty shard has none."""
    located = []
    for runs in per_dim:
        lengths = [stop - start for start, stop in runs]
        steps = itertools.accumulate(lengths[:-1], initial=0)
        located.append([(start, stop, step) for (start, stop), step in zip(runs, steps, strict=False)])
    return [
        (tuple(run[0] for run in box), tuple(run[1] for run in box), tuple(run[2] for run in box))
        for box in itertools.product(*located)
    ]


def shard_runs(
    shape: Sequence[int],
    placements: Sequence[Placement],
    *,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    name: str,
) -> list[Runs]:
    """Which indices of every dim the mesh member at ``coordinate`` holds, as ordered half-open runs.

    Placements apply from the first mesh axis to the last, as DTensor defines. ``Shard`` cuts what is left into chunks
    of ceil(n / size); ``_StridedShard`` first cuts it into ``split_factor`` chunks and takes its chunk of each, which
    is how FSDP2 on top of tensor parallelism gives ranks rows that are not in rank order.
    """
    runs: list[Runs] = [((0, size),) for size in shape]
    for placement, num_shards, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, Partial):
            raise LayoutError(f"{name!r} is a partial sum ({placement}): redistribute it to Replicate or Shard first")
        if isinstance(placement, _StridedShard):
            runs[placement.dim] = _strided_chunk(runs[placement.dim], int(placement.split_factor), num_shards, index)
        elif isinstance(placement, Shard):
            runs[placement.dim] = _chunk(runs[placement.dim], num_shards, index)
        else:
            raise LayoutError(f"{name!r} has placement {placement}, which has no layout: use Shard or Replicate")
    return runs


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def _chunk(runs: Runs, num_chunks: int, index: int) -> Runs:
    """Chunk ``index`` of the concatenated runs, cut as ``torch.chunk`` does, missing chunks being empty."""
    total = _length(runs)
    size = -(-total // num_chunks)
    return _take(runs, min(index * size, total), min((index + 1) * size, total))


def _strided_chunk(runs: Runs, split_factor: int, num_chunks: int, index: int) -> Runs:
    pieces = (_chunk(_chunk(runs, split_factor, part), num_chunks, index) for part in range(split_factor))
    joined: list[tuple[int, int]] = []
    for start, stop in itertools.chain.from_iterable(pieces):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _take(runs: Runs, low: int, high: int) -> Runs:
    """Positions ``low`` to ``high`` of the concatenated runs."""
    taken = []
    passed = 0
    for start, stop in runs:
        first, last = max(low - passed, 0), min(high - passed, stop - start)
        if first < last:
            taken.append((start + first, start + last))
        passed += stop - start
    return tuple(taken)
