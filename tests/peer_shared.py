"""A trainer and an engine in two processes on one physical memory: scenarios for the host and for a GPU."""

import gc
from collections.abc import Callable

import pytest
import torch

from reshard import Address, DType, Holding, Layout, PeerTransport, Region, Resharder, TensorSpec, make_plan
from reshard.arena import Arena, Borrowed, Channel, Listener, RegionShare, borrow_tensors, lend_tensors
from reshard.errors import PeerTimeout, PlanError, StateError, TransportError
from reshard.resharder import State

SHAPES = {"embed": (640, 64), "layers.0.w": (64, 96), "layers.1.w": (96, 33), "layers.2.w": (64, 96), "norm": (64,)}
PATIENCE_S = 100.0
NewArena = Callable[[], Arena]


def trainer_tensors(arena: Arena) -> dict[str, torch.Tensor]:
    """The trainer's bf16 weights, several in one region."""
    numels = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    region = arena.allocate("weights", 2 * sum(numels.values()) + 64)
    found, offset = {}, 0
    for name, shape in SHAPES.items():
        found[name] = region.tensor(torch.bfloat16, shape, offset_bytes=offset)
        offset += 2 * numels[name]
    return found


def labels(name: str, step: int) -> torch.Tensor:
    numel = torch.Size(SHAPES[name]).numel()
    return (torch.arange(numel) % 251 + 7 * step).bfloat16().reshape(SHAPES[name])


def meet(
    rank: int, folder: str, arena: Arena, tensors: dict[str, torch.Tensor] | None
) -> tuple[Channel, list[RegionShare] | Borrowed]:
    path = f"{folder}/lend.sock"
    if rank == 0:
        with Listener(path) as listener:
            channel = listener.accept(timeout_s=PATIENCE_S)
        return channel, lend_tensors(channel, tensors or {}, arena=arena, timeout_s=PATIENCE_S)
    channel = Channel.connect(path, timeout_s=PATIENCE_S)
    return channel, borrow_tensors(channel, arena=arena, timeout_s=PATIENCE_S)


def exchange_layouts(channel: Channel, tensors: dict[str, torch.Tensor], rank: int) -> tuple[Layout, Layout]:
    """The Layouts of the trainer, rank 0, and of the engine, rank 1, on both ranks."""
    places: dict[str, object] = {n: [t.storage_offset(), str(t.dtype)] for n, t in tensors.items()}
    channel.send("layout", places, timeout_s=PATIENCE_S)
    theirs, _ = channel.receive("layout", timeout_s=PATIENCE_S)
    found = sorted([(rank, places), (1 - rank, theirs)], key=lambda side: side[0])
    return layout_of(*found[0]), layout_of(*found[1])


def layout_of(rank: int, places: dict[str, object]) -> Layout:
    specs, holdings = [], []
    for name, (offset, kind) in places.items():
        shape, dtype = SHAPES[name], DType.parse(kind)
        strides = tuple(torch.empty(shape, device="meta").stride())
        specs.append(TensorSpec(name, shape, dtype))
        address = Address(name, offset * dtype.itemsize, strides, dtype)
        holdings.append(Holding(rank, Region(name, (0,) * len(shape), shape), address))
    return Layout.from_holdings(specs, holdings)


def zero_bytes(rank: int, folder: str, new_arena: NewArena) -> None:
    """Two steps: the engine reads what the trainer wrote, nothing moves, and training waits for generation's end."""
    arena = new_arena()
    tensors = trainer_tensors(arena) if rank == 0 else None
    channel, loan = meet(rank, folder, arena, tensors)
    borrowed = loan if isinstance(loan, Borrowed) else None
    mine = tensors if tensors is not None else borrowed.tensors
    plan = make_plan(*exchange_layouts(channel, mine, rank))
    imports = borrowed.regions if borrowed is not None else ()
    transport = PeerTransport(arena, folder, imports=imports, timeout_s=PATIENCE_S)
    sides = (mine, {}) if rank == 0 else ({}, mine)
    total = sum(t.numel() * 2 for t in mine.values())
    with Resharder(plan, *sides, rank=rank, transport=transport) as resharder:
        assert resharder.stats.num_launches == 0 and resharder.stats.received_bytes == 0
        assert resharder.stats.aliased_bytes == (total if rank == 1 else 0)
        for step in (1, 2):
            if rank == 0:
                for name, tensor in mine.items():
                    tensor.copy_(labels(name, step))
            resharder.run(deadline_s=PATIENCE_S)
            assert resharder.verify() == (total if rank == 1 else 0)
            if rank == 1:
                assert all(torch.equal(t.cpu(), labels(n, step)) for n, t in mine.items())
                resharder.require_complete()
            else:
                with pytest.raises(PeerTimeout, match=r"rank 1 to end its generation, .* call train\(\) there too"):
                    resharder.train(deadline_s=0.2)
                assert resharder.state is State.GENERATING
            channel.send("checked", {}, timeout_s=PATIENCE_S)
            channel.receive("checked", timeout_s=PATIENCE_S)
            resharder.train(deadline_s=PATIENCE_S)
            assert resharder.state is State.TRAINING
            if rank == 1:
                with pytest.raises(StateError, match=f"{total} bytes of the destination are the training weights"):
                    resharder.require_complete()
    del sides, mine
    finish(rank, arena, channel, loan)


def finish(rank: int, arena: Arena, channel: Channel, loan: list[RegionShare] | Borrowed) -> None:
    gc.collect()
    if isinstance(loan, Borrowed):
        loan.close()
        channel.send("closed", {}, timeout_s=PATIENCE_S)
    else:
        channel.receive("closed", timeout_s=PATIENCE_S)
        for share in loan:
            share.end()
        assert not any(region.num_shares for region in arena.regions())


def some_in_place(rank: int, folder: str, new_arena: NewArena) -> None:
    """The engine borrows two tensors and has two of its own, one of them fp32: only those move."""
    arena = new_arena()
    tensors = trainer_tensors(arena) if rank == 0 else None
    channel, loan = meet(rank, folder, arena, tensors)
    if rank == 0:
        mine = tensors
    else:
        own = arena.allocate("own", 1 << 20)
        mine = dict(loan.tensors)
        mine["norm"] = own.tensor(torch.float32, SHAPES["norm"])
        mine["layers.1.w"] = own.tensor(torch.bfloat16, SHAPES["layers.1.w"], offset_bytes=4096)
        loan.tensors.clear()
    plan = make_plan(*exchange_layouts(channel, mine, rank))
    imports = loan.regions if rank == 1 else ()
    transport = PeerTransport(arena, folder, imports=imports, timeout_s=PATIENCE_S)
    sides = (mine, {}) if rank == 0 else ({}, mine)
    with Resharder(plan, *sides, rank=rank, transport=transport) as resharder:
        for step in (1, 2):
            if rank == 0:
                for name, tensor in mine.items():
                    tensor.copy_(labels(name, step))
            stats = resharder.run(deadline_s=PATIENCE_S)
            resharder.verify()
            if rank == 1:
                assert all(torch.equal(t.cpu(), labels(n, step).to(t.dtype)) for n, t in mine.items())
                assert stats.aliased_bytes == 2 * (640 * 64 + 2 * 64 * 96)
                assert stats.received_bytes == 2 * (96 * 33 + 64)
            channel.send("checked", {}, timeout_s=PATIENCE_S)
            channel.receive("checked", timeout_s=PATIENCE_S)
            resharder.train(deadline_s=PATIENCE_S)
    mine.clear()
    finish(rank, arena, channel, loan)


def writing_over_weights(rank: int, folder: str, new_arena: NewArena) -> None:
    """The engine has two names of borrowed memory crossed: filling them would destroy weights, so both refuse."""
    arena = new_arena()
    tensors = trainer_tensors(arena) if rank == 0 else None
    channel, loan = meet(rank, folder, arena, tensors)
    mine = tensors if rank == 0 else dict(loan.tensors)
    if rank == 1:
        mine["layers.0.w"], mine["layers.2.w"] = mine["layers.2.w"], mine["layers.0.w"]
    plan = make_plan(*exchange_layouts(channel, mine, rank))
    before = {name: tensor.clone() for name, tensor in mine.items()}
    if rank == 0:
        with pytest.raises(PlanError, match=r"copy of 'layers.[02].w' .* reads bytes that copy of 'layers.[02].w'"):
            Resharder(plan, mine, {}, rank=0, transport=PeerTransport(arena, folder, timeout_s=PATIENCE_S))
    else:
        transport = PeerTransport(arena, folder, imports=loan.regions, timeout_s=PATIENCE_S)
        with pytest.raises(TransportError, match=r"closed the connection|failed"):
            Resharder(plan, {}, mine, rank=1, transport=transport)
    assert all(torch.equal(before[name], tensor) for name, tensor in mine.items())


def an_import_that_is_not_passed(rank: int, folder: str, new_arena: NewArena) -> None:
    arena = new_arena()
    tensors = trainer_tensors(arena) if rank == 0 else None
    channel, loan = meet(rank, folder, arena, tensors)
    mine = tensors if rank == 0 else loan.tensors
    plan = make_plan(*exchange_layouts(channel, mine, rank))
    sides = (mine, {}) if rank == 0 else ({}, mine)
    transport = PeerTransport(arena, folder, timeout_s=2.0)
    if rank == 1:
        with pytest.raises(PlanError, match=r"its memory is not the arena's: .* or pass the region that it was import"):
            Resharder(plan, *sides, rank=rank, transport=transport)
    else:
        with pytest.raises(TransportError, match="rank 0, meeting its receiver rank 1"):
            Resharder(plan, *sides, rank=rank, transport=transport)
