"""Parallel groups of training, generation and micro data parallelism, after HybridFlow (EuroSys'25, section 5.3), and
beyond.

Training has ``p`` stages, tensor parallel size ``t`` and ``d`` replicas; generation has ``p_g`` and ``t_g``. Where
generation is less parallel, a training replica serves ``d_g = p*t / (p_g*t_g)`` generation replicas, and the ``d_g``
ranks whose training shards make up one generation shard form a micro data-parallel group: the transition is an
all-gather inside it.

Note: zero redundancy
    With ``a = t / t_g`` and ``b = p / p_g``, the training rank (stage ``p_i``, tensor index ``t_i``) joins generation
    stage ``p_i // b`` and tensor index ``t_i // a``. So every training shard lies inside the generation shard of its
    own rank, and generation's tensor groups have stride ``a`` in training's. Where generation is *more* parallel
    (``t_g > t`` or ``p_g > p``, which the paper leaves out), consecutive training replicas share out the parts of
    each training shard, and the transition moves nothing at all.

Note: vanilla
    Generation numbers the ranks of a training replica consecutively, tensor index fastest, as most engines do. Then
    some ranks' training shards lie outside their generation shards.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from reshard.errors import LayoutError
from reshard.mesh import Mesh

Kind = Literal["zero_redundancy", "vanilla", "full_gather"]
KINDS: tuple[Kind, ...] = ("zero_redundancy", "vanilla", "full_gather")


@dataclass(frozen=True, slots=True)
class Communicator:
    """A group that a collective library must create: every rank creates all of them, in the same order."""

    name: str
    ranks: tuple[int, ...]


def check_communicators(communicators: Sequence[Communicator], *, world_size: int) -> None:
    """Raise LayoutError, naming the group, for ranks that are not in the world, ranks or names that come twice, and a
    group without ranks.
    """
    for communicator in communicators:
        name, ranks = communicator.name, communicator.ranks
        outside = sorted(rank for rank in ranks if not 0 <= rank < world_size)
        if outside:
            raise LayoutError(
                f"group {name!r} has ranks {outside}, but the world has ranks 0 to {world_size - 1}: "
                "make the groups for as many ranks as were started"
            )
        twice = sorted(rank for rank, times in Counter(ranks).items() if times > 1)
        if twice or not ranks:
            raise LayoutError(f"group {name!r} has ranks {list(ranks)}: expected one or more ranks, each once")
    names = Counter(communicator.name for communicator in communicators)
    repeated = sorted(name for name, times in names.items() if times > 1)
    if repeated:
        raise LayoutError(f"several groups are named {repeated[0]!r}: give each a name of its own")


def communicators_digest(communicators: Sequence[Communicator]) -> str:
    """SHA-256 of names, ranks and their order, as hex: equal where all ranks would create the same groups."""
    return hashlib.sha256(repr([(c.name, c.ranks) for c in communicators]).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Groups:
    """Both meshes over one set of ranks, and the micro data-parallel groups between them.

    ``train`` has axes pp, dp, tp; ``generate`` has axes dp, pp, tp, its ranks permuted as ``kind`` says.
    """

    kind: Kind
    train: Mesh
    generate: Mesh
    micro_dp: tuple[tuple[int, ...], ...]

    @property
    def micro_dp_size(self) -> int:
        """Training shards per generation shard, ``d_g``."""
        return len(self.micro_dp[0])

    def engine_rank(self, rank: int) -> int:
        """Place of a global rank among the engine's consecutively numbered ranks."""
        return self.generate.ranks.index(rank)

    def communicators(self) -> tuple[Communicator, ...]:
        """All groups of more than one rank, each set of ranks once, in an order that is the same on every rank."""
        named = [
            *(("train_tp", group) for group in self.train.groups("tp")),
            *(("train_dp", group) for group in self.train.groups("dp")),
            *(("train_pp", group) for group in self.train.groups("pp")),
            *(("generate_tp", group) for group in self.generate.groups("tp")),
            *(("generate_pp", group) for group in self.generate.groups("pp")),
            *(("micro_dp", group) for group in self.micro_dp),
        ]
        seen: dict[tuple[int, ...], Communicator] = {}
        for kind, ranks in named:
            if len(ranks) > 1 and ranks not in seen:
                seen[ranks] = Communicator(f"{kind}[{','.join(map(str, ranks))}]", ranks)
        return tuple(seen.values())


def make_groups(
    train: Mesh,
    *,
    tp: int,
    pp: int = 1,
    kind: Kind = "zero_redundancy",
    micro_dp_size: int | None = None,
) -> Groups:
    """Groups for generation with ``tp`` and ``pp`` on the ranks of ``train`` (axes among pp, dp, tp).

    ``micro_dp_size``, if given, is checked against ``p*t / (p_g*t_g)``. Raises LayoutError with the sizes that would
    do when ``tp`` and training's tensor size don't divide each other, likewise ``pp``, or when too few replicas are
    there to share.
    """
    p, t, d = (train.axis_size(axis) for axis in ("pp", "tp", "dp"))
    if p * t * d != train.size:
        raise LayoutError(f"training mesh {train} has axes besides pp, dp and tp: fold them into dp")
    _check_divides("tp", t, tp)
    _check_divides("pp", p, pp)
    sharing = max(tp // t, 1) * max(pp // p, 1)
    if d % sharing or (p * t * d) % (pp * tp):
        raise LayoutError(
            f"generation with pp={pp}, tp={tp} needs {sharing} training replicas to share each shard, but "
            f"training {train} "
            f"has dp={d}: make dp a multiple of {sharing}, or generation less parallel"
        )
    if micro_dp_size is not None and micro_dp_size * pp * tp != p * t:
        raise LayoutError(
            f"micro_dp_size={micro_dp_size} does not fit: p*t/(p_g*t_g) = {p}*{t}/({pp}*{tp}) = "
            f"{Fraction(p * t, pp * tp)}"
        )
    normal = Mesh({"pp": p, "dp": d, "tp": t}, ranks=[train.rank(**_named(train, i)) for i in _places(p, d, t)])
    order = _zero_redundancy(normal, pp, tp) if kind == "zero_redundancy" else _vanilla(normal, pp, tp)
    generate = Mesh({"dp": train.size // (pp * tp), "pp": pp, "tp": tp}, ranks=order)
    micro = max(t // tp, 1) * max(p // pp, 1) if kind == "zero_redundancy" else max(p * t // (pp * tp), 1)
    return Groups(kind, normal, generate, _micro_groups(normal, generate, micro))


def _check_divides(axis: str, training: int, generation: int) -> None:
    if generation < 1 or (training % generation and generation % training):
        good = [size for size in range(1, 8 * training + 1) if training % size == 0 or size % training == 0]
        raise LayoutError(
            f"generation {axis}={generation} does not fit training {axis}={training}: one must divide the other, "
            f"for example {', '.join(map(str, good[:8]))}"
        )


def _places(p: int, d: int, t: int) -> list[dict[str, int]]:
    return [{"pp": i, "dp": j, "tp": k} for i in range(p) for j in range(d) for k in range(t)]


def _named(mesh: Mesh, place: dict[str, int]) -> dict[str, int]:
    return {axis: index for axis, index in place.items() if axis in mesh.axes}


def _zero_redundancy(train: Mesh, pp: int, tp: int) -> list[int]:
    """Ranks by generation replica, stage and tensor index; see the note."""
    p, d, t = train.shape
    a, b = max(t // tp, 1), max(p // pp, 1)
    finer_tp, finer_pp = max(tp // t, 1), max(pp // p, 1)
    keyed = []
    for place in _places(p, d, t):
        share, group = place["dp"] % (finer_tp * finer_pp), place["dp"] // (finer_tp * finer_pp)
        tensor = place["tp"] // a * finer_tp + share % finer_tp
        stage = place["pp"] // b * finer_pp + share // finer_tp
        keyed.append(((group, place["pp"] % b, place["tp"] % a, stage, tensor), train.rank(**place)))
    return [rank for _, rank in sorted(keyed)]


def _vanilla(train: Mesh, pp: int, tp: int) -> list[int]:
    """Ranks of each training replica (or of as many as one generation replica spans) in training's own order."""
    p, d, t = train.shape
    return [train.rank(pp=i, dp=j, tp=k) for j in range(d) for i in range(p) for k in range(t)]


def _micro_groups(train: Mesh, generate: Mesh, size: int) -> tuple[tuple[int, ...], ...]:
    """Ranks of ``size`` generation replicas in a row at one generation shard, in training's order."""
    replicas: dict[tuple[int, int, int], list[int]] = {}
    for rank in generate.ranks:
        place = generate.coordinate(rank)
        replicas.setdefault((place["dp"] // size, place["pp"], place["tp"]), []).append(rank)
    return tuple(tuple(sorted(group, key=train.ranks.index)) for group in replicas.values())


def paper_costs(kind: Kind, *, p: int, t: int, d: int, p_g: int, t_g: int) -> tuple[Fraction, Fraction, Fraction]:
    """HybridFlow's Table 2: bytes received per rank, peak bytes of weights and redundant bytes, as parts of the
    model.
    """
    if kind == "full_gather":
        return Fraction(t * p * d - 1, t * p * d), Fraction(1), Fraction(1, t * p * d)
    if kind == "vanilla":
        return Fraction(t * p - 1, t * p), Fraction(1), Fraction(1, t * p)
    shard = Fraction(1, t_g * p_g)
    return Fraction(t * p - t_g * p_g, t_g * p_g * t * p), shard, Fraction(0)
