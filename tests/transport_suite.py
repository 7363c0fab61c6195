"""One conformance suite for every transport that crosses processes: random pairs of layouts in real memory.

Each rank lays labelled values out as the source Layout says, runs transitions, and compares every byte of its
destination storages, those between and after the boxes included, with what the layouts imply.
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import plan_cases
import torch

from reshard import (
    _C,
    Address,
    DType,
    Holding,
    Layout,
    Mesh,
    ModelSpec,
    Plan,
    Region,
    Resharder,
    Rules,
    TensorSpec,
    Topology,
    make_groups,
    make_plan,
)
from reshard.spec import ModelTensor
from reshard.transports.base import Transport
from reshard.verify import box_view, torch_dtype

NO_KERNELS = not _C.CUDA_KERNELS and importlib.util.find_spec("triton") is None
"""Whether nothing here runs copies on a GPU."""
WORLD = 4
SENTINEL = 0xA5
Allocate = Callable[[str, int], torch.Tensor]


@dataclass(frozen=True)
class Pair:
    source: Layout
    destination: Layout
    topology: Topology | None = None


def sample_cases(num_cases: int, *, num_ranks: int = WORLD) -> list[Pair]:
    """The same `num_cases` pairs of layouts in every process and run, over at most `num_ranks` (and `WORLD`) ranks."""
    made = (plan_cases.make_case(WORLD - 1, seed) for seed in itertools.count())
    few_enough = (c for c in made if max(*c.source.ranks, *c.destination.ranks) < num_ranks)
    return [Pair(case.source, case.destination, case.topology) for case in itertools.islice(few_enough, num_cases)]


def row_layout(rows: int, columns: int, ranks: int, *, first_row: int = 0) -> Layout:
    """One fp32 matrix by rows over `ranks`; `first_row` shifts the cuts, so that bytes must move."""
    spec = TensorSpec("w", (rows, columns), DType.FLOAT32)
    bounds = [0, *(min(rows, first_row + rows * (i + 1) // ranks) for i in range(ranks - 1)), rows]
    holdings = [
        Holding(
            i,
            Region("w", (bounds[i], 0), (bounds[i + 1], columns)),
            Address("w", 0, (columns, 1), DType.FLOAT32),
        )
        for i in range(ranks)
    ]
    return Layout.from_holdings([spec], holdings)


def gather_pairs() -> list[tuple[str, Pair, dict[str, dict[str, int]]]]:
    """Transitions that consist of regular gathers, with how many of a rank's travel in which way, by mode.

    Four weights cut by rows with parts of 512 KiB in bf16, four of 64 KiB, and two cut by columns.
    """
    tensors = [
        *(ModelTensor(TensorSpec(f"rows.{i}", (1024, 1024), DType.FLOAT32), "rows", layer=i) for i in range(4)),
        *(ModelTensor(TensorSpec(f"small.{i}", (256, 512), DType.FLOAT32), "rows", layer=i) for i in range(4)),
        *(ModelTensor(TensorSpec(f"columns.{i}", (512, 512), DType.FLOAT32), "columns", layer=i) for i in range(2)),
    ]
    train = ModelSpec("gathers", "made up", 4, 1, 1, 1, tuple(tensors), {})
    generate = ModelSpec("gathers", "made up", 4, 1, 1, 1, tuple(_as_bf16(t) for t in tensors), {})
    found = []
    tp = Layout.from_parallel(train, Mesh({"tp": WORLD}))
    for size in (2, 1):
        groups = make_groups(Mesh({"pp": 1, "dp": 1, "tp": WORLD}), tp=size)
        away = {"in place": 0, "direct": 0, "staged": 0}
        staged = 0 if size == 2 else 2
        expected = {
            "all_gather": {**away, "in place": 8, "staged": staged},
            "messages": {**away, "direct": 4, "staged": staged + (0 if size == 2 else 4)},
            "off": away,
        }
        found.append((f"tp4 to tp{size}", Pair(tp, Layout.from_parallel(generate, groups.generate)), expected))
    fsdp = Layout.from_parallel(train, Mesh({"fsdp": WORLD}), rules=Rules(fsdp="fsdp"))
    whole = Layout.from_parallel(generate, Mesh({"dp": WORLD}))
    expected = {
        "all_gather": {**away, "in place": 10},
        "messages": {**away, "direct": 4, "staged": 6},
        "off": away,
    }
    return [*found, ("fsdp4 to replicas", Pair(fsdp, whole), expected)]


def _as_bf16(tensor: ModelTensor) -> ModelTensor:
    return replace(tensor, spec=replace(tensor.spec, dtype=DType.BFLOAT16))


def full_tensors(layout: Layout, update: int) -> dict[str, torch.Tensor]:
    """Labelled values of every canonical tensor; no two updates and hardly two elements alike."""
    values = {}
    for index, (name, spec) in enumerate(layout.specs.items()):
        labels = torch.arange(spec.numel, dtype=torch.float32).reshape(spec.shape)
        values[name] = (labels * 1.37 + 100 * index + 1000 * update + 0.011).to(torch_dtype(spec.dtype))
    return values


def allocate_storages(layout: Layout, rank: int, allocate: Allocate) -> dict[str, torch.Tensor]:
    """Raw memory for every storage of `rank`, a few bytes larger than needed, full of the sentinel."""
    ends: dict[str, int] = {}
    for holding in layout.holdings(rank) if rank in layout.ranks else ():
        ends[holding.address.storage] = max(
            ends.get(holding.address.storage, 16), _end(holding.address, holding.region)
        )
    storages = {name: allocate(name, end + 16) for name, end in sorted(ends.items())}
    for tensor in storages.values():
        tensor.fill_(SENTINEL)
    return storages


def fill(storages: Mapping[str, torch.Tensor], layout: Layout, rank: int, values: Mapping[str, torch.Tensor]) -> None:
    """Write the rank's holdings from whole tensors, cast to each holding's dtype."""
    for holding in layout.holdings(rank) if rank in layout.ranks else ():
        region, address = holding.region, holding.address
        if region.is_empty:
            continue
        box = tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))
        view = box_view(storages[address.storage], address, region.shape)
        view.copy_(values[region.name][box])


def check_destination(
    plan: Plan, rank: int, found: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
) -> None:
    """Every byte of the rank's destination storages is as the layouts say, or still the sentinel."""
    expected = {name: torch.full_like(t, SENTINEL, device="cpu") for name, t in found.items()}
    fill(expected, plan.destination, rank, values)
    for name, tensor in found.items():
        wrong = (tensor.cpu() != expected[name]).nonzero().flatten().tolist()
        assert not wrong, f"rank {rank}, storage {name!r}: bytes {wrong[:8]} differ ({len(wrong)} of {tensor.numel()})"


@contextmanager
def bound(
    case: Pair, rank: int, transport: Transport, allocate: Allocate, device: str = "cpu"
) -> Iterator[tuple[Resharder, dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    plan = make_plan(case.source, case.destination, topology=case.topology)
    source = allocate_storages(case.source, rank, lambda _, size: torch.empty(size, dtype=torch.uint8, device=device))
    destination = allocate_storages(case.destination, rank, allocate)
    with Resharder(plan, source, destination, rank=rank, transport=transport) as resharder:
        yield resharder, source, destination


def check_case(case: Pair, rank: int, transport: Transport, allocate: Allocate, device: str = "cpu") -> None:
    """Two updates of one pair of layouts, each bit-exact; the source is never written."""
    with bound(case, rank, transport, allocate, device) as (resharder, source, destination):
        for update in (1, 2):
            values = full_tensors(case.source, update)
            fill(source, case.source, rank, values)
            before = {name: t.clone() for name, t in source.items()}
            stats = resharder.run(deadline_s=30)
            check_destination(resharder.plan, rank, destination, values)
            assert all(torch.equal(before[name], t) for name, t in source.items()), "the source was written"
            assert stats.num_transitions == update
            holdings = case.destination.holdings(rank) if rank in case.destination.ranks else ()
            assert resharder.verify() == sum(h.region.numel * h.address.dtype.itemsize for h in holdings)
            if rank in resharder.plan.scope:
                assert stats.received_bytes == resharder.plan.certificate.floor_bytes(rank)


def _end(address: Address, region: Region) -> int:
    if region.is_empty:
        return 0
    span = 1 + sum((n - 1) * s for n, s in zip(region.shape, address.strides, strict=True))
    return address.offset_bytes + span * address.dtype.itemsize
