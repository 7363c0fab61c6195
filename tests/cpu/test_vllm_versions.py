"""Versions of vLLM: how the script that tests them reads its reports; plug-in and documents name the same ones."""

import re
from pathlib import Path

import pytest
from vllm_versions import Outcome, torch_pin

from reshard.vllm.plugin import TESTED_VLLM

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
REPORT = """<testsuites><testsuite name="pytest" tests="5">
<testcase classname="tests.a" name="test_one"/>
<testcase classname="tests.a" name="test_two"><system-out>words</system-out></testcase>
<testcase classname="tests.a" name="test_three"><skipped message="no such kernel"/></testcase>
<testcase classname="tests.a" name="test_four"><failure message="1 is not 2"/></testcase>
<testcase classname="tests.b" name="test_five"><error message="no engine"/></testcase>
</testsuite></testsuites>"""


def test_a_report_becomes_a_row():
    outcome = Outcome.read(REPORT)
    assert outcome == Outcome(2, ("tests.a::test_three",), ("tests.a::test_four", "tests.b::test_five"))
    assert outcome.row("0.26.0", "2.11.0") == "| 0.26.0 | 2.11.0 | 2 passed, 1 skipped, 2 failed |"
    assert Outcome(7, (), ()).row("0.32.0", "2.13.0") == "| 0.32.0 | 2.13.0 | 7 passed |"


@pytest.mark.parametrize(
    ("requires", "pin"),
    [
        (["numpy", 'torch==2.11.0+cpu; sys_platform != "none"', 'torch==2.10.0; sys_platform == "none"'], "2.11.0"),
        (["torch>=2.9"], None),
        (["torchaudio==2.11.0"], None),
    ],
)
def test_the_torch_that_a_version_was_built_for_is_found(requires, pin):
    assert torch_pin(requires) == pin


def test_the_range_that_the_plug_in_names_is_the_one_of_the_table():
    versions = [tuple(map(int, found)) for found in re.findall(r"^\| (\d+)\.(\d+)\.\d+ \| 2\.", PAGE, flags=re.M)]
    first, last = TESTED_VLLM
    assert sorted(versions) == [(first[0], minor) for minor in range(first[1], last[1] + 1)]
