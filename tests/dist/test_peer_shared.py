"""A trainer and an engine in two processes of this host, on one physical memory."""

from functools import partial

import peer_shared
import pytest
from forked_ranks import outcomes_of

from reshard.arena import Arena

SCENARIOS = ("zero_bytes", "some_in_place", "writing_over_weights", "an_import_that_is_not_passed")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    found = {name: partial(peer_shared.__dict__[name], new_arena=Arena.host) for name in SCENARIOS}
    return outcomes_of(found, world=2)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_shared_memory(outcomes, scenario):
    assert outcomes[scenario] == ""
