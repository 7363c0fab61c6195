"""Layouts of real DTensors on four gloo processes, labelled by global index: addresses must lead to the right
elements.
"""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard import Layout, make_plan
from reshard.errors import LayoutError, PlanError
from reshard.plan_oracle import byte_offsets, check_plan, elements
from reshard.torch_layout import check_plan_across, gather_layout

WORLD = 4


def check_addresses(layout: Layout, tensors: dict[str, torch.Tensor], rank: int) -> dict[str, set[int]]:
    """Every held element must read back as its own global index; returns the indices held per tensor."""
    held: dict[str, set[int]] = {name: set() for name in layout.specs}
    for holding in layout.holdings(rank):
        tensor = tensors[holding.address.storage]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        flat = torch.empty(0, dtype=local.dtype).set_(local.detach().untyped_storage())
        at = torch.from_numpy(byte_offsets(holding.region, holding.address)) // local.element_size()
        index = elements(holding.region, layout.specs[holding.region.name].shape)
        assert flat[at].tolist() == index.tolist(), f"{holding} reads {flat[at].tolist()}"
        held[holding.region.name] |= set(index.tolist())
    return held


def labelled(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def label_module(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.copy_(labelled(*parameter.shape))


def fsdp_uneven(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2), nn.LayerNorm(2))
    label_module(model)
    fully_shard(model, mesh=mesh)
    tensors = dict(model.named_parameters())
    part = Layout.from_tensors(tensors)
    held = check_addresses(part, tensors, rank)
    rows = {0: (0, 2), 1: (2, 4), 2: (4, 6), 3: (6, 7)}[rank]
    assert held["0.weight"] == set(range(rows[0] * 3, rows[1] * 3))
    assert bool(held["1.weight"]) == (rank < 2), "two rows leave ranks 2 and 3 empty"
    layout = gather_layout(part)
    assert sum(h.region.numel for h in layout.holders("0.weight")) == 21
    engine = Layout.merge([Layout.from_tensors({n: torch.zeros(p.shape) for n, p in tensors.items()}, rank=0)])
    check_plan(make_plan(layout, engine))


def fsdp_on_tp(rank: int) -> None:
    """Rows 0..3 of a 2 x 2 mesh lie on ranks 0, 2, 1, 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 5, bias=False))
    label_module(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    tensors = dict(model.named_parameters())
    part = Layout.from_tensors(tensors)
    held = check_addresses(part, tensors, rank)
    assert held["0.weight"] == {2 * {0: 0, 1: 2, 2: 1, 3: 3}[rank], 2 * {0: 0, 1: 2, 2: 1, 3: 3}[rank] + 1}
    layout = gather_layout(part)
    full = {name: parameter.full_tensor().detach() for name, parameter in tensors.items()}
    for name, tensor in full.items():
        assert tensor.flatten().tolist() == list(range(tensor.numel())), name
    check_plan(make_plan(layout, Layout.from_tensors(full, rank=1)))


def uneven_strided(rank: int) -> None:
    """Five rows, TP 2 then FSDP 2: ceil chunks at both levels, some of one row."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(3, 6, bias=False), nn.Linear(6, 10, bias=False))
    label_module(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    tensors = dict(model.named_parameters())
    part = Layout.from_tensors(tensors)
    check_addresses(part, tensors, rank)
    layout = gather_layout(part)
    everywhere = {index for h in layout.holders("0.weight") for index in elements(h.region, (6, 3)).tolist()}
    assert everywhere == set(range(18))


def hsdp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(3, 5)
    label_module(model)
    fully_shard(model, mesh=mesh)
    tensors = dict(model.named_parameters())
    part = Layout.from_tensors(tensors)
    check_addresses(part, tensors, rank)
    layout = gather_layout(part)
    assert [h.rank for h in layout.holders("weight")] == [0, 1, 2, 3]
    holders = {h.rank: h.region for h in layout.holders("weight")}
    assert holders[0] == holders[2] and holders[1] == holders[3] and holders[0] != holders[1]
    digests: list[object] = [None] * WORLD
    dist.all_gather_object(digests, layout.digest)
    assert len(set(digests)) == 1


def mixed_and_partial(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    tensors = {
        "rows": distribute_tensor(labelled(5, 4), mesh, [Shard(0), Shard(0)]),
        "both": distribute_tensor(labelled(5, 3), mesh, [Shard(1), Shard(0)]),
        "copy": distribute_tensor(labelled(3), mesh, [Replicate(), Replicate()]),
        "plain": labelled(2, 2),
    }
    check_addresses(Layout.from_tensors(tensors), tensors, rank)
    submesh = mesh["b"]
    wrong = DTensor.from_local(torch.zeros(3 if submesh.get_local_rank() == 0 else 2, 2), submesh, [Shard(0)])
    part = Layout.from_tensors({"w": wrong})
    assert part.specs["w"].shape[0] == (6 if submesh.get_local_rank() == 0 else 4), "inferred from a local uneven shard"
    with pytest.raises(LayoutError, match=r"ranks disagree about global shape.*needs its global shape="):
        gather_layout(part)
    right = DTensor.from_local(
        torch.zeros(3 if submesh.get_local_rank() == 0 else 2, 2),
        submesh,
        [Shard(0)],
        shape=torch.Size((5, 2)),
        stride=(2, 1),
    )
    assert gather_layout(Layout.from_tensors({"w": right})).specs["w"].shape == (5, 2)
    odd = DTensor.from_local(torch.zeros(1, 2), submesh, [Shard(0)], shape=torch.Size((5, 2)), stride=(2, 1))
    with pytest.raises(LayoutError, match="imply a local shard"):
        Layout.from_tensors({"w": odd})


def digests_across_ranks(rank: int) -> None:
    """Each rank plans its own part; rank 2 then believes that its tensor lies elsewhere, and all ranks hear of it."""
    own = Layout.from_tensors({"w": torch.zeros(4, 2), "v": torch.zeros(3)})
    source = gather_layout(own)
    check_plan_across(make_plan(source, source, ranks=[rank]), rank)
    other = Layout.from_tensors({"w": torch.zeros(8, 2)[::2] if rank == 2 else torch.zeros(4, 2), "v": torch.zeros(3)})
    wrong = Layout.merge(
        [
            other,
            *(
                Layout.from_tensors({"w": torch.zeros(4, 2), "v": torch.zeros(3)}, rank=r)
                for r in range(4)
                if r != rank
            ),
        ]
    )
    with pytest.raises(
        PlanError, match=r"rank 2 planned from other inputs .* source layout: tensor 'w' lies elsewhere"
    ):
        check_plan_across(make_plan(wrong, source, ranks=[rank]), rank)


SCENARIOS = (fsdp_uneven, fsdp_on_tp, uneven_strided, hsdp, mixed_and_partial, digests_across_ranks)


def run_all(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scenario in SCENARIOS:
        try:
            scenario(rank)
        except Exception as error:
            raise AssertionError(f"{scenario.__name__} on rank {rank}") from error
        (Path(folder) / f"{scenario.__name__}.{rank}").touch()
        dist.barrier()
    dist.destroy_process_group()


def test_dtensor_layouts_on_four_processes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_all, args=(port, str(tmp_path)), nprocs=WORLD)
    assert len(list(tmp_path.iterdir())) == len(SCENARIOS) * WORLD, "every scenario ran on every rank"
