"""signature: arguments read from source, nothing imported, never an exception."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_train.config.signature import Missing, Signature, Unknown, signature

SOURCE = """
import a_module_that_is_not_there
import package.inner as short
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Generic, NamedTuple, TypeVar
from package import Exported, Renamed as Other
from package.inner import *
from .nowhere import Lost
import my_lib as itself

raise RuntimeError("imported")

class Own:
    def __init__(self, a, b=1, *, c, d=2, **rest): ...

class Child(Own): ...
class Deep(Generic[TypeVar("T")], Child): ...
class Plain: ...
class Fresh(Plain):
    def __new__(cls, x): ...
class Orphan(a_module_that_is_not_there.Base): ...
class Computed(make()): ...
class Meta(metaclass=Strange): ...
class Circle(Circle): ...
class ViaAlias(short.Base): ...

@dataclass
class Record:
    x: int
    y: int = 1
    z: list = field(default_factory=list)
    hidden: int = field(init=False)
    shared: ClassVar[int] = 3

@dataclass
class More(Record):
    w: int = 0

class Pair(NamedTuple):
    left: int
    right: int = 2

@strange
class Decorated: ...

def function(a, /, b, c=3): ...
async def later(a): ...
@strange
def decorated(a): ...

class Maker:
    @classmethod
    def build(cls, size): ...
    @staticmethod
    def plain(size, other=1): ...
    class Inner:
        def __init__(self, q): ...

Alias = Own
made = partial(function, 1)
number: int = 3
circle_a = circle_b
circle_b = circle_a

try:
    from nowhere_at_all import Fallback
except ImportError:
    class Fallback:
        def __init__(self, here): ...

if number:
    def conditional(yes): ...
"""

PACKAGE = {
    "my_lib.py": SOURCE,
    "package/__init__.py": "from .inner import Base as Exported\nfrom . import inner\n"
    "from package.inner import Star as Renamed\n",
    "package/inner.py": "class Base:\n    def __init__(self, base): ...\n"
    "class Star:\n    def __init__(self, star): ...\n",
    "package/lazy.py": "def __getattr__(name): ...\n",
    "names/space.py": "def f(x): ...\n",
    "latin.py": "# coding: latin-1\n# \xe9\ndef f(x): ...\n",
    "syntax.py": "x = 1\ndef f(:\n",
    "binary.py": "\x00\x01",
}


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("lib")
    for name, text in PACKAGE.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="latin-1")
    return [str(root)]


def parameters(target: str, lib: list[str]) -> str:
    """As `a b=` for a required, b with a default; `**` if any further keyword is taken."""
    found = signature(target, lib)
    assert isinstance(found, Signature), found
    words = [parameter.name + ("" if parameter.required else "=") for parameter in found.parameters]
    return " ".join([*words, "**"] if found.open else words)


FOUND = [
    ("my_lib.Own", "a b= c d= **"),
    ("my_lib.Child", "a b= c d= **"),
    ("my_lib.Deep", "a b= c d= **"),
    ("my_lib.Alias", "a b= c d= **"),
    ("my_lib.Plain", ""),
    ("my_lib.Fresh", "x"),
    ("my_lib.ViaAlias", "base"),
    ("my_lib.Record", "x y= z="),
    ("my_lib.More", "x y= z= w="),
    ("my_lib.Pair", "left right="),
    ("my_lib.function", "a b c="),
    ("my_lib.later", "a"),
    ("my_lib.Maker.build", "size"),
    ("my_lib.Maker.plain", "size other="),
    ("my_lib.Maker.Inner", "q"),
    ("my_lib.Exported", "base"),
    ("my_lib.Other", "star"),
    ("my_lib.Star", "star"),
    ("my_lib.short.Base", "base"),
    ("my_lib.itself.Own", "a b= c d= **"),
    ("my_lib.Fallback", "here"),
    ("my_lib.conditional", "yes"),
    ("package.Exported", "base"),
    ("package.inner.Star", "star"),
    ("names.space.f", "x"),
    ("latin.f", "x"),
    ("torch.nn.MSELoss", "size_average= reduce= reduction="),
    ("torch.nn.Identity", "**"),
    ("slurm_train.models.linear_regression.fit", "context"),
]


@pytest.mark.parametrize(("target", "expected"), FOUND)
def test_found(lib: list[str], target: str, expected: str) -> None:
    assert parameters(target, lib) == expected


def test_torch_is_read_but_not_imported(lib: list[str]) -> None:
    assert parameters("torch.optim.AdamW", lib).startswith("params lr= betas= eps= weight_decay=")
    assert parameters("torch.nn.CrossEntropyLoss", lib).startswith("weight= size_average= ignore_index=")
    assert "my_lib" not in sys.modules


UNKNOWN = ["Orphan", "Computed", "Meta", "Circle", "Decorated", "decorated", "made", "number", "circle_a", "Lost"]


@pytest.mark.parametrize("target", [*(f"my_lib.{name}" for name in UNKNOWN), "math.sqrt", "sys.exit", "package.lazy.x"])
def test_unknown(lib: list[str], target: str) -> None:
    assert isinstance(signature(target, lib), Unknown)


MISSING = [
    ("my_lib.Ow", "my_lib has no Ow", "did you mean Own?"),
    ("package.Exporte", "package has no Exporte", "did you mean Exported?"),
    ("my_lib.Plain.x", "Plain in my_lib has no x", ""),
    ("my_lib.function.x", "function in my_lib has no x", ""),
    ("package.inner", "package.inner is a module", "name a class or function in it"),
    ("nowhere_at_all.x", "there is no module nowhere_at_all", ""),
    ("my_li.Own", "there is no module my_li", "did you mean my_lib?"),
    ("names.nothing", "names has no nothing", ""),
    ("Own", "'Own' names no module", "type FILE.Own for Own in FILE.py"),
    ("my-lib.Own", "'my-lib.Own' is not a dotted name such as my_file.MyNet", ""),
    ("", "'' is not a dotted name such as my_file.MyNet", ""),
    ("my_lib..Own", "'my_lib..Own' is not a dotted name such as my_file.MyNet", ""),
    ("torch.optim.Adm", "torch.optim has no Adm", "did you mean Adam?"),
]


@pytest.mark.parametrize(("target", "reason", "remedy"), MISSING)
def test_missing(
    lib: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, reason: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a file below the working directory is told by its path, others by their name
    assert signature(target, lib) == Missing(reason, remedy)


@pytest.mark.parametrize(("target", "words"), [("syntax.f", "syntax.py, line 2: "), ("binary.f", "binary.py")])
def test_a_file_that_is_no_python(lib: list[str], target: str, words: str) -> None:
    found = signature(target, lib)
    assert isinstance(found, Missing)
    assert words in found.reason


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "edited_file.py"
    file.write_text("def f(a): ...\n")
    assert parameters("edited_file.f", [str(tmp_path)]) == "a"
    file.write_text("def f(longer): ...\n")
    assert parameters("edited_file.f", [str(tmp_path)]) == "longer"


NAMES = st.sampled_from(["my_lib", "package", "torch", "nn", "Own", "inner", "Maker", "circle_a", "short", "_C", "os"])


@given(st.lists(NAMES | st.text(max_size=5), max_size=5))
def test_it_never_raises(lib: list[str], parts: list[str]) -> None:
    assert isinstance(signature(".".join(parts), lib), Signature | Missing | Unknown)


@given(st.text(alphabet="abc def(class):=@.,\n *_[]", max_size=60))
def test_any_source_gives_an_answer(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    root = tmp_path_factory.getbasetemp() / "fuzz"
    root.mkdir(exist_ok=True)
    (root / "fuzzed_file.py").write_text(text)
    assert isinstance(signature("fuzzed_file.a", [str(root)]), Signature | Missing | Unknown)


def test_a_directory_without_an_init_file_inside_a_package(tmp_path):
    inner = tmp_path / "package" / "parts"
    inner.mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("")
    (inner / "nets.py").write_text("class Net:\n    def __init__(self, width): ...\n")
    found = signature("package.parts.nets.Net", [str(tmp_path)])
    assert isinstance(found, Signature)
    assert [parameter.name for parameter in found.parameters] == ["width"]
