"""Scenarios of the command line: a model, how training and generation lie, and the plan between them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from reshard.errors import LayoutError
from reshard.groups import Groups, Kind, make_groups
from reshard.layout import Layout
from reshard.mesh import Mesh
from reshard.parallel_layout import Rules, Style, layout_from_parallel
from reshard.plan import Plan
from reshard.planner import make_plan
from reshard.spec import ModelSpec
from reshard.topology import Topology

TrainStyle = Literal["plain", "megatron"]
_TRAIN_AXES = ("pp", "dp", "fsdp", "tp", "ep")
_GENERATE_AXES = ("pp", "dp", "tp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What to plan: sizes by axis name for training and generation, ``ranks_per_node`` ranks on a node.

    Training orders its ranks pp, dp, fsdp, tp, slowest first. ``ep`` deals out experts over consecutive ranks of a
    stage. The other ranks of the stage hold replicas; under ``fsdp`` those of one ``fsdp * tp`` block that have the
    same experts cut them among themselves, and ``dp`` holds replicas of the block. Generation takes its places from
    ``grouping`` (``reshard.groups``) and fills all ranks with replicas.
    """

    model: ModelSpec
    train: dict[str, int]
    generate: dict[str, int]
    grouping: Kind = "zero_redundancy"
    train_style: TrainStyle = "plain"
    generate_style: Style = "vllm"
    ranks_per_node: int = 8

    @property
    def train_mesh(self) -> Mesh:
        """Axes of size 1 included, ``ep`` left out."""
        _check_axes("training", self.train, _TRAIN_AXES)
        return Mesh({axis: self.train.get(axis, 1) for axis in _TRAIN_AXES[:-1]})

    @property
    def num_ranks(self) -> int:
        """All ranks, which training fills."""
        return self.train_mesh.size

    @property
    def topology(self) -> Topology:
        """Consecutive ranks share nodes."""
        return Topology.regular(range(self.num_ranks), ranks_per_node=self.ranks_per_node)

    def groups(self) -> Groups:
        """Training, generation and micro data-parallel groups."""
        _check_axes("generation", self.generate, _GENERATE_AXES)
        mesh = self.train_mesh
        folded = {"pp": mesh.axis_size("pp"), "dp": mesh.axis_size("dp") * mesh.axis_size("fsdp")}
        kind: Kind = "vanilla" if self.grouping == "full_gather" else self.grouping
        train = Mesh({**folded, "tp": mesh.axis_size("tp")})
        return make_groups(train, tp=self.generate.get("tp", 1), pp=self.generate.get("pp", 1), kind=kind)

    def layouts(self) -> tuple[Layout, Layout]:
        """Training's layout and generation's."""
        mesh = self.train_mesh
        fsdp = "fsdp" if mesh.axis_size("fsdp") > 1 else None
        train = layout_from_parallel(
            self.model,
            mesh,
            rules=Rules(style=self.train_style, fsdp=fsdp),
            expert_mesh=_expert_mesh(mesh, self.train.get("ep", 1), fsdp),
        )
        engine = self.groups().generate
        generate = layout_from_parallel(
            self.model,
            engine,
            rules=Rules(style=self.generate_style),
            expert_mesh=_expert_mesh(engine, self.generate.get("ep", 1), None),
        )
        return train, generate

    def plan(self) -> Plan:
        """The plan from training to generation."""
        return make_plan(*self.layouts(), topology=self.topology)

    def with_generate(self, generate: dict[str, int]) -> "Scenario":
        """The same with another generation."""
        return replace(self, generate=generate)


def parse_sizes(text: str) -> dict[str, int]:
    """``"pp=1,tp=8"`` as sizes by axis; LayoutError on anything else."""
    mesh = Mesh.parse(text)
    return dict(zip(mesh.axes, mesh.shape, strict=True))


def _check_axes(side: str, sizes: dict[str, int], known: Sequence[str]) -> None:
    unknown = sorted(set(sizes) - set(known))
    if unknown:
        raise LayoutError(f"{side} has no axis {', '.join(unknown)}: use {', '.join(known)}")


def _expert_mesh(mesh: Mesh, ep: int, fsdp: str | None) -> Mesh | None:
    """Experts dealt out over consecutive ranks of a stage (or of an engine), the rest being replicas or FSDP shards."""
    if ep == 1:
        return None
    num_stages = mesh.axis_size("pp")
    per_stage = mesh.size // num_stages
    replicas = mesh.axis_size("dp") if fsdp else 1
    block = per_stage // replicas
    if block % ep:
        good = [size for size in range(1, block + 1) if block % size == 0]
        among = f"the fsdp * tp = {block} ranks that share one copy" if fsdp else f"the {block} ranks of a stage"
        raise LayoutError(f"ep={ep} does not divide {among}: use one of {good}")
    ranks = [rank for stage in range(num_stages) for rank in _stage_ranks(mesh, stage)]
    axes = {"pp": num_stages, "dp": replicas, fsdp or "edp": block // ep, "ep": ep}
    return Mesh(axes, ranks=ranks)


def _stage_ranks(mesh: Mesh, stage: int) -> Sequence[int]:
    return mesh.slice(pp=stage).ranks if "pp" in mesh.axes else mesh.ranks
