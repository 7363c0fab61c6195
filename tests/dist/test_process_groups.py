"""Process groups on four gloo processes: their life, lists that differ, ranks that are late, never come, or die."""

import datetime
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from reshard import Mesh, make_groups
from reshard.errors import LayoutError, PeerTimeout, StateError, TransportError
from reshard.groups import Communicator
from reshard.process_groups import ProcessGroups

WORLD = 4
PAIRS = (Communicator("left[0,1]", (0, 1)), Communicator("right[2,3]", (2, 3)))


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timeout)
    for scenario in (life, lists_that_differ, a_rank_that_is_late, a_killed_rank):
        scenario(rank)
    Path(folder, f"finished-{rank}").touch()
    os._exit(0)


def make(communicators=PAIRS, *, timeout_s: float = 30) -> ProcessGroups:
    return ProcessGroups(communicators, backend="gloo", timeout_s=timeout_s)


def life(rank: int) -> None:
    groups = make_groups(Mesh({"pp": 1, "dp": 1, "tp": 4}), tp=2)
    found = make(groups.communicators())
    mine = groups.micro_dp[0] if rank in groups.micro_dp[0] else groups.micro_dp[1]
    assert mine in ((0, 1), (2, 3))
    group = found.group(mine)
    assert found.group(reversed(mine)) is group is found.find(mine)
    assert group.name == f"micro_dp[{mine[0]},{mine[1]}]" == group.handle.group_desc
    assert [g.name for g in found.groups] == ["world", f"generate_tp[{rank % 2},{rank % 2 + 2}]", group.name]
    assert found.world.ranks == (0, 1, 2, 3) == found.group(range(4)).ranks
    word = torch.tensor([float(rank)])
    dist.all_reduce(word, group=group.handle)
    assert word.item() == sum(mine)
    with pytest.raises(LayoutError, match=rf"rank {rank} belongs to no group of ranks \[1, 2\]; it has group 'world'"):
        found.group((2, 1))
    handles = [g.handle for g in found.groups]
    found.create(groups.communicators())
    assert [g.handle for g in found.groups] == handles, "asking again made new groups"
    found.create([Communicator("late[1,2]", (1, 2))])
    found.create([Communicator("late[1,2]", (1, 2)), Communicator("later[0,3]", (3, 0))])
    assert (found.find((1, 2)) is not None) == (rank in (1, 2)) != (found.find((0, 3)) is not None)
    found.close()
    found.close()
    steps = {rank: last.step for rank, last in found.record.read().items()}
    assert steps[rank] == "taking down group 'world'", "groups are destroyed last created first"
    with pytest.raises(StateError, match="closed: make new ones"):
        found.group(mine)
    with make() as again:
        assert again.groups[1].name == ("left[0,1]" if rank < 2 else "right[2,3]")
    with pytest.raises(ZeroDivisionError), make():
        raise ZeroDivisionError


def lists_that_differ(rank: int) -> None:
    other = (PAIRS[0], Communicator("right[1,3]", (1, 3)))
    match = r"ranks \[2\] list other groups than rank 0: where rank 0 has right\[2,3\] of \[2, 3\], rank 2 has "
    with pytest.raises(LayoutError, match=match + r"right\[1,3\] of \[1, 3\]"):
        make(other if rank == 2 else PAIRS)
    with pytest.raises(LayoutError, match=r"where rank 0 has 3 groups, rank 1 has 2 groups\. Make the list"):
        make(PAIRS[:1] if rank == 1 else PAIRS)
    outside = Communicator("odd[1,7]", (1, 7))
    message = r"group 'odd\[1,7\]' has ranks \[7\], but the world has ranks 0 to 3"
    kind = LayoutError if rank == 1 else TransportError
    with pytest.raises(kind, match=message if rank == 1 else "rank 1 has a list of groups that can't be: " + message):
        make((outside,) if rank == 1 else PAIRS)
    with pytest.raises(LayoutError, match=r"has ranks \[0, 0\]: expected one or more ranks, each once"):
        make((Communicator("twice", (0, 0)),))
    with pytest.raises(LayoutError, match="several groups are named 'a'"):
        make((Communicator("a", (0, 1)), Communicator("a", (2, 3))))
    with make() as groups:
        assert len(groups.groups) == 2, "earlier failures leave nothing behind"


def a_rank_that_is_late(rank: int) -> None:
    """Rank 1 comes when the others have given up on it, gets their error at once, and then is in step with them."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["gave up 0", "gave up 2", "gave up 3"])
    missing = r"(rank 1|ranks \[.*1.*\]) did not come; .*waited 2 s.*rank 1: taking down group"
    match = r"all have come since; rank \d gave" if rank == 1 else missing
    with pytest.raises(PeerTimeout, match=rf"rank {rank}, creation of groups \d+ of ranks \[0, 1, 2, 3\]: {match}"):
        make(timeout_s=2)
    store.set(f"gave up {rank}", "")
    with make() as groups:
        assert groups.groups[1].ranks == ((0, 1) if rank < 2 else (2, 3))


def a_killed_rank(rank: int) -> None:
    with make():
        pass
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(TransportError) as caught:
        make(timeout_s=120)
    message = str(caught.value)
    assert re.search(
        r"creation of groups \d+ of ranks .*: rank 1 did not come; .*the process of rank 1 is gone", message
    )
    assert re.search(r"rank 1: taking down group 'world', \d+\.\d s ago \(process \d+ on \S+ is gone\)", message)
    assert time.monotonic() - begin < 100, "the dead rank was found by the deadline only"


def test_process_groups(tmp_path):
    """All scenarios in one start of the processes, the one that kills a rank last."""
    context = mp.spawn(worker, args=(str(tmp_path),), nprocs=WORLD, join=False)
    for process in context.processes:
        process.join(250)
    codes = [process.exitcode for process in context.processes]
    if codes != [0, -signal.SIGKILL, 0, 0]:
        context.join()
    assert codes == [0, -signal.SIGKILL, 0, 0]
    assert {f"finished-{rank}" for rank in (0, 2, 3)} <= {path.name for path in tmp_path.iterdir()}
