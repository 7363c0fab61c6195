"""Pushes of several trainer ranks: whatever ends one on a rank ends it on all, with the words that say why."""

import os
import re
from collections.abc import Callable

import pytest
import torch.distributed as dist
from forked_ranks import launch, outcomes_of, together

from reshard.errors import PeerTimeout, StateError, TransportError
from reshard.vllm.exchange import Exchange
from reshard.vllm.turns import Turns

NUM_RANKS = 3
LONG_S = 60.0
GONE = "trainer rank 0 is gone, which serves the store .*: start trainers and engine again, and connect anew"


def meet(rank: int, folder: str) -> Turns:
    """Rank 0 serves the store, as it does in a session."""
    board = dist.FileStore(f"{folder}/board", NUM_RANKS)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        board.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(board.get("port")), wait_for_workers=False)
    return Turns(Exchange(store, session="s", timeout_s=LONG_S))


def lead(turns: Turns, *, refusal: str = "", failure: str = "") -> None:
    with turns.lead() as opened:
        if refusal:
            raise StateError(refusal)
        opened()
        if failure:
            raise TransportError(failure)


def ended_with(error: type[Exception], words: str, push: Callable[[], object]) -> None:
    with pytest.raises(error, match=words):
        push()


def errors_reach_all(rank: int, folder: str) -> None:
    """A refusal runs nowhere; a failure after the opening is everybody's; the next push works."""
    turns, runs = meet(rank, folder), []
    follow = lambda: turns.follow(lambda: runs.append(1), deadline_s=LONG_S)  # noqa: E731
    if rank == 0:
        ended_with(StateError, "^2 requests are in flight$", lambda: lead(turns, refusal="2 requests are in flight"))
        ended_with(TransportError, "^rank 1 is gone$", lambda: lead(turns, failure="rank 1 is gone"))
        lead(turns)
    else:
        ended_with(StateError, "^2 requests are in flight$", follow)
        assert not runs
        ended_with(TransportError, "^the push failed, as trainer rank 0 saw it: rank 1 is gone$", follow)
        follow()
        assert len(runs) == 2
    together(rank, folder, "done", world=NUM_RANKS)


def a_late_rank(rank: int, folder: str) -> None:
    """Rank 2 comes when the push has failed without it: it is told so, and takes part in the next."""
    turns, runs = meet(rank, folder), []

    def run() -> None:
        runs.append(1)
        if rank == 2 and len(runs) == 1:
            raise TransportError("the others gave up on it")

    if rank == 0:
        ended_with(TransportError, "no rank 2", lambda: lead(turns, failure="no rank 2"))
    elif rank == 1:
        ended_with(TransportError, "no rank 2", lambda: turns.follow(run, deadline_s=LONG_S))
    together(rank, folder, "failed", world=NUM_RANKS)
    if rank == 2:
        ended_with(TransportError, "the others gave up on it", lambda: turns.follow(run, deadline_s=LONG_S))
    lead(turns) if rank == 0 else turns.follow(run, deadline_s=LONG_S)
    assert len(runs) == (0 if rank == 0 else 2)
    together(rank, folder, "done", world=NUM_RANKS)


def nobody_leads(rank: int, folder: str) -> None:
    """Those that wait for rank 0 give up at their deadline, and can try again."""
    turns = meet(rank, folder)
    if rank > 0:
        words = "waited 0.3 s for trainer rank 0 to push: check that all trainer ranks make the same calls"
        ended_with(PeerTimeout, words, lambda: turns.follow(lambda: None, deadline_s=0.3))
    together(rank, folder, "gave up", world=NUM_RANKS)
    lead(turns) if rank == 0 else turns.follow(lambda: None, deadline_s=LONG_S)
    together(rank, folder, "done", world=NUM_RANKS)


SCENARIOS = {f.__name__: f for f in (errors_reach_all, a_late_rank, nobody_leads)}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of(SCENARIOS, world=NUM_RANKS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_pushes_stay_in_step(outcomes, name):
    assert outcomes[name] == ""


def rank_zero_dies(rank: int, folder: str) -> None:
    """With its engine open: nobody waits for the end of that push."""
    turns = meet(rank, folder)
    if rank == 0:
        with turns.lead() as opened:
            opened()
            together(rank, folder, "open", world=NUM_RANKS)
            os._exit(3)
    with pytest.raises(TransportError) as caught:
        turns.follow(lambda: together(rank, folder, "open", world=NUM_RANKS), deadline_s=LONG_S)
    assert re.match(
        "trainer rank 0 is gone, which serves the store.*: start trainers and engine again", str(caught.value)
    )


def test_the_death_of_rank_0_ends_the_others(tmp_path):
    assert launch(rank_zero_dies, str(tmp_path), world=NUM_RANKS) == [3, 0, 0]
