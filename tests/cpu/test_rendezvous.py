"""Meetings through a store: one fate for all, payloads, lateness, keys that go again, a store that fails."""

import datetime
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from reshard.errors import PeerTimeout, TransportError
from reshard.rendezvous import Rendezvous
from reshard.step_record import StepRecord

RANKS = (0, 1, 2)


def rendezvous(store: dist.Store, rank: int, name: str = "test") -> Rendezvous:
    return Rendezvous(store, name, ranks=RANKS, record=StepRecord(store, rank=rank, ranks=RANKS))


def together(work: Callable[[int], object], ranks: tuple[int, ...] = RANKS) -> dict[int, object]:
    """Run `work(rank)` on a thread each; results, or the errors that were raised."""
    found: dict[int, object] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except TransportError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def meet(where: Rendezvous, payload: str = "", timeout_s: float = 30) -> dict[int, str]:
    where.arrive("meeting", payload)
    where.wait(timeout_s=timeout_s)
    return where.payloads() if payload else {}


def test_all_meet_again_and_again_and_the_store_does_not_grow():
    store = dist.HashStore()
    places = {rank: rendezvous(store, rank) for rank in RANKS}
    sizes = []
    for number in range(1, 30):
        found = together(lambda rank, number=number: meet(places[rank], f"{rank} in {number}"))
        assert found == {at: {rank: f"{rank} in {number}" for rank in RANKS} for at in RANKS}
        sizes.append(store.num_keys())
    assert len(set(sizes[2:])) == 1
    assert rendezvous(store, 0).number == 29, "a rank that comes back goes on counting where it was"


def test_one_that_does_not_come_is_named_and_comes_late_to_the_same_fate():
    store = dist.HashStore()
    places = {rank: rendezvous(store, rank) for rank in RANKS}
    places[1]._record.enter("counting sheep")
    found = together(lambda rank: meet(places[rank], timeout_s=0.05), (0, 2))
    assert all(type(error) is PeerTimeout for error in found.values())
    match = (
        r"rank 0, meeting 1 of ranks \[0, 1, 2\]: rank 1 did not come; rank [02] gave up after \d\.\d s: waited 0.05 s"
    )
    assert re.match(match + r"\. Nothing was sent; last steps: rank 0: arrived at meeting 1, ", str(found[0]))
    assert "rank 1: counting sheep, 0." in str(found[2])
    with pytest.raises(PeerTimeout, match=r"rank 1, meeting 1 .*: all have come since; rank [02] gave up"):
        meet(places[1])
    assert together(lambda rank: meet(places[rank])) == {rank: {} for rank in RANKS}


def test_who_abandons_a_meeting_fails_it_for_all_at_once_even_before_they_come():
    store = dist.HashStore()
    places = {rank: rendezvous(store, rank) for rank in RANKS}
    places[2].abandon("has no memory left")
    found = together(lambda rank: meet(places[rank], timeout_s=60), (0, 1))
    assert all(type(error) is TransportError for error in found.values())
    assert all("rank 2 has no memory left" in str(error) for error in found.values())
    assert together(lambda rank: meet(places[rank])) == {rank: {} for rank in RANKS}


def test_is_complete_does_not_wait():
    store = dist.HashStore()
    places = {rank: rendezvous(store, rank) for rank in RANKS}
    for rank in (0, 1):
        places[rank].arrive("meeting")
        assert not places[rank].is_complete()
    places[2].arrive("meeting")
    assert all(places[rank].is_complete() for rank in RANKS)


def test_a_process_that_is_gone_is_told_from_one_that_is_slow(tmp_path):
    code = (
        "import sys, torch.distributed as dist; from reshard.step_record import StepRecord;"
        "StepRecord(dist.FileStore(sys.argv[1], 3), rank=1, ranks=(0, 1, 2)).enter('thinking')"
    )
    path = str(tmp_path / "store")
    subprocess.run([sys.executable, "-c", code, path], check=True)
    record = StepRecord(dist.FileStore(path, 3), rank=0, ranks=RANKS)
    record.enter("watching")
    assert record.gone() == [1]
    last = record.read()[1]
    assert last is not None and re.fullmatch(r"thinking, \d+\.\d s ago \(process \d+ on \S+ is gone\)", str(last))
    assert re.search(r"rank 0: watching, \d\.\d s ago; rank 1: thinking.*; rank 2: nothing yet$", record.report())
    place = Rendezvous(dist.FileStore(path, 3), "test", ranks=RANKS, record=record)
    with pytest.raises(TransportError, match=r"ranks \[1, 2\] did not come; .*the process of rank 1 is gone") as caught:
        meet(place, timeout_s=60)
    assert type(caught.value) is TransportError and f"process {os.getpid()}" not in str(caught.value)


def test_a_store_that_fails_is_a_transport_error_and_reports_still_come():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = datetime.timedelta(seconds=2)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout)
    place = rendezvous(store, 0)
    place.arrive("meeting")
    del server
    with pytest.raises(TransportError, match=r"the store that ranks meet at can't be reached \(\w+: .*may be gone"):
        place.wait(timeout_s=1)
    assert place._record.report().startswith("last steps unknown: the store that ranks meet at")
