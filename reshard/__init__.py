"""Weights from training shards into live inference tensors: only the missing bytes move."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.arena.arena import Arena as Arena
    from reshard.dtype import DType as DType
    from reshard.groups import Groups as Groups
    from reshard.groups import make_groups as make_groups
    from reshard.layout import Address as Address
    from reshard.layout import Holding as Holding
    from reshard.layout import Layout as Layout
    from reshard.layout import TensorSpec as TensorSpec
    from reshard.mesh import Mesh as Mesh
    from reshard.parallel_layout import Rules as Rules
    from reshard.plan import Copy as Copy
    from reshard.plan import Plan as Plan
    from reshard.planner import make_plan as make_plan
    from reshard.region import Region as Region
    from reshard.resharder import Resharder as Resharder
    from reshard.spec import ModelSpec as ModelSpec
    from reshard.topology import Tier as Tier
    from reshard.topology import Topology as Topology
    from reshard.transports.collective import CollectiveTransport as CollectiveTransport
    from reshard.transports.local import LocalTransport as LocalTransport
    from reshard.transports.peer import PeerTransport as PeerTransport

_MODULE_OF = {
    "Address": "layout",
    "Arena": "arena.arena",
    "CollectiveTransport": "transports.collective",
    "Copy": "plan",
    "DType": "dtype",
    "Groups": "groups",
    "Holding": "layout",
    "Layout": "layout",
    "LocalTransport": "transports.local",
    "Mesh": "mesh",
    "ModelSpec": "spec",
    "PeerTransport": "transports.peer",
    "Plan": "plan",
    "Region": "region",
    "Rules": "parallel_layout",
    "Resharder": "resharder",
    "TensorSpec": "layout",
    "Tier": "topology",
    "Topology": "topology",
    "make_groups": "groups",
    "make_plan": "planner",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
    return getattr(importlib.import_module(f"reshard.{_MODULE_OF[name]}"), name)
