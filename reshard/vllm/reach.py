"""How the processes of a session reach each other: one host's write into each other's memory, several hosts' exchange.

Processes that share a host, and see one folder there, use the ``peer`` transport. Others form a process group that
joins both sides' worlds, and use ``collective``. All of them choose alike, as all know where all are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from reshard.arena import Arena
from reshard.errors import PlanError
from reshard.joint_group import join_group
from reshard.process_groups import Backend
from reshard.transports.base import Transport
from reshard.transports.collective import CollectiveTransport
from reshard.transports.peer import PeerTransport
from reshard.vllm.exchange import Exchange

TransportChoice = Literal["auto", "peer", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process of the session is: its host, whether the session's folder is there, and its tensors' device."""

    host: str
    sees_folder: bool
    device_type: str


def reach_all(
    exchange: Exchange,
    rank: int,
    size: int,
    *,
    choice: TransportChoice,
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    arena: Callable[[], Arena],
) -> tuple[Transport, dist.ProcessGroup | None]:
    """The transport by which all ``size`` processes of a session reach each other, and the group that it uses.

    Blocks until all are there.

    Raises:
        PlanError: see ``choose_transport``.
        TransportError, PeerTimeout: a process did not come.
    """
    device_type = next((tensor.device.type for tensor in tensors.values()), "cpu")
    own = Place(host=host_id(), sees_folder=folder.is_dir(), device_type=device_type)
    exchange.put(f"place/{rank}", json.dumps(asdict(own)).encode())
    found = [Place(**json.loads(text)) for text in exchange.all("place", range(size), who="any")]
    if choose_transport(choice, found) == "peer":
        return PeerTransport(arena(), folder, timeout_s=exchange.timeout_s), None
    backend: Backend = "nccl" if device_type == "cuda" else "gloo"
    group = join_group(
        exchange.store,
        name=f"session-{exchange.session}",
        rank=rank,
        size=size,
        backend=backend,
        timeout_s=exchange.timeout_s,
    )
    return CollectiveTransport(group, store=exchange.store, timeout_s=exchange.timeout_s), group


def choose_transport(asked: TransportChoice, places: Sequence[Place]) -> Literal["peer", "collective"]:
    """How processes at ``places`` reach each other.

    Raises:
        PlanError: ``peer`` is asked for and they are not on one host, or a group can't span their devices.
    """
    together = all(place.sees_folder and place.host == places[0].host for place in places)
    if asked == "peer" and not together:
        apart = [rank for rank, p in enumerate(places) if not p.sees_folder or p.host != places[0].host]
        raise PlanError(
            f"ranks {apart} can't write into the memory of rank 0: they are on another host, or do not share its "
            "folder for temporary files; use transport='collective'"
        )
    if asked == "peer" or (asked == "auto" and together):
        return "peer"
    kinds = sorted({place.device_type for place in places})
    if len(kinds) > 1:
        raise PlanError(
            f"one process group can't carry tensors of {kinds}: have trainer and engine on one kind of device"
        )
    return "collective"


def host_id() -> str:
    """What processes of one running machine have in common and others don't: the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
