"""How a local job ended, read from what its controller and its ranks left in the log folder."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_train.errors import (
    EXIT_SAVED,
    EXIT_USER,
    ConfigError,
    Fault,
    Interrupted,
    RankFailed,
    Saved,
    SlurmTrainError,
)


class RankTraceback(Exception):
    """The traceback of a rank, as text: the cause of the error that tells of it."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank."""

    rank: int
    exit_code: int
    """As the controller saw it; negative for a signal."""

    own: bool
    """Whether it ended by itself, before the controller killed any."""

    time: float
    outcome: dict[str, Any]
    """What the rank wrote before it ended: host, kind, message, traceback, time; empty if it could not."""

    log: Path
    """Its error log."""

    @property
    def code(self) -> int:
        """The exit code that counts: the rank's own word, else what was seen of it."""
        return int(self.outcome.get("exit_code", self.exit_code))


def rank_ends(logs: Path, job: str) -> list[RankEnd]:
    """The ends of a job's ranks, in rank order; empty if its controller left no account.

    Args:
        logs: the log folder.
        job: the job id.
    """
    ends = _read(logs / f"{job}_exits.json")
    return [
        RankEnd(
            end["rank"],
            end["exit_code"],
            end["own"],
            end["time"],
            _read(logs / f"{job}_{end['rank']}.outcome.json") or {},
            logs / f"{job}_{end['rank']}_log.err",
        )
        for end in ends or []
    ]


def failure(ends: Sequence[RankEnd], resume: str) -> SlurmTrainError | None:
    """The error that tells why a job failed; None if no rank did.

    One rank's end makes others fail, so the first cause is looked for: a rank that a signal killed, then one that
    ended without a word, then the one whose word is the oldest. What the controller killed comes last.

    Args:
        ends: of all ranks.
        resume: the command that goes on with the run, for one that was asked to stop.
    """
    failed = [end for end in ends if end.code]
    if not failed:
        return None
    first = min(failed, key=_order)
    if first.code == EXIT_SAVED:
        return Saved(str(first.outcome.get("message", "stopped")), remedy=f"go on with: {resume}")
    if first.code == EXIT_USER and first.outcome:
        return ConfigError([Fault("", line) for line in first.outcome["message"].splitlines()])
    if first.outcome.get("kind") == "KeyboardInterrupt":
        return Interrupted("interrupted")
    error = RankFailed(_told(first))
    if first.outcome:
        error.__cause__ = RankTraceback(first.outcome["traceback"])
    return error


def _order(end: RankEnd) -> tuple[bool, int, float]:
    silent = not end.outcome
    killed = silent and end.exit_code < 0
    return (silent and not end.own, 0 if killed else 1 if silent else 2, end.outcome.get("time", end.time))


def _told(end: RankEnd) -> str:
    name = f"rank {end.rank} on {end.outcome.get('host', socket.gethostname())}"
    log = f"(its log: {end.log})"
    if end.outcome:
        message = " ".join(str(end.outcome["message"]).split())
        return f"{name}: {message} {log}"
    if end.exit_code < 0:
        reason = "; the host may be out of memory" if end.exit_code == -signal.SIGKILL else ""
        return f"{name} was killed by {_signal_name(-end.exit_code)}{reason} {log}"
    last = _last_line(end.log)
    return f"{name} ended with exit code {end.exit_code}{': ' * bool(last)}{last} {log}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(path: Path) -> str:
    """The last line of a log that is an error's, such as `ValueError: ...`; "" if there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)), "")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
