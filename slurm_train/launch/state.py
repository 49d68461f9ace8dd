"""How a run stands: what its directory says, what Slurm says, and whether its processes live."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, EXIT_SAVED
from slurm_train.launch.queue import Job, active
from slurm_train.report.position import Attempt, Position

_CODES = {"done": EXIT_OK, "saved": EXIT_SAVED, "interrupted": EXIT_INTERRUPTED}


@dataclass(frozen=True)
class State:
    """How a run stands."""

    text: str
    """Slurm's word for its job, such as RUNNING or PENDING (Priority); of a run without one: starting, running, done,
    saved, failed, interrupted, or lost for one whose processes ended without a word."""

    going: bool
    """Whether it runs or may still start."""

    attempt: Attempt | None = None
    """What it is the state of: the newest attempt, but an evaluation only while it goes on."""

    job: Job | None = None
    """The job of that attempt; None if Slurm does not know it."""

    exit_code: int = EXIT_OK
    """Of a run that has ended: 0 done, 75 saved, 130 interrupted, else that of the job, or 1."""


def state(position: Position, jobs: Mapping[str, Job]) -> State:
    """How a run stands.

    Args:
        position: what its directory says.
        jobs: job id -> job, as far as Slurm knows them.
    """
    newest = position.attempt
    if newest is None:
        return State("unknown", False)
    found = attempt_state(position, newest, jobs)
    if not found.going and newest.verb != "train" and position.training:
        return attempt_state(position, position.training, jobs)
    return found


def attempt_state(position: Position, attempt: Attempt, jobs: Mapping[str, Job]) -> State:
    """The same of one attempt."""
    job = jobs.get(attempt.job) if attempt.job else None
    # A run by hand is only a part of its job, which may be a shell that goes on.
    by_hand = attempt.launcher != "slurm"
    if job and not (by_hand and attempt.ended):
        if by_hand and active(job) and _is_lost(position, attempt):
            return State("lost", False, attempt, job, EXIT_FAILURE)
        saved = attempt.ended == "saved" and not active(job) and job.state != "COMPLETED"
        text = f"{job.state} (saved)" if saved else _worded(job)
        return State(text, active(job), attempt, job, EXIT_SAVED if saved else exit_code(job))
    if attempt.ended or attempt.job:
        return State(attempt.ended or "unknown", False, attempt, job, _CODES.get(attempt.ended, EXIT_FAILURE))
    where = host(position, attempt)
    if where != socket.gethostname():
        return State(f"running on {where}", True, attempt)
    if _is_lost(position, attempt):
        return State("lost", False, attempt, exit_code=EXIT_FAILURE)
    return State("running" if attempt.starts else "starting", True, attempt)


def exit_code(job: Job) -> int:
    """The exit code that tells of a job: its own, or 1 where Slurm or a signal ended it; 0 while it is active."""
    code, _, _ = job.exit_code.partition(":")
    if active(job) or job.state == "COMPLETED":
        return EXIT_OK
    return int(code) if code.isdecimal() and 0 < int(code) < 256 else EXIT_FAILURE


def host(position: Position, attempt: Attempt) -> str:
    """Where rank 0 of a run without a job is, or the host of the plan before it has started."""
    if attempt.starts:
        return str(attempt.starts[-1].get("host", ""))
    ranks = position.plan.get("ranks")
    return str(ranks[0].get("node", "")) if isinstance(ranks, list) and ranks else ""


def processes(position: Position, attempt: Attempt) -> Iterator[int]:
    """The known process ids of a run without a job: rank 0's, and under the local launcher the controller's."""
    if attempt.starts and isinstance(pid := attempt.starts[-1].get("pid"), int):
        yield pid
    name = local_job(position) if attempt.launcher == "local" else ""
    if name:
        yield int(name)


def local_job(position: Position) -> str:
    """The name of a local run in its log folder: the process id of its newest controller; "" if there is none."""
    pickles = list(position.run.logs.glob("*_submitted.pkl"))
    names = [path.name.partition("_")[0] for path in sorted(pickles, key=lambda path: path.stat().st_mtime)]
    return next((name for name in reversed(names) if name.isdecimal()), "")


def _worded(job: Job) -> str:
    if job.state == "PENDING" and job.reason:
        return f"PENDING ({job.reason})"
    code, _, number = job.exit_code.partition(":")
    if job.state != "FAILED" or not code:
        return job.state
    if number.strip("0"):
        return f"FAILED (signal {number})"
    return "FAILED (saved)" if code == str(EXIT_SAVED) else f"FAILED (exit code {code})"


def _is_lost(position: Position, attempt: Attempt) -> bool:
    """Whether a run of this host has no process any more."""
    pids = list(processes(position, attempt))
    here = host(position, attempt) == socket.gethostname()
    return here and not any(map(_lives, pids)) and bool(pids or attempt.launcher == "local")


def _lives(pid: int) -> bool:
    """Whether a process of this project has this id; others may have got it since."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's: it lives
        pass
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # not Linux
        return True
    return any(name in words for name in (b"slurm_train", b"slurm-train", b"submitit"))
