"""The contract that every transport keeps, and the checks on tensors that all of them share.

A transport is bound once (`Transport.bind`): addresses are resolved, tables built and uploaded. After that
`BoundTransfer.start` and `BoundTransfer.wait` run a transition with no Python per tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from reshard.errors import LayoutError, StateError
from reshard.plan import Address, Copy, Plan
from reshard.region import Region

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
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


class BoundTransfer(Protocol):
    """A Plan bound to live tensors: what runs each step."""

    @property
    def num_launches(self) -> int:
        """Kernel launches (on the host: calls into the copy library) that one transition takes on this rank."""

    @property
    def staging_bytes(self) -> int:
        """Memory that the transfer itself holds on this rank, beside the tensors of both sides."""

    def start(self, *, stream: int | None) -> None:
        """Begin one transition; on a device it is queued on `stream` (a raw handle) and does not block."""

    def wait(self, *, deadline_s: float) -> None:
        """Block until every byte that this rank needs has arrived; PeerTimeout after `deadline_s` seconds."""

    def close(self) -> None:
        """Release tables, mappings and groups. Closing twice is allowed."""


class Transport(Protocol):
    """A way to move bytes between ranks."""

    @property
    def name(self) -> str:
        """The transport's name in errors and stats."""

    def bind(self, plan: Plan, *, rank: int, source: Endpoint, destination: Endpoint) -> BoundTransfer:
        """Resolve addresses and build tables once. The Endpoints hold checked tensors of this rank."""


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
