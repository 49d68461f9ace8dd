"""Slurm's commands as a test wants them: each prints what is given, and notes that it was called."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest


class FakeSlurm:
    """A directory that is all of PATH.

    Args:
        folder: an empty directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls = folder / "calls.txt"

    def says(self, name: str, output: str = "", error: str = "", code: int = 0) -> None:
        """From now on the command `name` prints this and ends with this exit code."""
        script = self.folder / name
        lines = [
            "#!/bin/sh",
            f'echo "{name} $*" >> {shlex.quote(str(self._calls))}',
            f"printf %s {shlex.quote(output)}",
            f"printf %s {shlex.quote(error)} >&2",
            f"exit {code}",
        ]
        beside = self.folder / f".{name}"
        beside.write_text("\n".join(lines) + "\n")
        beside.chmod(0o755)
        beside.replace(script)

    @property
    def calls(self) -> list[str]:
        """The calls so far, each with its words."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    @property
    def names(self) -> list[str]:
        """The commands called so far."""
        return [line.split()[0] for line in self.calls]


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A PATH on which nothing is but what the test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", os.fspath(folder))
    return FakeSlurm(folder)
