"""Scripts that a fork server runs end, speak and are cut short as they would in an interpreter of their own."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from fork_server import ForkServer


@pytest.fixture(scope="module")
def server():
    with ForkServer(["colorsys"], changeable=["SAID"], environment=os.environ | {"SAID": "before"}) as server:
        yield server


def script(folder: Path, code: str) -> Path:
    path = folder / "script.py"
    path.write_text(code)
    return path


@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no such thing')", 1, "no such thing"),
        ("raise ValueError('a wrong value')", 1, "ValueError: a wrong value"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(lambda: print('last words', file=sys.stderr))", 0, "last words"),
    ],
)
def test_codes_and_errors_come_back(server, tmp_path, code, expected, words):
    done = server.run(script(tmp_path, code), timeout=60)
    assert done.returncode == expected and words in done.stderr, done
    assert words or not done.stderr


def test_every_script_begins_anew_as_the_main_module(server, tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 'of the same folder'")
    code = (
        "import colorsys, os, sys, beside\n"
        "assert not vars(colorsys).get('changed')\n"
        "colorsys.changed = True\n"
        "is_main = sys.modules['__main__'].__file__ == __file__\n"
        "print(__name__, sys.argv[1:], beside.VALUE, os.environ['SAID'], is_main)\n"
    )
    for changes, said in (({}, "before"), ({"SAID": "now"}, "now"), ({}, "before")):
        done = server.run(script(tmp_path, code), "one", "two", timeout=60, **changes)
        assert done.stdout == f"__main__ ['one', 'two'] of the same folder {said} True\n", done


def test_a_late_script_is_killed_with_its_children_and_its_output_kept(server, tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "print('so far', flush=True)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        server.run(script(tmp_path, code), timeout=5)
    assert caught.value.stdout == b"so far\n"
    stat = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    assert server.run(script(tmp_path, "print('next')"), timeout=60).stdout == "next\n"


def test_variables_that_imports_read_are_refused(server, tmp_path):
    with pytest.raises(ValueError, match=r"\['OMP_NUM_THREADS'\] may be read by imports already"):
        server.run(script(tmp_path, ""), timeout=60, OMP_NUM_THREADS="2")


def test_a_server_that_can_not_import_says_so():
    with pytest.raises(RuntimeError, match=r"(?s)ended with code 1: .*no_such_module"):
        ForkServer(["no_such_module"], changeable=[], environment=dict(os.environ))
