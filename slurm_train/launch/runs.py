"""Runs that are there: found by what a user types for RUN, and how far they came."""

from __future__ import annotations

import shlex
from pathlib import Path

from omegaconf import DictConfig

from slurm_train.errors import RunDirectoryError
from slurm_train.report.rundir import RunDirectory


def find_run(name: str) -> RunDirectory:
    """The run that `name` means: a run directory, or a run id below runs/.

    Raises:
        RunDirectoryError: there is none, or more than one.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return RunDirectory.open(path)
    runs = Path("runs")
    found = sorted(config.parent for config in runs.glob("*/*/config.yaml") if config.parent.name == name)
    if len(found) > 1:
        paths = " ".join(map(str, found))
        raise RunDirectoryError(f"{name} is the id of {len(found)} runs", remedy=f"name one: {paths}")
    if not found:
        newest = sorted(runs.glob("*/*/config.yaml"), key=lambda config: config.stat().st_mtime)
        known = f"the newest run is {newest[-1].parent}" if newest else "there are no runs below runs/ here"
        raise RunDirectoryError(f"there is no run directory or run id {name}", remedy=known)
    return RunDirectory.open(found[0])


def is_finished(run: RunDirectory) -> bool:
    """Whether the newest attempt to train came to its end."""
    finished = False
    for event in run.events():
        if event["event"] == "done":
            finished = True
        elif event["event"] == "submitted" and event.get("verb") != "evaluate":
            finished = False
    return finished


def extends(before: DictConfig, after: DictConfig) -> bool:
    """Whether a changed configuration trains longer than the one with which the run has finished."""
    longer = after.train.epochs > before.train.epochs
    limit, new_limit = before.train.max_steps, after.train.max_steps
    return longer or (limit is not None and (new_limit is None or new_limit > limit))


def resume_command(verb: str, path: Path) -> str:
    """What to type to go on with a run."""
    return f"python -m slurm_train {'resume' if verb == 'train' else verb} {shlex.quote(str(path))}"
