"""Python modules as source text: found without importing them, parsed, and indexed by the names that they bind."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Module:
    """One module's source."""

    name: str
    path: str
    """Its .py file; empty for an extension, a built-in or a package without __init__.py."""
    is_package: bool
    is_namespace: bool = False
    """A package without __init__.py, whose source is empty."""

    @property
    def tree(self) -> ast.Module | None:
        """Its source, parsed when it is first asked for; None without any that is Python."""
        return self._parsed[0]

    @property
    def error(self) -> str:
        """Why it is no valid Python, with file and line."""
        return self._parsed[1]

    @cached_property
    def _parsed(self) -> tuple[ast.Module | None, str]:
        if not self.path:
            return (ast.Module([], []) if self.is_namespace else None), ""
        try:
            with tokenize.open(self.path) as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(file.read(), self.path), ""
        except (SyntaxError, ValueError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            return None, f"{os.path.relpath(self.path)}{line}: {reason}"
        except (OSError, RecursionError, MemoryError):
            return None, ""

    @property
    def shown(self) -> str:
        """The module as a user knows it: a file below the working directory, else a dotted name."""
        relative = os.path.relpath(self.path) if self.path else ".."
        return self.name if relative.startswith("..") or "site-packages" in relative else relative

    @cached_property
    def _statements(self) -> list[ast.stmt]:
        return list(_flat(self.tree.body)) if self.tree else []

    @cached_property
    def bindings(self) -> dict[str, list[ast.stmt]]:
        """Name -> the statements that bind it, in the order of the file."""
        found: dict[str, list[ast.stmt]] = {}
        for statement in self._statements:
            for name in _bound(statement):
                found.setdefault(name, []).append(statement)
        return found

    @cached_property
    def stars(self) -> list[ast.ImportFrom]:
        """The star imports, the last one first."""
        imports = [s for s in self._statements if isinstance(s, ast.ImportFrom) and s.names[0].name == "*"]
        return imports[::-1]

    @cached_property
    def dynamic(self) -> bool:
        """Whether it may have names that no statement shows."""
        run_at_import = (s for s in self._statements if not isinstance(s, _DEFINITIONS))
        calls = (node.func for s in run_at_import for node in ast.walk(s) if isinstance(node, ast.Call))
        return "__getattr__" in self.bindings or any(
            isinstance(called, ast.Name) and called.id in {"globals", "setattr", "exec"} for called in calls
        )

    def absolute(self, node: ast.ImportFrom) -> list[str]:
        """The absolute name of what an import-from imports from."""
        if not node.level:
            return (node.module or "").split(".")
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        base = package[: len(package) - node.level + 1]
        return [*base, *(node.module.split(".") if node.module else [])]


def find_module(parts: Sequence[str], search: Sequence[str]) -> Module | None:
    """The module of a dotted name, or None. Only the import system's finders are asked; nothing is executed."""
    places = (*search, *sys.path)
    spec = _top(parts[0], places)
    for end in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its last name alone: of a dotted one the finder wants the parent imported, if it is a directory without
        # an __init__.py.
        spec = PathFinder.find_spec(parts[end - 1], list(spec.submodule_search_locations))
    return _module(".".join(parts), spec) if spec else None


def module_names(search: Sequence[str]) -> list[str]:
    """The modules in the searched directories, for messages."""
    files = (file for place in search if os.path.isdir(place) for file in Path(place).iterdir())
    return sorted({file.stem for file in files if file.suffix == ".py" or (file / "__init__.py").is_file()})


def _top(name: str, places: Sequence[str]) -> ModuleSpec | None:
    try:
        return PathFinder.find_spec(name, list(places)) or importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _module(name: str, spec: ModuleSpec) -> Module:
    is_package = spec.submodule_search_locations is not None
    path = spec.origin or ""
    if path.endswith(".py") and os.path.isfile(path):
        state = os.stat(path)
        return _kept(name, path, is_package, (state.st_mtime_ns, state.st_size))
    return Module(name, "", is_package, is_namespace=not path)


@cache
def _kept(name: str, path: str, is_package: bool, state: tuple[int, int]) -> Module:
    """The same module for the same file, so that it is parsed once. `state` makes the cache see an edited file."""
    return Module(name, path, is_package)


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those inside if, try, with and loops included."""
    for statement in body:
        yield statement
        if not isinstance(statement, _DEFINITIONS):
            for part in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _flat(handler.body)


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(statement, _DEFINITIONS):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names if alias.name != "*"]
    if isinstance(statement, ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [node.id for target in targets if target for node in ast.walk(target) if isinstance(node, ast.Name)]
