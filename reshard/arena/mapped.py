"""What imports of another process's memory share: an address, views, and an end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from reshard.arena import view

if TYPE_CHECKING:
    import torch

    from reshard.arena.channel import Credentials


class Mapping(Protocol):
    """A mapping of ``reshard._C``."""

    @property
    def address(self) -> int: ...  # noqa: D102

    @property
    def num_bytes(self) -> int: ...  # noqa: D102

    @property
    def is_open(self) -> bool: ...  # noqa: D102

    def dlpack(self, versioned: bool, /) -> object: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class MappedMemory:
    """Another process's memory, mapped at an address of this one, for as long as it is open."""

    def __init__(self, mapping: Mapping, *, device: int, peer: Credentials) -> None:
        """Made by what receives it."""
        self._mapping = mapping
        self.device = device
        """CUDA ordinal of this process, or -1 for the host."""
        self.peer = peer
        self.address = mapping.address
        self.num_bytes = mapping.num_bytes

    @property
    def is_open(self) -> bool:
        """Whether the memory is mapped."""
        return self._mapping.is_open

    def tensor(
        self, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None, *, offset_bytes: int = 0
    ) -> torch.Tensor:
        """View it as a contiguous tensor; see ``ArenaRegion.tensor``."""
        return view.as_tensor(self, dtype=dtype, shape=shape, offset_bytes=offset_bytes)

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Export it as a one-dimensional uint8 tensor. No stream is waited for."""
        del stream
        view.check_dlpack_request(self.device, dl_device=dl_device, copy=copy)
        return self._mapping.dlpack(max_version is not None and max_version[0] >= 1)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and id."""
        return view.dlpack_device(self.device)

    def close(self) -> None:
        """Unmap it, if it is this process's last import of it. StateError where views are alive."""
        self._mapping.close()

    def __enter__(self) -> Self:
        """Return the memory."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it; after an error it is left to the garbage collector, so that the error is not hidden."""
        if error is None:
            self.close()
