"""Run an sbatch script as Slurm's batch shell would, with an srun that only notes what it is given."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SRUN = """#!/bin/bash
printf '%s\\0' "$@" > "$NOTES/words"
env -0 > "$NOTES/environment"
exit "${SRUN_EXIT:-0}"
"""


@dataclass(frozen=True)
class Ran:
    """What came of a script."""

    code: int
    """Its exit code."""

    errors: str
    """Its standard error."""

    words: list[str]
    """The words after srun; empty if it was not started."""

    environment: dict[str, str]
    """What srun saw of the environment."""

    def value(self, option: str) -> str:
        """The value of a long option among the words; empty if it is not there."""
        return next((word.partition("=")[2] for word in self.words if word.startswith(f"--{option}=")), "")


def run_batch(script: str, directory: Path, *arguments: str, env: Mapping[str, str]) -> Ran:
    """Run a script in a directory.

    Args:
        script: its text.
        directory: a place for the script and what srun notes.
        arguments: what was typed after the script.
        env: the variables that Slurm and the user have set, besides PATH.
    """
    tools = directory / "tools"
    tools.mkdir(parents=True)
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(0o755)
    (directory / "script").write_text(script, encoding="utf-8")
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8", "NOTES": str(tools), **env}
    done = subprocess.run(
        ["bash", str(directory / "script"), *arguments], env=environment, cwd=directory, capture_output=True, text=True
    )
    return Ran(done.returncode, done.stderr, _notes(tools / "words"), dict(_pairs(_notes(tools / "environment"))))


def _notes(path: Path) -> list[str]:
    return path.read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1] if path.exists() else []


def _pairs(lines: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]
