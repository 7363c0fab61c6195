"""Show that the tests catch faults: break the planner in one way after another and run its tests against each.

    python tests/break_planner.py [NUMBER ...]

Every fault is a small edit of a copy of ``reshard``; the checkout is not touched. Exits with 1 when the tests let a
fault pass. The suite does the same, in ``tests/cpu/test_broken_planner.py``.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLANNER = ("test_planner.py", "test_layout_cases.py", "test_plan_properties.py")


class Fault(NamedTuple):
    what: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...] = PLANNER


FAULTS = [
    Fault(
        "a rank fetches what it holds",
        "planner_class",
        "local = np.where(source.by_rank[at] == wanted",
        "local = np.where(source.by_rank[at] < 0",
    ),
    Fault(
        "the wrong holder sends",
        "planner_class",
        "demand.first_near[at] + turn % num_near)",
        "(demand.first_near[at] + turn % num_near + 1) % len(self.source.holding))",
    ),
    Fault(
        "one replica sends everything",
        "planner_class",
        "instance * size + demand.ordinal[at] + rounds + self.seed + self.pieces",
        "0 * self.pieces",
    ),
    Fault("near replicas are not preferred", "planner_class", "outside = last == first", "outside = last >= first"),
    Fault(
        "followers copy from the wrong leader",
        "planner_class",
        "demand.team_first[at] + leader,",
        "demand.team_first[at] + leader + 1,",
    ),
    Fault(
        "leaders don't change",
        "planner_class",
        "leader = (instance * num_teams + demand.team[at] + rounds + self.seed) % team_size",
        "leader = 0 * instance",
    ),
    Fault("a second holding takes another dtype's bits", "planner_class", " | (dtype[1:] != dtype[:-1])", ""),
    Fault(
        "a second holding copies before its first arrived",
        "planner_class",
        "self.rows.dst[row_at], hop + 1,",
        "self.rows.dst[row_at], hop,",
    ),
    Fault(
        "parts of a cut tensor overlap",
        "planner_class",
        "low + extent * (part + 1) // num_parts",
        "low + extent * (part + 1) // num_parts + (part == 0)",
    ),
    Fault(
        "offsets ignore where the holding starts",
        "planner_table",
        "copies.start - first.boxes_start[first.box_of[row]]",
        "copies.start - 0 * first.boxes_start[first.box_of[row]]",
    ),
    Fault(
        "offsets count elements, not bytes",
        "planner_table",
        "(steps * own_strides).sum(axis=1) * ITEMSIZES[dtype]",
        "(steps * own_strides).sum(axis=1)",
    ),
    Fault(
        "neighbours merge across different boxes",
        "boxes",
        "joins &= (start[1:, d] == start[:-1, d]) & (stop[1:, d] == stop[:-1, d])",
        "joins &= True",
    ),
    Fault("overlapping boxes pass for disjoint ones", "boxes", "return bool((first == second).all())", "return True"),
    Fault("a region that nobody holds is left out", "planner", "        if gaps:", "        if False:"),
    Fault(
        "equal addresses in other memory pass for in place", "planner_table", "if not self.same_memory:", "if False:"
    ),
    Fault(
        "a plan for one rank numbers sends anew",
        "planner_class",
        "return everything\n    touched",
        "return everything[:1]\n    touched",
    ),
    Fault(
        "a rank gets tied tensors once each",
        "plan_names",
        "pairs if len(used) == len(pairs) else _joined(pairs)",
        "pairs",
    ),
    Fault(
        "the certificate numbers nodes anew",
        "planner",
        "zip(places.node_names, entered.tolist(), strict=True)",
        "enumerate(entered.tolist())",
    ),
    Fault(
        "FSDP shards of tensor parallel ranks lie in rank order",
        "parallel_layout",
        'coordinates.get("tp", zeros) * self.num_fsdp + fsdp',
        'fsdp * self.num_tp + coordinates.get("tp", zeros)',
        ("test_parallel_fsdp.py",),
    ),
    Fault(
        "FSDP cuts even chunks",
        "parallel_cuts",
        "max(math.ceil(self.num_rows / num_chunks), 1)",
        "max(self.num_rows // num_chunks, 1)",
        ("test_parallel_fsdp.py",),
    ),
    Fault(
        "experts that are left over go to the last rank",
        "parallel_cuts",
        "early = further * (base + 1)",
        "early = 0 * further",
        ("test_parallel_vllm.py",),
    ),
    Fault(
        "fused queries, keys and values are not interleaved",
        "parallel_cuts",
        "first = group * group_rows + shift",
        "first = group * rows + shift * groups",
        ("test_layout_cases.py",),
    ),
    Fault(
        "different elements may share bytes",
        "planner",
        "    check_no_overlaps(destination, scope)\n",
        "",
    ),
    Fault(
        "boxes that run over the end of a row pass for apart",
        "planner_hazards",
        "apart & (reach[:, 1:] <= wider[:, :-1]).all(axis=1)",
        "apart",
    ),
]


def survives(fault: Fault) -> str | None:
    """The test that catches the fault, or None when all pass."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            ROOT / "reshard", Path(folder) / "reshard", ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
        path = Path(folder) / "reshard" / f"{fault.module}.py"
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise SystemExit(
                f"{fault.what!r}: expected {fault.old!r} once in {path.name}, found it {text.count(fault.old)} times"
            )
        path.write_text(text.replace(fault.old, fault.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
        command += ["--noconftest", "-m", "not slow", *(str(ROOT / "tests" / "cpu" / test) for test in fault.tests)]
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if result.returncode not in (0, 1):
        raise SystemExit(f"{fault.what!r}: pytest could not run\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    failed = re.search(r"^FAILED \S*?::(\S+)", result.stdout, re.MULTILINE)
    return failed.group(1) if failed else None


def main() -> None:
    chosen = [FAULTS[int(number) - 1] for number in sys.argv[1:]] or FAULTS
    passed = 0
    for number, fault in enumerate(chosen, 1):
        caught = survives(fault)
        passed += caught is None
        print(f"{number:2}. {fault.what}: {'NOT CAUGHT' if caught is None else f'caught by {caught}'}", flush=True)
    print(f"{len(chosen) - passed} of {len(chosen)} faults caught")
    sys.exit(1 if passed else 0)


if __name__ == "__main__":
    main()
