"""Random pairs of layouts: meshes, uneven cuts, replicas, overlaps, fused storages, ties, dtypes, nodes.

Hypothesis draws a size and a seed; everything else follows from the seed with ``random``, twenty times as fast as
drawing each choice. A failure is reproduced by its size and seed. ``small_cases`` draws every choice instead, so that
Hypothesis can shrink what it finds. ``plan_sweep`` has pairs by the ten thousand.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from reshard import Address, DType, Holding, Layout, Region, TensorSpec, Topology

FLOATS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
Boxes = list[tuple[int, Region]]


@dataclass(frozen=True)
class Case:
    size: int
    seed: int | None
    source: Layout
    destination: Layout
    topology: Topology | None


class Shelf:
    """Places boxes in the storages of ranks, back to back, so that no two share bytes."""

    def __init__(self) -> None:
        self.used: dict[tuple[int, str], int] = {}

    def place(self, rank: int, storage: str, region: Region, dtype: DType, order: Sequence[int], pad: int) -> Holding:
        strides, step = [0] * len(region.shape), 1
        for dim in order:
            strides[dim] = step
            step *= region.shape[dim] + pad
        used = -(-self.used.get((rank, storage), 0) // dtype.itemsize) * dtype.itemsize
        self.used[rank, storage] = used + max(step, 1) * dtype.itemsize
        return Holding(rank, region, Address(storage, used, tuple(strides), dtype))


def cuts(rng: random.Random, extent: int, parts: int) -> list[tuple[int, int]]:
    """``parts`` half-open spans that partition an extent: even, ceil chunks, or anywhere, some of them possibly
    empty.
    """
    if rng.random() < 0.4:
        chunk = -(-extent // parts)
        inner = [min(chunk * part, extent) for part in range(1, parts)]
    else:
        inner = sorted(rng.randint(0, extent) for _ in range(parts - 1))
    return list(itertools.pairwise([0, *inner, extent]))


def grid(rng: random.Random, name: str, shape: tuple[int, ...], ranks: Sequence[int]) -> Boxes:
    """A grid of boxes over up to two dims, dealt to ranks round after round, so that replicas arise."""
    spans = [[(0, extent)] for extent in shape]
    for _ in range(rng.randint(0, 2) if shape else 0):
        dim = rng.randrange(len(shape))
        spans[dim] = cuts(rng, shape[dim], rng.randint(1, 4))
    boxes = [Region(name, tuple(a for a, _ in box), tuple(b for _, b in box)) for box in itertools.product(*spans)]
    owners = rng.sample(list(ranks), len(ranks))
    return [(owners[deal % len(owners)], boxes[deal % len(boxes)]) for deal in range(max(len(boxes), len(owners)))]


def scattered(rng: random.Random, name: str, shape: tuple[int, ...], ranks: Sequence[int]) -> Boxes:
    """Any boxes on any ranks, overlapping as they please."""
    held = []
    for _ in range(rng.randint(1, 5)):
        spans = [sorted((rng.randint(0, extent), rng.randint(0, extent))) for extent in shape]
        held.append((rng.choice(ranks), Region(name, tuple(s[0] for s in spans), tuple(s[1] for s in spans))))
    return held


def side(rng: random.Random, specs: Sequence[TensorSpec], ranks: Sequence[int], *, is_source: bool) -> Layout:
    shelf, holdings = Shelf(), []
    fused = rng.random() < 0.3
    mixed = not is_source and rng.random() < 0.3
    repeats: dict[tuple[int, ...], Boxes] = {}
    for spec in specs:
        boxes = grid(rng, spec.name, spec.shape, ranks)
        if rng.random() < 0.4:
            more = scattered(rng, spec.name, spec.shape, ranks)
            boxes = boxes + more if is_source or rng.random() < 0.5 else more
        if spec.shape in repeats and rng.random() < 0.5:
            boxes = [(rank, Region(spec.name, old.start, old.stop)) for rank, old in repeats[spec.shape]]
        repeats[spec.shape] = boxes
        for rank, region in boxes if rng.random() < 0.2 else dict.fromkeys(boxes):
            dtype = rng.choice(FLOATS) if mixed else spec.dtype
            order = rng.sample(range(len(spec.shape)), len(spec.shape))
            storage = "fused" if fused else rng.choice([spec.name, f"{spec.name}.other"])
            holdings.append(shelf.place(rank, storage, region, dtype, order, rng.randint(0, 1)))
    return Layout.from_holdings(specs, holdings, ranks=ranks)


def topology(rng: random.Random, ranks: Sequence[int]) -> Topology | None:
    if rng.random() < 0.3:
        return None
    gpus = {rank: rng.randrange(len(ranks)) if rng.random() < 0.4 else rank + len(ranks) for rank in ranks}
    node_of_gpu = {gpu: rng.randrange(3) for gpu in sorted(set(gpus.values()))}
    nodes = {rank: node_of_gpu[gpu] for rank, gpu in gpus.items()}
    return Topology(nodes, gpus=gpus, fan_out=rng.random() < 0.7)


def make_case(size: int, seed: int) -> Case:
    """A source, a destination that wants the same tensors, and a topology; ``size`` bounds ranks and extents."""
    return build_case(size, random.Random(seed), seed)


def build_case(size: int, rng: random.Random, seed: int | None = None) -> Case:
    ranks = [sorted(rng.sample(range(size + 1), rng.randint(1, size + 1))) for _ in range(2)]
    shapes = [tuple(rng.randint(1, size) for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(1, 4))]
    shapes = [shape for shape in shapes for _ in range(rng.randint(1, 3))]
    dtypes = [rng.choice(FLOATS) for _ in range(2)]
    sides = []
    for index in range(2):
        specs = [TensorSpec(f"t{number}", shape, dtypes[index]) for number, shape in enumerate(shapes)]
        sides.append(side(rng, specs, ranks[index], is_source=index == 0))
    return Case(size, seed, *sides, topology(rng, sorted({*ranks[0], *ranks[1]})))


def cases(max_size: int = 6) -> st.SearchStrategy[Case]:
    return st.builds(make_case, st.integers(1, max_size), st.integers(0, 2**48))


def small_cases() -> st.SearchStrategy[Case]:
    return st.builds(build_case, st.integers(1, 4), st.randoms(use_true_random=False))
