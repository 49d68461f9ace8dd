"""The arguments that a `_target_` takes, read from its source with `ast`: nothing is imported, neither torch nor the
user's code.

A name is followed through re-exports (`from .x import Name`, star imports, `import a.b as c`, `Name = other`), a class
to the `__init__` of its bases. Whatever cannot be followed (C extensions, decorated or computed names) is Unknown,
never an error; Missing is only said of what certainly is not there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slurm_train.config.names import near
from slurm_train.config.sources import Module, find_module, module_names

_EMPTY_BASES = {"object", "Generic", "Protocol", "ABC", "NamedTuple"}
_HARMLESS = {"staticmethod", "classmethod", "overload", "override", "final", "no_grad", "inference_mode", "cache"}
_HARMLESS |= {"lru_cache", "deprecated", "abstractmethod", "runtime_checkable", "total_ordering", "dataclass"}
_DEEPEST = 25  # re-exports and bases followed before giving up


@dataclass(frozen=True)
class Parameter:
    """One argument."""

    name: str
    required: bool


@dataclass(frozen=True)
class Signature:
    """What a target takes, without self or cls."""

    parameters: tuple[Parameter, ...]
    open: bool
    """Whether it takes any further keyword (**kwargs)."""
    where: str
    """File (or module) and line."""


@dataclass(frozen=True)
class Missing:
    """The target certainly does not exist, or its file is no valid Python."""

    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Unknown:
    """The target cannot be read without importing it."""

    reason: str


Answer = Signature | Missing | Unknown


def signature(target: str, search: Sequence[str] | None = None) -> Answer:
    """The signature of a target such as torch.optim.AdamW or my_file.MyNet. Total: it never raises.

    Args:
        target: dotted path of a class, a function, or a static or class method.
        search: directories looked into before sys.path, such as the working directory.
    """
    parts = target.split(".")
    if not all(part.isidentifier() for part in parts):
        return Missing(f"'{target}' is not a dotted name such as my_file.MyNet")
    if len(parts) == 1:
        return Missing(f"'{target}' names no module", f"type FILE.{target} for {target} in FILE.py")
    try:
        return _Reader(tuple(search or ())).target(parts)
    except RecursionError:
        return Unknown("its source is too deep to follow")


class _Reader:
    """Follows names from module to module. Every method answers for a name (and the names of attributes after it)."""

    def __init__(self, search: Sequence[str]) -> None:
        self.search = search
        self.chain: list[tuple[str, str]] = []  # what is being looked up, outermost first: shows circles

    def target(self, parts: list[str]) -> Answer:
        """Descend into modules as far as there are any, then look the rest up in the last one."""
        module = self.module(parts[:1])
        if module is None:
            return Missing(f"there is no module {parts[0]}", near(parts[0], module_names(self.search)))
        depth = 1
        while depth < len(parts) - 1 and (inner := self.module(parts[: depth + 1])):
            module, depth = inner, depth + 1
        found = self.attribute(module, parts[depth:])
        if isinstance(found, Missing) and not module.error and self.module(parts):
            return Missing(f"{'.'.join(parts)} is a module", "name a class or function in it")
        if isinstance(found, Missing) and parts[0] == "torch" and not found.remedy:
            # Names that torch makes at import are in no source, so only what looks like a slip of the pen is one.
            return Unknown(found.reason)
        return found

    def module(self, parts: Sequence[str]) -> Module | None:
        return find_module(parts, self.search)

    def attribute(self, module: Module, names: Sequence[str]) -> Answer:
        """A name in a module's own namespace."""
        step = (module.name, ".".join(names))
        if step in self.chain or len(self.chain) > _DEEPEST:
            return Unknown(f"{step[1]} in {module.shown} cannot be followed to its definition")
        if module.error:
            return Missing(module.error)
        if module.tree is None:
            return Unknown(f"{module.name} has no Python source")
        self.chain.append(step)
        try:
            return self._best(module, names)
        finally:
            self.chain.pop()

    def _best(self, module: Module, names: Sequence[str]) -> Answer:
        """The first signature among the statements that bind the name, the last statement first."""
        answer: Answer | None = None
        for found in self._answers(module, names):
            if isinstance(found, Signature):
                return found
            if answer is None or isinstance(found, Unknown):
                answer = found
        if isinstance(answer, Unknown) or (answer and names[0] in module.bindings):
            return answer
        if module.dynamic:
            return Unknown(f"{module.shown} makes names when it runs")
        known = [*module.bindings, *(name for star in self._stars(module) for name in star.bindings)]
        return Missing(f"{module.shown} has no {names[0]}", near(names[0], known))

    def _answers(self, module: Module, names: Sequence[str]) -> Iterator[Answer]:
        for node in reversed(module.bindings.get(names[0], [])):
            yield self.binding(module, node, names)
        if names[0] not in module.bindings:
            for star in self._stars(module):
                yield self.attribute(star, names)
        inner = self.module([*module.name.split("."), names[0]]) if names[1:] and module.is_package else None
        if inner:
            yield self.attribute(inner, names[1:])

    def _stars(self, module: Module) -> list[Module]:
        found = (self.module(module.absolute(star)) for star in module.stars)
        return [star for star in found if star]

    def binding(self, module: Module, node: ast.stmt, names: Sequence[str]) -> Answer:
        """What one statement binds a name to."""
        name, *rest = names
        if isinstance(node, ast.ClassDef):
            return self.member(module, node, rest) if rest else self.class_(module, node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return Missing(f"{name} in {module.shown} has no {rest[0]}") if rest else _function(module, node)
        if isinstance(node, ast.ImportFrom):
            return self.imported(module, node, names)
        if isinstance(node, ast.Import):
            return self.module_alias(node, names)
        if isinstance(node, ast.Assign) and (dotted := _dotted(node.value)):
            return self.used(module, [*dotted, *rest])
        return Unknown(f"{name} is computed in {module.shown}")

    def imported(self, module: Module, node: ast.ImportFrom, names: Sequence[str]) -> Answer:
        """`from source import name`: the name may be a module of the source package, or a name in it."""
        alias = next(alias for alias in node.names if (alias.asname or alias.name) == names[0])
        path = module.absolute(node)
        inner = self.module([*path, alias.name])
        if inner and names[1:]:
            return self.attribute(inner, names[1:])
        source = self.module(path)
        if inner and source and source.name == module.name:
            return Missing(f"{inner.name} is a module", "name a class or function in it")
        if source is None:
            return Unknown(f"{'.'.join(path)}, imported by {module.shown}, is not found")
        found = self.attribute(source, [alias.name, *names[1:]])
        return Unknown(found.reason) if isinstance(found, Missing) and not source.error else found

    def module_alias(self, node: ast.Import, names: Sequence[str]) -> Answer:
        """`import a.b` or `import a.b as c`, and what is named after it."""
        alias = next(alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) == names[0])
        path = alias.name.split(".") if alias.asname else [names[0]]
        rest = list(names[1:])
        while len(rest) > 1 and self.module([*path, rest[0]]):
            path.append(rest.pop(0))
        source = self.module(path)
        return self.attribute(source, rest) if source and rest else Unknown(f"{names[0]} is a module")

    def used(self, module: Module, names: Sequence[str]) -> Answer:
        """A name as used inside a module, where it must exist: not finding it only shows that it cannot be followed."""
        found = self.attribute(module, names)
        return Unknown(found.reason) if isinstance(found, Missing) else found

    def class_(self, module: Module, node: ast.ClassDef) -> Answer:
        """A class: its own `__init__` or `__new__`, its fields if a dataclass, else what its bases have."""
        decorators = {_last(decorator) for decorator in node.decorator_list}
        if decorators - _HARMLESS:
            return Unknown(f"{node.name} in {module.shown} is decorated")
        if any(keyword.arg == "metaclass" and _last(keyword.value) != "ABCMeta" for keyword in node.keywords):
            return Unknown(f"{node.name} in {module.shown} has a metaclass")
        makers = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        maker = makers.get("__init__") or makers.get("__new__")
        if maker:
            return _function(module, maker, skip_first=True)
        is_record = "dataclass" in decorators or any(_last(base) == "NamedTuple" for base in node.bases)
        inherited: list[Parameter] = []
        for base in node.bases:
            if _last(base) in _EMPTY_BASES:
                continue
            found = self.used(module, _dotted(base)) if _dotted(base) else Unknown("it is computed")
            if not isinstance(found, Signature):
                return Unknown(f"the base {_last(base)} of {node.name}: {found.reason}")
            if not is_record and (found.parameters or found.open):
                return found
            inherited += found.parameters
        fields = {parameter.name: parameter for parameter in [*inherited, *(_fields(node) if is_record else ())]}
        return Signature(tuple(fields.values()), False, f"{module.shown}:{node.lineno}")

    def member(self, module: Module, node: ast.ClassDef, names: Sequence[str]) -> Answer:
        """A static method, class method or nested class."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        items = [item for item in node.body if isinstance(item, kinds) and item.name == names[0]]
        if not items:
            reason = f"{node.name} in {module.shown} has no {names[0]}"
            return Unknown(reason) if node.bases else Missing(reason)
        item = items[-1]
        if isinstance(item, ast.ClassDef):
            return self.member(module, item, names[1:]) if names[1:] else self.class_(module, item)
        return _function(module, item, skip_first="classmethod" in {_last(d) for d in item.decorator_list})


def _function(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef, skip_first: bool = False) -> Answer:
    """The parameters of a `def`; the first is left out when it is self or cls."""
    if {_last(decorator) for decorator in node.decorator_list} - _HARMLESS:
        return Unknown(f"{node.name} in {module.shown} is decorated")
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    without_default = len(positional) - len(given.defaults)
    parameters = [Parameter(argument.arg, place < without_default) for place, argument in enumerate(positional)]
    keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    parameters = parameters[skip_first:] + [Parameter(argument.arg, default is None) for argument, default in keywords]
    return Signature(tuple(parameters), given.kwarg is not None, f"{module.shown}:{node.lineno}")


def _fields(node: ast.ClassDef) -> Iterator[Parameter]:
    """The arguments that a dataclass or NamedTuple makes of its own fields."""
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        is_field = isinstance(item.value, ast.Call) and _last(item.value) == "field"
        options = {k.arg: k.value for k in item.value.keywords} if isinstance(item.value, ast.Call) and is_field else {}
        init = options.get("init")
        no_argument = isinstance(init, ast.Constant) and init.value is False
        if no_argument or _last(item.annotation) in {"ClassVar", "KW_ONLY"}:
            continue
        has_default = bool({"default", "default_factory"} & set(options)) if is_field else item.value is not None
        yield Parameter(item.target.id, not has_default)


def _dotted(node: ast.AST) -> list[str]:
    """The names of `a.b.C` or `a.b.C[T]`; empty for anything else."""
    if isinstance(node, ast.Subscript):
        return _dotted(node.value)
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return [*inner, node.attr] if inner else []
    return [node.id] if isinstance(node, ast.Name) else []


def _last(node: ast.AST) -> str:
    """The last name of a decorator, base or annotation, called or not; "?" for anything else."""
    return (_dotted(node.func if isinstance(node, ast.Call) else node) or ["?"])[-1]
