"""The shape of the code: one-way imports, small files and functions, no broad except, documents that tell the truth."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
PYTHON = [ROOT / f for f in TRACKED if f.endswith(".py") and (ROOT / f).exists()]
NATIVE = [ROOT / f for f in TRACKED if f.endswith((".h", ".cpp", ".cu", ".cuh")) and (ROOT / f).exists()]
PAGES = [ROOT / f for f in TRACKED if f.endswith(".md") and (ROOT / f).exists()]
TOP_LEVEL = {
    *("pyproject.toml", "setup.py", "csrc", "reshard", "hybrid", "algos", "bench", "tests", "README.md"),
    *("Makefile", "docs", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"),
}
# Modules of reshard that may import torch; all others plan: the standard library, numpy and each other.
WITH_TORCH = {
    *(
        "checkpoint_form",
        "loader_layout",
        "loader_tracer",
        "oracle",
        "quant",
        "resharder",
        "spec_transformers",
        "strided_view",
        "table",
        "joint_group",
        "torch_layout",
    ),
    *("process_groups", "triton_checksum", "triton_copy", "triton_kernels", "verify"),
}
PURE = sorted(p.stem for p in (ROOT / "reshard").glob("*.py") if p.stem not in WITH_TORCH)
FORBIDDEN = {"reshard": {"hybrid", "algos", "bench"}, "hybrid": {"algos", "bench"}, "algos": {"bench"}}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of the packages that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return names


def test_top_level_holds_what_the_design_names_and_nothing_else():
    found = {f.split("/")[0] for f in TRACKED if f and not f.startswith(".")}
    assert found == TOP_LEVEL


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_imports_run_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    wrong = {n for n in imported(ast.parse(path.read_text())) if n.split(".")[0] in FORBIDDEN.get(package, set())}
    assert not wrong, f"{relative(path)} imports {sorted(wrong)}: arrows run algos -> hybrid -> reshard"


@pytest.mark.parametrize("name", PURE)
def test_planning_modules_import_no_torch(name):
    tree = ast.parse((ROOT / "reshard" / f"{name}.py").read_text())
    for node in [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]:
        node.body = []
    roots = {n.split(".")[0] for n in imported(tree)}
    assert not roots & {"torch", "triton", "vllm", "transformers"}, f"reshard/{name}.py is a planning module"


def test_importing_initialises_no_device_and_loads_no_framework():
    code = (
        "import sys, reshard; reshard.make_plan; assert 'torch' not in sys.modules, 'reshard imported torch';"
        "import reshard._C, torch; assert not torch.cuda.is_initialized(); assert 'torch.distributed.fsdp' not in "
        "sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", PYTHON + NATIVE, ids=relative)
def test_files_are_small(path):
    assert path.read_text().count("\n") <= MAX_FILE_LINES, f"{relative(path)} is due to be split"


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_functions_are_small_and_excepts_are_narrow(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno
            assert lines <= MAX_FUNCTION_LINES, f"{relative(path)}:{node.lineno} {node.name} has {lines} lines"
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or getattr(node.type, "id", "") in {"Exception", "BaseException"}
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            assert not broad or raises, f"{relative(path)}:{node.lineno} swallows every error"


@pytest.mark.parametrize("path", [p for p in PYTHON if "tests" in p.parts], ids=relative)
def test_every_test_can_fail(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
            continue
        checks = [
            inner
            for inner in ast.walk(node)
            if isinstance(inner, ast.Assert)
            or (isinstance(inner, ast.Call) and re.search(r"raises|assert|check|expect", ast.dump(inner.func)))
        ]
        assert checks, f"{relative(path)}:{node.lineno} {node.name} asserts nothing"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_pages_name_files_that_exist(page):
    text = page.read_text()
    links = [t for t in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in t and not t.startswith("mailto:")]
    for target in links:
        assert (page.parent / target).exists(), f"{relative(page)} links to {target}, which is not there"
    prefixes = "|".join(sorted(t for t in TOP_LEVEL if "." not in t))
    for target in re.findall(rf"`((?:{prefixes})/[\w./-]+\.(?:py|md|h|cpp|cu|cuh|json|pyi|yaml|png))`", text):
        assert (ROOT / target).exists(), f"{relative(page)} names {target}, which is not there"


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_readme_is_short_and_its_code_prints_what_it_says(tmp_path):
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") < 120
    blocks = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", text, flags=re.DOTALL)
    assert blocks and len(blocks) == len(readme_blocks()), "each Python block of the README is followed by its output"
    for code, output in blocks:
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env=None
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == output.strip()
