"""One group over processes of different worlds: two trainers, an engine rank with a world of its own, one with none."""

import datetime

import pytest
import torch
import torch.distributed as dist
from forked_ranks import outcomes_of, together
from transport_suite import Pair, check_case, row_layout

from reshard import Address, CollectiveTransport, DType, Holding, Layout, Region, TensorSpec
from reshard.errors import PlanError, TransportError
from reshard.joint_group import join_group, leave_group
from reshard.vllm.reach import Place, choose_transport

WORLD = 4
TRAINERS = 2
ROWS, COLUMNS = 64, 50


def sharded_to_whole() -> Pair:
    """A matrix by rows over the trainers, whole in bf16 on both engine ranks."""
    spec = TensorSpec("w", (ROWS, COLUMNS), DType.BFLOAT16)
    address = Address("w", 0, (COLUMNS, 1), DType.BFLOAT16)
    whole = [Holding(rank, Region.whole("w", (ROWS, COLUMNS)), address) for rank in range(TRAINERS, WORLD)]
    return Pair(row_layout(ROWS, COLUMNS, TRAINERS), Layout.from_holdings([spec], whole))


def own_world(rank: int, folder: str) -> None:
    """Ranks 0 and 1 train, rank 2 is a world of its own, rank 3 has none. Their ranks there differ from here."""
    timeout = datetime.timedelta(seconds=60)
    if rank < 3:
        name, number, size = ("trainer", rank, TRAINERS) if rank < TRAINERS else ("engine", 0, 1)
        store = dist.FileStore(f"{folder}/{name}", size)
        dist.init_process_group("gloo", store=store, rank=number, world_size=size, timeout=timeout)


def joint(rank: int, folder: str, name: str) -> tuple[dist.ProcessGroup, dist.Store]:
    store = dist.FileStore(f"{folder}/joint", WORLD)
    return join_group(store, name=name, rank=rank, size=WORLD, backend="gloo", timeout_s=60), store


def transitions(rank: int, folder: str) -> None:
    """Labelled weights, twice, in groups that are joined and left one after the other; own worlds work on."""
    own_world(rank, folder)
    for number in range(2):
        group, store = joint(rank, folder, f"session {number}")
        assert (group.rank(), group.size()) == (rank, WORLD)
        transport = CollectiveTransport(group, num_threads=1, store=dist.PrefixStore(str(number), store))
        check_case(sharded_to_whole(), rank, transport, plain_memory)
        if rank < TRAINERS:
            total = torch.tensor([rank + 1])
            dist.all_reduce(total)
            assert total.item() == 3 and dist.get_rank() == rank
        together(rank, folder, f"leave {number}", world=WORLD)
        leave_group(group)


def plain_memory(name: str, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def one_stays_away(rank: int, folder: str) -> None:
    """Joining ends in time, with the group's name."""
    if rank == 3:
        return
    store = dist.FileStore(f"{folder}/joint", WORLD)
    with pytest.raises(TransportError, match=rf"rank {rank} could not join group 'late' of 4 ranks"):
        join_group(store, name="late", rank=rank, size=WORLD, backend="gloo", timeout_s=2)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of({"transitions": transitions, "one stays away": one_stays_away}, world=WORLD)


@pytest.mark.parametrize("name", ["transitions", "one stays away"])
def test_joint_group(outcomes, name):
    assert outcomes[name] == "", outcomes[name]


HERE = Place(host="a", sees_folder=True, device_type="cpu")
ELSEWHERE = Place(host="b", sees_folder=False, device_type="cpu")
OTHER_CONTAINER = Place(host="a", sees_folder=False, device_type="cpu")


@pytest.mark.parametrize(
    ("asked", "places", "chosen"),
    [
        ("auto", [HERE, HERE], "peer"),
        ("auto", [HERE, ELSEWHERE], "collective"),
        ("auto", [HERE, OTHER_CONTAINER], "collective"),
        ("auto", [HERE, Place(host="b", sees_folder=True, device_type="cpu")], "collective"),
        ("peer", [HERE, HERE], "peer"),
        ("collective", [HERE, HERE], "collective"),
    ],
)
def test_processes_of_one_host_write_directly(asked, places, chosen):
    assert choose_transport(asked, places) == chosen


def test_what_can_not_be_reached_is_named():
    with pytest.raises(PlanError, match=r"ranks \[1\] can't write into the memory of rank 0: .*transport='collective'"):
        choose_transport("peer", [HERE, ELSEWHERE])
    on_gpu = Place(host="b", sees_folder=False, device_type="cuda")
    with pytest.raises(PlanError, match=r"one process group can't carry tensors of \['cpu', 'cuda'\]"):
        choose_transport("auto", [HERE, on_gpu])
