"""Text files as one stream of bytes; their number and sizes are known without reading them, and without torch."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from slurm_train.errors import DataError

SEPARATOR = 0
"""The byte between two files."""

BOUNDARIES = ("keep", "ignore")

_NOT_LIBRARY = ("site-packages", "dist-packages", "test", "tests", "idle_test")
_REMEDY = "name a text file, or a directory with text files"


@dataclass(frozen=True)
class Corpus:
    """The files, in the order of their names, with a separator between each two.

    Attributes:
        root: the directory that holds them, or the one file.
        names: their paths relative to `root`.
        sizes: their bytes.
        times: when they were last changed, in nanoseconds.
        text: one line for humans.
    """

    root: Path
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    times: tuple[int, ...]
    text: str

    @property
    def size(self) -> int:
        """Bytes of the stream."""
        return sum(self.sizes) + len(self.sizes) - 1

    @property
    def digest(self) -> str:
        """Changes with the place, the names, the sizes and the times of the files."""
        identity = [os.path.abspath(self.root), self.names, self.sizes, self.times]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]

    def pieces(self) -> Iterator[bytes]:
        """The stream in pieces: read now.

        Raises:
            DataError: a file cannot be read, or has changed since it was found.
        """
        for number, (name, size) in enumerate(zip(self.names, self.sizes, strict=True)):
            path = self.root / name
            try:
                content = path.read_bytes()
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}", "data.path") from None
            if len(content) != size:
                raise DataError(f"{path} has changed while it was read", "data.path", "start again")
            yield (bytes([SEPARATOR]) if number else b"") + content


def find_corpus(path: Any = None, files: Any = None) -> Corpus:
    """The text files that a user means.

    Args:
        path: a file, or a directory that is searched for files, with those below it. None: the library that comes with
            this Python, without its tests and the packages installed beside it.
        files: fnmatch pattern of the names of the files in a directory. None: all, and of the library *.py.
            Hidden files and directories and empty files are left out.

    Raises:
        DataError: the path is missing or cannot be read, or no file in it matches.
    """
    key = f"data.path={path}"
    if path is None:
        root, files, skipped = Path(sysconfig.get_path("stdlib")), files or "*.py", _NOT_LIBRARY
    else:
        root, skipped = Path(os.path.expanduser(str(path))), ()
    if not os.path.exists(root):
        raise DataError("there is no such file or directory", key, _REMEDY)
    names = ["."] if os.path.isfile(root) else sorted(_walk(root, str(files or "*"), skipped, key))
    found = [(name, stat) for name in names if (stat := (root / name).stat()).st_size]
    if not found:
        what = f"no file named {files}" if files else "no file"
        raise DataError(f"there is {what} with text in {root}", key, _REMEDY)
    sizes = tuple(stat.st_size for _, stat in found)
    count = "1 file" if len(found) == 1 else f"{len(found):,} files"
    return Corpus(
        root,
        tuple(name for name, _ in found),
        sizes,
        tuple(stat.st_mtime_ns for _, stat in found),
        f"{count}{f' named {files}' if files else ''} with {sum(sizes):,} bytes in {root}",
    )


def check_boundaries(boundaries: Any) -> None:
    """Refuse what `boundaries` cannot be.

    Raises:
        DataError: it is neither keep nor ignore.
    """
    if boundaries not in BOUNDARIES:
        raise DataError("unknown", f"data.boundaries={boundaries}", f"use {' or '.join(BOUNDARIES)}")


def _walk(root: Path, pattern: str, skipped: tuple[str, ...], key: str) -> Iterator[str]:
    """Relative paths of the files that match."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read the directory {error.filename}: {error.strerror}", key) from None

    for directory, children, names in os.walk(root, onerror=refuse):
        children[:] = [child for child in children if child not in skipped and not child.startswith(".")]
        for name in names:
            path = Path(directory, name)
            if fnmatchcase(name, pattern) and not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix()
