"""The tests of the planner catch every deliberate fault of ``tests/break_planner.py``."""

import break_planner
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("fault", break_planner.FAULTS, ids=lambda fault: fault.what.replace(" ", "-"))
def test_fault_is_caught(fault):
    assert break_planner.survives(fault) is not None, "no test fails"
