"""The contract that every transport keeps, and the checks on tensors that all of them share.

A transport is bound once (`Transport.bind`): addresses are resolved, tables built and uploaded. After that
its methods run a transition with no Python per tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from reshard.errors import LayoutError, PlanError, StateError
from reshard.parts import Parts
from reshard.plan import Address, Copy, Plan
from reshard.region import Region

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
Words: TypeAlias = "npt.NDArray[np.uint64]"
RAW_MEMORY = "uint8"
"""A uint8 tensor stands for raw memory: a Layout may place elements of any dtype in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One rank's live tensors on one side of a transition, by the storage names of its Layout.

    The tensors are borrowed: they must stay alive and in place while the transfer is bound. `addresses` remembers where
    their storages were, so that a re-allocation since binding is caught before anything is written.
    """

    side: str
    tensors: Tensors
    addresses: tuple[int, ...]

    @classmethod
    def of(cls, side: str, tensors: Tensors, used: Iterable[tuple[Address, Region]]) -> Endpoint:
        """Check `tensors` against the Addresses that a Plan uses.

        Raises:
            LayoutError: a storage is missing, has another dtype, or is smaller than the Layout says.
        """
        needed: dict[str, Address] = {}
        for address, region in used:
            seen = needed.get(address.storage)
            if seen is None:
                _check_storage(side, tensors, address)
                needed[address.storage] = address
            _check_bounds(side, local_tensor(tensors[address.storage]), address, region.shape)
        kept = {name: local_tensor(tensors[name]) for name in needed}
        return cls(side=side, tensors=kept, addresses=_storage_addresses(kept))

    def base(self, address: Address) -> int:
        """Absolute address, in bytes, of the first element that `address` names."""
        return self.tensors[address.storage].untyped_storage().data_ptr() + address.offset_bytes

    def check_in_place(self) -> None:
        """Raise StateError if a tensor's memory moved since binding."""
        now = _storage_addresses(self.tensors)
        if now == self.addresses:
            return
        moved = [name for name, a, b in zip(self.tensors, self.addresses, now, strict=True) if a != b]
        raise StateError(
            f"{len(moved)} {self.side} tensors were re-allocated since binding, first {moved[0]!r}; nothing was "
            f"written. "
            "Bind a new Resharder to the new tensors (and keep parameters in place: assign with copy_, not with .data)"
        )


class BoundTransfer(ABC):
    """A Plan bound to live tensors: what runs each step.

    A transition is `begin`, a `push` for each part, `wait`. Methods with a body here suit a transport that moves all
    parts together in `wait` and shares no memory between ranks.
    """

    num_launches: int
    """Kernel launches (on the host: calls into the copy library) that one transition takes on this rank."""
    staging_bytes: int
    """Memory that the transfer itself holds on this rank, beside the tensors of both sides."""
    in_place: frozenset[int] = frozenset()
    """Positions in `rank_copies` of copies that were found at bind to have both ends in the same memory."""

    @abstractmethod
    def begin(self, *, stream: int | None) -> None:
        """Start a transition: from here on the destination may be written. `stream` is a raw handle."""

    def push(self, part: int, *, stream: int | None) -> None:  # noqa: B027
        """The part's source tensors are final, on a device once what is queued on `stream` is done. Never blocks. Each
        part is pushed once before `wait`.
        """

    def wait_part(self, part: int, *, deadline_s: float) -> None:
        """Block until the part is complete on this rank. StateError where all parts travel together."""
        raise StateError("this transport moves all parts together: call wait()")

    @abstractmethod
    def wait(self, *, deadline_s: float) -> None:
        """Block until every byte that this rank needs has arrived; PeerTimeout after `deadline_s` seconds."""

    def queue(self, *, stream: int | None) -> None:
        """Queue a whole transition on a stream that is being captured, and nothing else."""
        raise StateError("this transport has to wait on the host, so it can't be part of a captured CUDA graph")

    def abandon(self) -> None:  # noqa: B027
        """This rank can't take part in the coming transition: count it as failed here, and tell the peers."""

    def release(self, *, deadline_s: float) -> None:  # noqa: B027
        """Generation is over on this rank. Where ranks share memory, block until it is over on those that read this
        rank's weights in place; PeerTimeout names one that goes on.
        """

    def exchange(self, words: Mapping[int, Words], *, deadline_s: float) -> dict[int, Words]:
        """Swap 64-bit words with other ranks, each by its number; a pair swaps arrays of one length."""
        if words:
            raise StateError(f"this transport reaches no other rank, asked to exchange with ranks {sorted(words)}")
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release tables, mappings and groups. Closing twice is allowed."""


class Transport(Protocol):
    """A way to move bytes between ranks."""

    @property
    def name(self) -> str:
        """The transport's name in errors and stats."""

    def bind(
        self,
        plan: Plan,
        *,
        rank: int,
        source: Endpoint,
        destination: Endpoint,
        parts: Parts | None = None,
        graph: bool | None = None,
    ) -> BoundTransfer:
        """Resolve addresses and build tables once.

        Args:
            plan: what to move.
            rank: this process's rank in it.
            source, destination: checked tensors of this rank.
            parts: tensors that are pushed and waited for together; all of them where left out. PlanError from a
                transport that can't.
            graph: True: launch by CUDA graphs, PlanError where that can't be; None: where it saves launches; False:
                never.
        """


def endpoints(plan: Plan, rank: int, source: Tensors, destination: Tensors) -> tuple[Endpoint, Endpoint]:
    """Both sides of `rank`'s part of `plan`, checked against the live tensors."""
    from_source: list[tuple[Address, Region]] = []
    at_destination: list[tuple[Address, Region]] = []
    for c in rank_copies(plan, rank):
        if c.src_rank == rank:
            (from_source if c.hop == 0 else at_destination).append((c.src, c.region))
        if c.dst_rank == rank:
            at_destination.append((c.dst, c.region))
    return (
        Endpoint.of("source", source, from_source),
        Endpoint.of("destination", destination, at_destination),
    )


def rank_copies(plan: Plan, rank: int) -> Sequence[Copy]:
    """The copies that `rank` takes part in; none for a rank of the group that neither Layout names."""
    outside = plan.inputs.ranks is None and rank not in plan.scope
    return () if outside else plan.copies_of(rank)


def source_address(copy: Copy, source: Endpoint, destination: Endpoint) -> int:
    """Absolute address that `copy` reads on its source rank: later hops pass on what the destination holds already."""
    return (source if copy.hop == 0 else destination).base(copy.src)


def refuse_parts_and_graph(name: str, parts: Parts | None, graph: bool | None) -> None:
    """PlanError for the options of `Transport.bind` that a transport which moves all parts together can't serve."""
    if parts is not None and parts.num > 1:
        raise PlanError(
            f"the {name} transport moves all tensors of a transition together: leave parts out, or use the local or "
            "peer transport"
        )
    if graph:
        raise PlanError(f"the {name} transport waits on the host between rounds, so graph=True can't be: leave it out")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard where `tensor` is a DTensor, else `tensor` itself; shares memory."""
    import torch

    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storage_addresses(tensors: Tensors) -> tuple[int, ...]:
    return tuple(tensor.untyped_storage().data_ptr() for tensor in tensors.values())


def _check_storage(side: str, tensors: Tensors, address: Address) -> None:
    if address.storage not in tensors:
        near = ", ".join(sorted(tensors)[:3]) or "none"
        raise LayoutError(
            f"the {side} Layout stores bytes in {address.storage!r} but no such {side} tensor was given "
            f"(have {len(tensors)}: {near}, ...); pass the tensors that the Layout was made from"
        )
    found = str(tensors[address.storage].dtype).removeprefix("torch.")
    if found not in (address.dtype.value, RAW_MEMORY):
        raise LayoutError(
            f"{side} tensor {address.storage!r} is {found} but its Layout says {address.dtype.value}; "
            "make the Layout again after changing a dtype"
        )


def _check_bounds(side: str, tensor: torch.Tensor, address: Address, shape: tuple[int, ...]) -> None:
    if 0 in shape:
        return
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, address.strides, strict=True))
    end = address.offset_bytes + span * address.dtype.itemsize
    size = tensor.untyped_storage().nbytes()
    if address.offset_bytes < 0 or end > size:
        raise LayoutError(
            f"{side} tensor {address.storage!r} holds {size} bytes but its Layout reaches byte {end}; "
            "the tensor was re-created with another shape, or the Layout belongs to another model"
        )
