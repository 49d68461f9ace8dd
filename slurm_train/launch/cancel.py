"""What the verb `cancel` does: ends the jobs of runs, and says of each run what became of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from slurm_train.errors import ConfigError, Fault
from slurm_train.launch import queue
from slurm_train.launch.queue import Job
from slurm_train.launch.runs import find_run, resume_again
from slurm_train.launch.state import State, attempt_state, host, processes, state
from slurm_train.report.position import Position, position


def cancel(names: Sequence[str]) -> list[str]:
    """Cancel all jobs of some runs that are not at their end; returns a line for each run.

    The ranks are told to save (SIGTERM) and are killed a while later: after the cluster's KillWait, usually 30 s.

    Args:
        names: run directories, run ids or job ids.

    Raises:
        ConfigError: a run is one of this or another host, which no job stands behind. The others are cancelled.
        UserError: Slurm does not answer, or refuses.
    """
    places = list({place.run.path: place for place in (position(find_run(name)) for name in names)}.values())
    known = queue.jobs(job for place in places for job in place.jobs)
    ending = {
        place.run.path: [known[job] for job in place.jobs if _ends_by(place, job, known, names)] for place in places
    }
    if any(ending.values()):
        queue.cancel(dict.fromkeys(job.id for jobs in ending.values() for job in jobs))
    lines: list[str] = []
    faults: list[Fault] = []
    for place in places:
        jobs, found = ending[place.run.path], state(place, known)
        for job in jobs:
            place.run.append_event("cancelled", job=job.id)
            lines.append(_told(place, job))
        if not jobs and found.going:
            faults.append(_by_hand(place, found))
        elif not jobs:
            name = f"job {found.attempt.job}" if found.attempt and found.attempt.job else "run"
            lines.append(f"{name} has ended already: {found.text} ({_relative(place)})")
    if faults:
        for line in lines:
            print(line, flush=True)
        raise ConfigError(faults)
    return lines


def _ends_by(place: Position, job: str, known: dict[str, Job], names: Sequence[str]) -> bool:
    """Whether there is something to cancel: a job that is active, for a run that has not ended inside it.

    The job around a local run is the user's shell: it ends only if its id was typed.
    """
    attempt = next(attempt for attempt in reversed(place.attempts) if attempt.job == job)
    if attempt.launcher == "local" and job not in names:
        return False
    found = attempt_state(place, attempt, known)
    return found.job is not None and found.going


def _told(place: Position, job: Job) -> str:
    where = f" on {job.nodes}" if job.nodes else ""
    line = f"job {job.id} cancelled, it was {job.state}{where} ({_relative(place)})"
    if job.state not in ("RUNNING", "COMPLETING"):
        return line
    attempt = next(attempt for attempt in reversed(place.attempts) if attempt.job == job.id)
    if attempt.verb != "train":
        return line
    return f"{line}\n  its ranks save now; go on with: {resume_again(attempt.launcher, place.run.path)}"


def _by_hand(place: Position, found: State) -> Fault:
    """The fault of a run that has no job."""
    attempt = found.attempt
    pid = next(processes(place, attempt), None) if attempt else None
    where = host(place, attempt) if attempt else "?"
    whose = f"process {pid} on {where}" if pid else where
    return Fault(_relative(place), f"it is run by {whose}, not by a Slurm job", "press Ctrl-C there")


def _relative(place: Position) -> str:
    path = os.path.relpath(place.run.path)
    return str(place.run.path) if path.startswith("..") else path
