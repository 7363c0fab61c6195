"""Live tensors of one process as tensors of another, on the same physical memory.

The owner lends tensors that lie in its arena; the borrower maps their regions and gets tensors of the same names,
dtypes, shapes and strides. Neither side may release the memory while it is lent (see `reshard.arena.share`), and
nothing orders one side's reads after the other's writes: that is what a `Resharder` on both sides is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from reshard.arena.arena import Arena, ArenaRegion
from reshard.arena.channel import Channel, Deadline
from reshard.arena.share import ImportedRegion, RegionShare, receive_region, send_region
from reshard.dtype import DType
from reshard.errors import LayoutError, TransportError

if TYPE_CHECKING:
    import torch

TENSORS_A_PACKET = 200
Record: TypeAlias = "tuple[str, int, int, str, list[int], list[int]]"
"""Name, index of the region, byte offset in it, dtype, shape, strides in elements."""


@dataclass(slots=True)
class Borrowed:
    """Another process's tensors, by name, and the regions of it that they lie in."""

    tensors: dict[str, torch.Tensor]
    regions: tuple[ImportedRegion, ...]

    def close(self) -> None:
        """Drop the tensors and unmap the regions. StateError where someone else still holds one of the tensors."""
        self.tensors.clear()
        for region in self.regions:
            region.close()


def lend_tensors(
    channel: Channel, tensors: Mapping[str, torch.Tensor], *, arena: Arena, timeout_s: float
) -> list[RegionShare]:
    """Send tensors to the peer, which calls `borrow_tensors`. End the shares when the peer has closed what it borrowed.

    Raises:
        LayoutError: a tensor does not lie in `arena`.
        PeerTimeout, TransportError, DeviceError, StateError: as `send_region`.
    """
    deadline = Deadline(timeout_s)
    regions: dict[int, ArenaRegion] = {}
    records: list[Record] = []
    for name, tensor in tensors.items():
        region = arena.region_at(tensor.data_ptr())
        if region is None:
            raise LayoutError(
                f"tensor {name!r} can't be lent: its memory is not the arena's; allocate it there "
                "(arena.allocate(...).tensor(...), or the arena's pool for PyTorch)"
            )
        regions.setdefault(region.id, region)
        offset = tensor.data_ptr() - region.address
        dtype = DType.parse(str(tensor.dtype)).value
        index = list(regions).index(region.id)
        records.append((name, index, offset, dtype, list(tensor.shape), list(tensor.stride())))
    what = f"{channel.peer} to take {len(records)} tensors"
    head: dict[str, object] = {"num_regions": len(regions), "num_tensors": len(records)}
    channel.send("lend", head, timeout_s=deadline.remaining_s(what))
    shares = [
        send_region(channel, region, arena=arena, timeout_s=deadline.remaining_s(what)) for region in regions.values()
    ]
    for start in range(0, len(records), TENSORS_A_PACKET):
        body: dict[str, object] = {"tensors": records[start : start + TENSORS_A_PACKET]}
        channel.send("tensors", body, timeout_s=deadline.remaining_s(what))
    return shares


def borrow_tensors(channel: Channel, *, arena: Arena, timeout_s: float) -> Borrowed:
    """Receive what the peer lends; `arena` says on which device, its budget is not charged.

    Raises:
        PeerTimeout, TransportError, DeviceError: as `receive_region`.
    """
    deadline = Deadline(timeout_s)
    what = f"tensors from {channel.peer}"
    head, _ = channel.receive("lend", timeout_s=deadline.remaining_s(what))
    match head:
        case {"num_regions": int(num_regions), "num_tensors": int(num_tensors)}:
            pass
        case _:
            raise TransportError(f"{channel.peer} announced tensors in a way that can't be read: {head}")
    regions = [receive_region(channel, arena=arena, timeout_s=deadline.remaining_s(what)) for _ in range(num_regions)]
    found: dict[str, torch.Tensor] = {}
    while len(found) < num_tensors:
        body, _ = channel.receive("tensors", timeout_s=deadline.remaining_s(what))
        entries = body.get("tensors")
        for entry in entries if isinstance(entries, list) and entries else [None]:
            name, tensor = _view(entry, regions)
            found[name] = tensor
    return Borrowed(found, tuple(regions))


def _view(entry: object, regions: Sequence[ImportedRegion]) -> tuple[str, torch.Tensor]:
    import torch

    match entry:
        case [str(name), int(index), int(offset), str(dtype), list(shape), list(strides)] if index < len(regions):
            kind: torch.dtype = torch.__dict__[DType(dtype).value]
            dims = [(int(n), int(s)) for n, s in zip(shape, strides, strict=True)]
            span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in dims)
            flat = regions[index].tensor(kind, (span,), offset_bytes=offset)
            return name, flat.as_strided([n for n, _ in dims], [s for _, s in dims])
    raise TransportError(f"a peer described a tensor in a way that can't be read: {entry!r}")
