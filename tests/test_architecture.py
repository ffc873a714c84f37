"""Rules about the whole tree that no single module can keep: layers, imports, sizes, paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fp4_plugin"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
TEXT_SUFFIXES = {
    ".args", ".cff", ".cfg", ".csv", ".in", ".json", ".md", ".patch", ".py", ".sbatch", ".sh",
    ".toml", ".txt", ".yaml", ".yml", "",
}  # fmt: skip
# A home, root or work folder of one machine, or a file URL. Spelt so that this file passes.
MACHINE_PATH = re.compile(r"(?<![\w.}/-])/(?:home|root|work|Users)/\w|file:" + "//")


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_point_downwards_only():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


IMPORT_ALONE = """
import importlib.abc, sys

BLOCKED = {"accelerate", "apex", "deepspeed", "megatron", "transformer_engine", "transformers",
           "triton"}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
        return None

import torch
import torch.nn.functional, torch.distributed, torch.library, torch.optim
SEEN = [torch, torch.Tensor, torch.nn, torch.nn.Linear, torch.nn.Module, torch.nn.functional,
        torch.distributed, torch.optim, torch.autograd, torch.library]
def state():
    return {owner.__name__: dict(vars(owner)) for owner in SEEN}

before = state()
sys.meta_path.insert(0, Blocker())
import fp4_plugin
import fp4_plugin.cli.main
after = state()
changes = []
for owner, attributes in before.items():
    now = after[owner]
    # A submodule that somebody imports appears as an attribute of its package: that is no change.
    new = [n for n in now.keys() - attributes.keys() if type(now[n]).__name__ != "module"]
    old = [n for n, value in attributes.items() if n not in now or now[n] is not value]
    changes += [f"{owner}.{name}" for name in (*new, *old)]
assert not changes, changes
assert not [name for name in sys.modules if name.split(".")[0] in BLOCKED]
print("unchanged")
"""


def test_importing_needs_no_framework_and_leaves_torch_as_it_was():
    command = [sys.executable, "-W", "error", "-c", IMPORT_ALONE]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "unchanged"


@pytest.mark.parametrize("path", MODULES, ids=_id)
def test_module_says_what_it_is_and_what_it_offers(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "no module docstring"
    if all(isinstance(node, (ast.Expr, ast.ImportFrom)) for node in tree.body):
        return  # a package that defines nothing
    targets = [ast.unparse(t) for node in tree.body for t in _assignment_targets(node)]
    assert "__all__" in targets, "no __all__"


def _assignment_targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def test_every_folder_of_the_package_is_a_package():
    folders = {path.parent for path in MODULES}
    assert [_id(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_files_and_functions_fit_their_limits():
    sizes = {_id(path): len(path.read_text().splitlines()) for path in MODULES}
    functions = {name: lines for path in MODULES for name, lines in _functions(path)}
    print(f"\n{sum(sizes.values())} lines in {len(sizes)} files, {len(functions)} functions")
    for name, lines in sorted({**sizes, **functions}.items(), key=lambda item: -item[1])[:12]:
        print(f"{lines:5} {name}")
    assert {name: n for name, n in sizes.items() if n > MAX_FILE_LINES} == {}
    assert {name: n for name, n in functions.items() if n > MAX_FUNCTION_LINES} == {}


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield f"{_id(path)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def test_no_file_names_a_path_of_one_machine():
    offenders = [
        f"{_id(path)}: {match.group(0)}"
        for path in _project_files()
        if (match := MACHINE_PATH.search(path.read_text(errors="replace")))
    ]
    assert offenders == []


def _project_files() -> list[Path]:
    """What git tracks or would track; every text file below the root where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = result.stdout.splitlines() if result.returncode == 0 else []
    paths = [ROOT / name for name in names] or [
        p for p in ROOT.rglob("*") if ".venv" not in p.parts
    ]
    return [path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES]
