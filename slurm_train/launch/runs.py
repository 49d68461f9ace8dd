"""Runs that are there: found by what a user types for RUN, and how far they came."""

from __future__ import annotations

import fcntl
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.errors import RunDirectoryError, UserError
from slurm_train.launch import queue
from slurm_train.report.rundir import RunDirectory, parsed
from slurm_train.report.trust import opener

if TYPE_CHECKING:  # status, logs and cancel start without it
    from omegaconf import DictConfig


def find_run(name: str) -> RunDirectory:
    """The run that `name` means: a run directory, a run id below runs/, or a job id.

    A job leads to its run by the events of the runs below runs/, else by the comment that it has in Slurm.

    Raises:
        RunDirectoryError: there is none, or more than one.
    """
    path = Path(name).expanduser()
    if path.is_dir() and ((path / "config.yaml").is_file() or not queue.is_job_id(name)):
        return RunDirectory.open(path)
    runs = Path("runs")
    found = sorted(config.parent for config in runs.glob("*/*/config.yaml") if config.parent.name == name)
    if len(found) > 1:
        raise _several(f"{name} is the id of {len(found)} runs", found)
    if not found and queue.is_job_id(name):
        found = sorted(_of_job(runs, name)) or _commented(name)
        if len(found) > 1:
            raise _several(f"{len(found)} runs belong to job {name}", found)
    if not found:
        newest = sorted(runs.glob("*/*/config.yaml"), key=lambda config: config.stat().st_mtime)
        known = f"the newest run is {newest[-1].parent}" if newest else "there are no runs below runs/ here"
        raise RunDirectoryError(f"there is no run directory or run id {name}", remedy=known)
    return RunDirectory.open(found[0])


@contextmanager
def one_at_a_time(run: RunDirectory) -> Iterator[None]:
    """What is done inside is done by one process alone: of two that would go on with a run, the second finds a job.

    Raises:
        RunDirectoryError: another process is about to go on with the run.
    """
    with open(run.path / ".resume.lock", "a", opener=opener) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(
                f"{run.path} is being gone on with by another resume", remedy="see the verb status"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def _several(problem: str, found: Sequence[Path]) -> RunDirectoryError:
    return RunDirectoryError(problem, remedy=f"name one: {' '.join(map(str, found))}")


def _of_job(runs: Path, name: str) -> Iterator[Path]:
    """The runs that a job has done or will do; those of all its tasks for the number of an array."""
    for config in runs.glob("*/*/config.yaml"):
        path = config.parent
        # by hand it is job-12, and job-12-2 for the second run of the job
        if re.match(rf"job-{re.escape(name)}(?![0-9])", path.name):
            yield path
            continue
        try:
            lines = (path / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        jobs = {str(parsed(line).get("job")) for line in lines if f'"{name}' in line}
        if any(job == name or job.startswith(f"{name}_") for job in jobs):
            yield path


def _commented(name: str) -> list[Path]:
    """The run directory that the comment of a job names; none where Slurm does not know of it, or is absent."""
    try:
        jobs = queue.jobs([name])
    except UserError:
        return []
    places = {job.run_dir for job in jobs.values() if job.run_dir}
    return [place for place in places if place.is_dir()]


def is_finished(run: RunDirectory) -> bool:
    """Whether the newest attempt to train came to its end."""
    finished = False
    for event in run.events():
        if event["event"] == "done":
            finished = True
        elif event["event"] == "submitted" and event.get("verb", "train") == "train":
            finished = False
    return finished


def extends(before: DictConfig, after: DictConfig) -> bool:
    """Whether a changed configuration trains longer than the one with which the run has finished."""
    longer = after.train.epochs > before.train.epochs
    limit, new_limit = before.train.max_steps, after.train.max_steps
    return longer or (limit is not None and (new_limit is None or new_limit > limit))


def resume_again(launcher: str, run: str | Path) -> str:
    """What to type to train on with a run that was in a job: one that was started by hand is started by hand again.

    Args:
        launcher: of the attempt.
        run: as it would be typed; a path is quoted.
    """
    name = shlex.quote(str(run)) if isinstance(run, Path) else run
    if launcher == "inline":
        return f"sbatch sbatch_templates/srun.sbatch resume {name}"
    return f"python -m slurm_train resume {name}"


def resume_command(verb: str, path: Path) -> str:
    """What to type to go on with a run."""
    if verb == "verify":  # of which there is nothing to go on with
        return "the same command"
    return f"python -m slurm_train {'resume' if verb == 'train' else verb} {shlex.quote(str(path))}"
