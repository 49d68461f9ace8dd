"""The shape of the house: layers, what each room may import, linters, sizes, docstrings."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "slurm_train"
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 400

# What a room may import besides the standard library and itself.
ROOM_IMPORTS = {
    "topology": {"slurm_train.errors"},
    "models": {"slurm_train.errors", "torch", "numpy"},
    "data": {"slurm_train.errors", "torch", "numpy", "rich"},
    "report": {"slurm_train.errors", "rich"},
}
INPUT_OUTPUT = {"io", "os", "pathlib", "shutil", "socket", "subprocess", "sys", "tempfile"}

# Modules that must load where torch is broken or absent.
TORCH_FREE_ROOMS = ("topology", "config", "launch", "report")
TORCH_FREE_MODULES = ("errors.py", "cli.py", "task.py", "models/facts.py", "data/facts.py", "data/sources.py")

# Home and working directories of a person or a machine, which no file of the project may name.
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:root|work|home/\w+|Users/\w+)/\w")


def run(*command: str, **variables: str) -> None:
    """Run a Python module or option in the repository; its output is the failure message."""
    environment = os.environ | variables
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def project_files() -> list[Path]:
    """Every file that git tracks or would track."""
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted(path for path in {ROOT / name for name in names if name} if path.is_file())


def module_name(path: Path) -> str:
    """`slurm_train.a.b` of slurm_train/a/b.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.AST) -> Iterator[str]:
    """Absolute names of the modules that a file imports anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            if node.module == "slurm_train":
                yield from (f"slurm_train.{alias.name}" for alias in node.names)
            else:
                yield node.module


def test_import_contracts() -> None:
    run("-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))")


def test_ruff() -> None:
    run("-m", "ruff", "check", "--no-cache", ".")


def test_mypy() -> None:
    run("-m", "mypy")


@pytest.mark.parametrize("room", ROOM_IMPORTS)
def test_room_imports_only_what_it_may(room: str) -> None:
    allowed = ROOM_IMPORTS[room] | {f"slurm_train.{room}"} | sys.stdlib_module_names
    for path in (PACKAGE / room).rglob("*.py"):
        for name in imported(ast.parse(path.read_text())):
            parents = {name} | {name[: dot.start()] for dot in re.finditer(r"\.", name)}
            assert parents & allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_topology_does_no_input_or_output() -> None:
    for path in (PACKAGE / "topology").glob("*.py"):
        tree = ast.parse(path.read_text())
        assert not set(imported(tree)) & INPUT_OUTPUT, path.name
        functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        calls = {function.id for function in functions if isinstance(function, ast.Name)}
        assert not calls & {"open", "print", "input"}, path.name


def test_launch_side_loads_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    files = [path for room in TORCH_FREE_ROOMS for path in (PACKAGE / room).glob("*.py")]
    files += [PACKAGE / name for name in TORCH_FREE_MODULES]
    names = ", ".join(sorted(map(module_name, files)))
    run("-c", f"import {names}", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")


def test_no_file_is_too_long() -> None:
    python = [path for path in project_files() if path.suffix == ".py"]
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in python}
    assert lengths
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_no_file_names_a_working_machine() -> None:
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # data
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert found == []


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The module, its public functions and classes, and the public methods of those, with their names."""
    yield "module", tree
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, node
            for member in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


def test_everything_public_has_a_docstring() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in MODULES
        if path.read_text()
        for name, node in public_definitions(ast.parse(path.read_text()))
        if not ast.get_docstring(node)  # type: ignore[arg-type]
    ]
    assert missing == []
