"""The text of an sbatch script: one source for what `launcher=slurm` submits and for sbatch_templates/.

A script is a list of options, exported variables, setup lines and one command. The two differ in their options'
values, their comments and that command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ALWAYS = {"requeue": "", "open-mode": "append"}
"""Options of every script: a run goes on by itself when Slurm puts its job back into the queue, and its log with it."""

CPUS = '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}'
"""srun takes no --cpus-per-task from sbatch since Slurm 22.05: without this each rank would have one CPU."""

STEP = "srun --export=ALL"
"""Starts tasks, with the whole environment of the script."""


RESTART = "slurm_train.launch.restart"
"""The module that lets a run go on whose ranks have ended too early; it is told srun's exit code."""

PREFLIGHT = "slurm_train.launch.preflight"
"""The module that tries the nodes of a job before its ranks start."""

EXCLUDE = "slurm_train.launch.exclude"
"""The module that requeues a job without the nodes that have failed."""


@dataclass(frozen=True)
class Script:
    """What an sbatch script is made of."""

    command: str
    """The last line: a shell command."""

    options: Mapping[str, str] = field(default_factory=dict)
    """Options of sbatch by their long names; "" for one without a value."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are exported."""

    setup: Sequence[str] = ()
    """Shell lines before the command; one that fails ends the job."""

    before: Sequence[str] = ()
    """Shell lines straight before the command, which say themselves what becomes of the job when one fails."""

    comments: Sequence[str] = ()
    """What stands at the top; a line that begins with # as it is, such as a ##SBATCH to edit."""

    why: str = "one task a rank"
    """The comment above the command."""

    @property
    def text(self) -> str:
        """The script."""
        comments = (line if line.startswith("#") else f"# {line}".rstrip() for line in self.comments)
        lines = ["#!/bin/bash", *comments]
        lines += [_option(name, value) for name, value in self.options.items() if "\n" not in value]
        lines += ["", *(_export(name, value) for name, value in self.environment.items())] if self.environment else []
        lines += ["", "set -e  # a setup line that fails ends the job", *self.setup, "set +e"] if self.setup else []
        lines += ["", *self.before] if self.before else []
        return "\n".join([*lines, "", f"# {self.why}", self.command, ""])

    @property
    def words(self) -> list[str]:
        """Options for the command line of sbatch: those that no #SBATCH line can hold, for it ends at a newline."""
        return [f"--{name}={value}" for name, value in self.options.items() if "\n" in value]


def restarting(command: str, python: str, words: str) -> str:
    """A command, and what follows if it fails.

    Args:
        command: starts the ranks.
        python: the interpreter, as a shell word.
        words: what the ranks were told, as shell words.
    """
    return f'{command} ||\n  exec {python} -m {RESTART} "$?" {words}'


def pattern(path: str) -> str:
    """A path as part of a file name pattern of Slurm, in which % means something else (manual, sbatch)."""
    return path.replace("%", "%%")


def quote(word: str) -> str:
    """A word for the shell; left bare where that is safe."""
    return shlex.quote(word)


def _option(name: str, value: str) -> str:
    if not value:
        return f"#SBATCH --{name}"
    bare = re.fullmatch(r"[^\s'\"\\#]+", value)
    escaped = value.replace("\\", "\\\\")  # sbatch, unlike a shell, reads backslashes in single quotes
    return f"#SBATCH --{name}={value if bare else shlex.quote(escaped)}"


def _export(name: str, value: str) -> str:
    return f"export {name}={quote(value)}"
