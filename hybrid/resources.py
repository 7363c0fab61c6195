"""What a pool of workers asks for, and whether nodes can give it. Pure: no cluster is touched here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hybrid.errors import ResourceError

Resources = Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSpec:
    """A pool's demand.

    Attributes:
        num_workers: places in the pool; a worker group fills each with one worker.
        cpus_per_worker: CPU cores that each place reserves.
        gpus_per_worker: GPUs that each place reserves; all groups of the pool share them. Above 1, `max_groups` must
            be 1.
        max_groups: worker groups that may live in the pool at once (colocation); each worker gets 1/max_groups of its
            place in the cluster's books, while it sees the whole GPU.
        one_node: whether all places must lie on one node.
    """

    num_workers: int
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0
    max_groups: int = 4
    one_node: bool = False

    def __post_init__(self) -> None:
        """Refuse demands that no pool can meet."""
        if self.num_workers < 1 or self.max_groups < 1:
            raise ValueError(
                f"a pool needs num_workers >= 1 and max_groups >= 1, got {self.num_workers} and {self.max_groups}"
            )
        if self.cpus_per_worker <= 0 or self.gpus_per_worker < 0:
            raise ValueError(
                f"a pool needs cpus_per_worker > 0 and gpus_per_worker >= 0, got {self.cpus_per_worker} "
                f"and {self.gpus_per_worker}"
            )
        if self.gpus_per_worker > 1 and self.max_groups > 1:
            raise ValueError(
                f"workers with {self.gpus_per_worker:g} GPUs each can't share them with other groups: use max_groups=1 "
                f"(got {self.max_groups}), or one GPU per worker"
            )

    @property
    def worker_demand(self) -> dict[str, float]:
        """What one place reserves, by resource name."""
        demand = {"CPU": float(self.cpus_per_worker), "GPU": float(self.gpus_per_worker)}
        return {name: amount for name, amount in demand.items() if amount > 0}

    @property
    def bundles(self) -> tuple[dict[str, float], ...]:
        """Demands that must each fit one node whole: one per place, or a single one for all."""
        if self.one_node:
            return ({name: amount * self.num_workers for name, amount in self.worker_demand.items()},)
        return tuple(self.worker_demand for _ in range(self.num_workers))


def check_fit(bundles: Sequence[Resources], nodes: Sequence[Resources]) -> tuple[int, ...]:
    """Place every bundle whole on a node, largest first, and return each bundle's node index.

    Raises:
        ResourceError: no node is large enough for a bundle, or the nodes are large enough but too few. The message
            names each lacking resource with what was asked for and what there is.
    """
    for bundle in bundles:
        _check_one(bundle, nodes)
    free = [dict(node) for node in nodes]
    placed: dict[int, int] = {}
    order = sorted(range(len(bundles)), key=lambda index: sorted(bundles[index].values(), reverse=True), reverse=True)
    for index in order:
        node = next((n for n, room in enumerate(free) if not _lacks(bundles[index], room)), None)
        if node is None:
            raise ResourceError(_too_few(bundles, nodes, num_placed=len(placed)))
        for name, amount in bundles[index].items():
            free[node][name] -= amount
        placed[index] = node
    return tuple(placed[index] for index in range(len(bundles)))


def _lacks(bundle: Resources, room: Resources) -> dict[str, float]:
    """Return by how much `room` falls short of `bundle`, for the resources in which it does."""
    short = {name: amount - room.get(name, 0.0) for name, amount in bundle.items()}
    return {name: amount for name, amount in short.items() if amount > 1e-9}


def _check_one(bundle: Resources, nodes: Sequence[Resources]) -> None:
    if not nodes:
        raise ResourceError(f"a bundle needs {_text(bundle)}, and there is no node at all")
    shortages = [_lacks(bundle, node) for node in nodes]
    if not all(shortages):
        return
    closest = min(range(len(nodes)), key=lambda n: (len(shortages[n]), sum(shortages[n].values())))
    lacks = ", ".join(
        f"{name} (asked {_number(bundle[name])}, has {_number(nodes[closest].get(name, 0.0))})"
        for name in shortages[closest]
    )
    raise ResourceError(
        f"a bundle needs {_text(bundle)} on one node, and none of {len(nodes)} node(s) has that; the closest lacks "
        f"{lacks}. Ask for less of it per worker, or use larger nodes"
    )


def _too_few(bundles: Sequence[Resources], nodes: Sequence[Resources], *, num_placed: int) -> str:
    asked, has = _total(bundles), _total(nodes)
    lacks = _lacks(asked, has) or asked
    return (
        f"{len(bundles)} bundles of {_text(bundles[0])} were asked for, and {num_placed} fit the {len(nodes)} node(s): "
        + ", ".join(f"{name} asked {_number(asked[name])}, there is {_number(has.get(name, 0.0))}" for name in lacks)
        + ". Use fewer workers, ask for less per worker, or wait until other jobs release theirs"
    )


def _total(parts: Sequence[Resources]) -> dict[str, float]:
    names = sorted({name for part in parts for name in part})
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def _text(resources: Resources) -> str:
    return "{" + ", ".join(f"{name}: {_number(amount)}" for name, amount in sorted(resources.items())) + "}"


def _number(amount: float) -> str:
    return f"{amount:g}"
