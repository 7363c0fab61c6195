"""Comparison of both ends of a transition, element by element: slow, exact, and it names the first difference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.dtype import DType
from reshard.errors import VerifyError
from reshard.plan import Address, Plan
from reshard.transports.base import rank_copies

if TYPE_CHECKING:
    import torch

    from reshard.transports.base import Endpoint


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of `dtype`."""
    import torch

    found: torch.dtype = torch.__dict__[dtype.value]
    return found


def box_view(tensor: torch.Tensor, address: Address, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of `shape` on the storage of `tensor`, where `address` says; shares memory, copies nothing."""
    import torch

    empty = torch.empty(0, dtype=torch_dtype(address.dtype), device=tensor.device)
    return empty.set_(tensor.untyped_storage(), address.offset_bytes // address.dtype.itemsize, shape, address.strides)


def verify_local_copies(plan: Plan, rank: int, source: Endpoint, destination: Endpoint) -> int:
    """Check that each copy with both ends on `rank` holds its source's values, cast to the destination's dtype.

    Returns the bytes of destination compared. Values compare by their bits, NaNs as one value.

    Raises:
        VerifyError: names the tensor, its canonical index and both values.
    """
    compared = 0
    for c in rank_copies(plan, rank):
        if not c.is_local or c.region.is_empty:
            continue
        shape = c.region.shape
        sent = box_view(source.tensors[c.src.storage], c.src, shape)
        found = box_view(destination.tensors[c.dst.storage], c.dst, shape)
        expected = sent.to(found.dtype)
        difference = _difference(c.region.name, c.region.start, expected, found)
        if difference is not None:
            raise VerifyError(difference)
        compared += c.written_bytes
    return compared


def _differing(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Mask, flat, of elements whose bits differ and that are not both NaN (NaNs have many bit patterns)."""
    import torch

    width = expected.element_size()
    a, b = (t.contiguous().reshape(-1).view(torch.uint8).reshape(-1, width) for t in (expected, found))
    differs = (a != b).any(dim=1)
    if expected.dtype.is_floating_point and bool(differs.any()):
        differs &= ~(expected.float().isnan() & found.float().isnan()).reshape(-1)
    return differs


def _difference(name: str, start: tuple[int, ...], expected: torch.Tensor, found: torch.Tensor) -> str | None:
    import torch

    differs = _differing(expected, found)
    if not bool(differs.any()):
        return None
    first = int(differs.nonzero()[0])
    local = torch.unravel_index(torch.tensor(first), expected.shape)
    index = tuple(int(i) + s for i, s in zip(local, start, strict=True))
    return (
        f"{name}{list(index)}: the destination holds {found.reshape(-1)[first].item()!r}, the source says "
        f"{expected.reshape(-1)[first].item()!r}; {int(differs.sum())} of {differs.numel()} elements differ"
    )
