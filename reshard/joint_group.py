"""A process group of processes that belong to different worlds: trainer ranks and engine ranks, beside the default
group that either side may have.

torch makes groups of the default group's ranks only, and has no public way to another. This is the way in which it
makes the default group itself, without becoming that.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _abort_process_group, _new_process_group_helper, _world

from reshard.errors import TransportError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from reshard.process_groups import Backend


def join_group(
    store: Store, *, name: str, rank: int, size: int, backend: Backend, timeout_s: float
) -> dist.ProcessGroup:
    """The group ``name`` of ``size`` processes, of which this one is ``rank``. Blocks until all have joined (gloo) or
    until the first collective connects them (NCCL).

    Args:
        store: reached by all of them; borrowed.
        name: that no other group of these processes has.
        timeout_s: for joining, and the longest that an operation may take.

    Raises:
        TransportError: somebody did not join in time, or the backend failed.
    """
    try:
        with _not_split_from_default():
            group, _ = _new_process_group_helper(
                size,
                rank,
                [],
                backend,
                PrefixStore(f"reshard/{name}", store),
                name,  # type: ignore[arg-type]
                timeout=datetime.timedelta(seconds=timeout_s),
                group_desc=name,
            )
    except (RuntimeError, dist.DistError) as error:
        raise TransportError(f"rank {rank} could not join group {name!r} of {size} ranks: {error}") from error
    _world.pg_group_ranks[group] = {member: member for member in range(size)}
    joined: dist.ProcessGroup = group
    return joined


@contextmanager
def _not_split_from_default() -> Iterator[None]:
    """A default group that is bound to a device would be asked to split its communicator, which has other members."""
    default = dist.group.WORLD if dist.is_initialized() else None
    bound = None if default is None else default.bound_device_id
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def leave_group(group: dist.ProcessGroup, *, abort: bool = False) -> None:
    """Take the group down on this process; ``abort``: without waiting for what is in flight."""
    if abort and "nccl" in dist.get_backend(group):
        _abort_process_group(group)
    else:
        dist.destroy_process_group(group)
