"""What the verb `status` shows: all runs in a table, or one run line by line."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_train.errors import UserError
from slurm_train.launch import causes, queue
from slurm_train.launch.queue import Job
from slurm_train.launch.runs import find_run, resume_again
from slurm_train.launch.state import State, state
from slurm_train.report.position import Attempt, Position, position
from slurm_train.report.restarts import restarts
from slurm_train.report.rundir import RunDirectory
from slurm_train.report.summary import duration
from slurm_train.report.table import aligned, show

NEWEST = 20
"""How many runs are shown when not all are asked for."""


@dataclass(frozen=True)
class Row:
    """A run in figures; None for what is not known. This is what --json gives."""

    run: str
    """What to type for RUN: the run id, or the run directory where the id does not do."""

    directory: str
    launcher: str
    job: str | None
    state: str
    reason: str | None
    """Slurm's, for a job that is pending."""

    nodes: str | None
    epoch: int | None
    epochs: int | None
    step: int | None
    steps: int | None
    loss: float | None
    seconds_left: float | None
    """Of training, as fast as it went lately."""

    job_left: str | None
    """Of the job's time limit, as squeue prints it."""


@dataclass(frozen=True)
class Listing:
    """Runs, oldest activity first, with what could not be found out about them."""

    rows: list[Row]
    hidden: int
    """How many older runs are left out."""

    note: str
    """Why Slurm does not answer; "" if it does."""


def print_all(everything: bool, json: bool) -> None:
    """Print the runs, as a table or as JSON; why Slurm does not answer goes to standard error."""
    listing = runs_here(everything)
    if listing.note:
        print(f"note: {listing.note} (so states are what the runs themselves have told)", file=sys.stderr)
    if json:
        print(as_json(listing.rows))
    elif not listing.rows:
        print("no runs below runs/ here, and none of your jobs in the queue")
    else:
        show(table(listing))
    if listing.hidden and not json:
        print(f"({listing.hidden} older ones: --all)")


def print_one(name: str, json: bool) -> None:
    """Print one run, line by line or as JSON."""
    place, found, note = one(name)
    if note:
        print(f"note: {note} (so the state is what the run itself has told)", file=sys.stderr)
    if json:
        print(one_as_json(place, found))
    else:
        print(aligned(details(place, found)))


def runs_here(everything: bool = False) -> Listing:
    """The runs below runs/, and those of this user's queued jobs whose run directories lie elsewhere.

    Makes two calls of Slurm's commands at most, and none where no run has a job and Slurm is absent.

    Args:
        everything: not only the newest.
    """
    paths = sorted((path.parent for path in Path("runs").glob("*/*/config.yaml")), key=_activity)
    shown = paths if everything else paths[-NEWEST:]
    positions = [position(RunDirectory(path)) for path in shown]
    wanted = [name for place in positions for name in _jobs_that_count(place)]
    known: dict[str, Job] = {}
    note = ""
    if wanted or shutil.which("squeue"):
        try:
            known = {job.id: job for job in queue.mine()}
            positions = _elsewhere(known.values(), paths) + positions
            known = queue.completed(known, wanted)
        except UserError as error:
            note = str(error) if wanted else ""
    ids = [path.name for path in paths]
    rows = [_row(place, state(place, known), _name(place.run.path, ids)) for place in positions]
    return Listing(rows, len(paths) - len(shown), note)


def _elsewhere(jobs: Iterable[Job], here: Sequence[Path]) -> list[Position]:
    """The runs of queued jobs that are not below runs/."""
    known = {os.path.realpath(path) for path in here}
    places = {job.run_dir: None for job in jobs if job.run_dir and queue.active(job)}
    others = [path for path in places if os.path.realpath(path) not in known and (path / "config.yaml").is_file()]
    return [position(RunDirectory(path)) for path in others]


def one(name: str) -> tuple[Position, State, str]:
    """A run, how it stands, and why Slurm does not answer ("" if it does).

    Raises:
        RunDirectoryError: there is no such run.
    """
    place = position(find_run(name))
    try:
        return place, state(place, queue.jobs(_jobs_that_count(place))), ""
    except UserError as error:
        return place, state(place, {}), str(error)


def table(listing: Listing) -> list[list[str]]:
    """The rows as text, the head first; columns in which nothing stands are left out."""
    head = ["RUN", "JOB", "STATE", "NODES", "EPOCH", "STEP", "LOSS", "LEFT", "JOB LEFT"]
    lines = [head, *map(_cells, listing.rows)]
    kept = [column for column in range(len(head)) if any(line[column] for line in lines[1:])]
    return [[line[column] or "-" for column in kept] for line in lines]


def details(place: Position, found: State) -> list[tuple[str, str]]:
    """A run line by line: name and text."""
    row = _row(place, found, str(place.run.path))
    cells = dict(zip(("run", "job", "state", "nodes", "epoch", "step", "loss"), _cells(row), strict=False))
    attempt, job = found.attempt, found.job
    lines = [("run directory", row.directory), ("launcher", row.launcher), ("job", cells["job"])]
    lines += [("state", found.text), ("", _meaning(place, found)), ("nodes", cells["nodes"])]
    if job and job.state == "PENDING":
        lines.append(("", causes.waiting(place, job)))
    if attempt:
        world = attempt.starts[-1].get("world_size") if attempt.starts else place.plan.get("world_size")
        lines.append(("ranks", str(world or "")))
        history = restarts(place.run.events())
        if count := _restarts(place, attempt):
            lines.append(("restarts", f"{count}, the last one: {history.why}" if history.why else str(count)))
    lines += [(name, cells[name]) for name in ("epoch", "step", "loss")]
    for name, label in (("val", "validation"), ("test", "test")):
        figures = [(key, place.scores.get(f"{name}_{key}")) for key in ("loss", "accuracy")]
        lines.append((label, "   ".join(f"{key} {value:.4f}" for key, value in figures if value is not None)))
    lines.append(("checkpoint", str(place.checkpoint.relative_to(place.run.path)) if place.checkpoint else ""))
    left = [f"{duration(row.seconds_left)} of training"] if row.seconds_left is not None else []
    left += [f"{row.job_left} of the job"] if row.job_left else []
    lines.append(("time left", ", ".join(left)))
    lines.append(("cause", why(place, found)))
    return [line for line in lines if line[1]] + [("next", command) for command in _commands(place, found)]


def why(place: Position, found: State) -> str:
    """Why a run has failed, in one line; "" if it has not, or nothing tells."""
    if found.job and not found.going:
        return causes.failure(place, found.job)
    return " ".join(found.attempt.error.split()) if found.attempt and not found.going else ""


def as_json(rows: Sequence[Row]) -> str:
    """The rows as JSON text: a list of objects with the fields of `Row`."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def one_as_json(place: Position, found: State) -> str:
    """One run as JSON text: the fields of `Row`, and restarts, scores, checkpoint, cause and exit_code."""
    attempt = found.attempt
    more = {
        "restarts": _restarts(place, attempt) if attempt else 0,
        "scores": dict(place.scores),
        "checkpoint": str(place.checkpoint) if place.checkpoint else None,
        "cause": why(place, found) or None,
        "exit_code": None if found.going else found.exit_code,
    }
    return json.dumps(asdict(_row(place, found, str(place.run.path))) | more, indent=2)


def _restarts(place: Position, attempt: Attempt) -> int:
    """How often a run has started again by itself: in one job, or in another one after it."""
    return max(len(attempt.starts) - 1 if attempt.job else 0, restarts(place.run.events()).count)


def _jobs_that_count(place: Position) -> list[str]:
    """The jobs of the newest attempt, and of the newest to train."""
    attempts = (place.attempt, place.training)
    return list(dict.fromkeys(attempt.job for attempt in attempts if attempt and attempt.job))


def _row(place: Position, found: State, name: str) -> Row:
    attempt, job = found.attempt, found.job
    limited = job and job.left not in ("", "UNLIMITED", "INVALID", "NOT_SET")
    return Row(
        run=name,
        directory=str(place.run.path),
        launcher=attempt.launcher if attempt else str(place.plan.get("launcher", "")),
        job=attempt.job or None if attempt else None,
        state="PENDING" if job and job.state == "PENDING" else found.text,
        reason=job.reason or None if job and job.state == "PENDING" else None,
        nodes=job.nodes or None if job else None,
        epoch=place.epoch,
        epochs=place.epochs,
        step=place.step,
        steps=place.steps,
        loss=place.loss,
        seconds_left=place.seconds_left if found.going else None,
        job_left=job.left if job and limited else None,
    )


def _cells(row: Row) -> list[str]:
    state = f"{row.state} ({row.reason})" if row.reason else row.state
    return [
        row.run,
        row.job or "",
        state,
        row.nodes or "",
        _of(row.epoch, row.epochs),
        _of(row.step, row.steps),
        f"{row.loss:.4f}" if row.loss is not None else "",
        duration(row.seconds_left) if row.seconds_left is not None else "",
        row.job_left or "",
    ]


def _of(number: int | None, whole: int | None) -> str:
    if number is None:
        return ""
    return f"{number:,}/{whole:,}" if whole else f"{number:,}"


def _meaning(place: Position, found: State) -> str:
    """What a state means that is not plain."""
    if found.text == "lost":
        return "its processes have ended without a word"
    if found.text == "unknown" and found.attempt:
        return "Slurm does not know its job any more, and the run has not said how it ended"
    if found.text.startswith("running on "):
        return f"its last word is {duration(max(time.time() - _activity(place.run.path), 0.0))} old"
    return ""


def _commands(place: Position, found: State) -> list[str]:
    """What to type next."""
    run = shlex.quote(_name(place.run.path, [path.parent.name for path in Path("runs").glob("*/*/config.yaml")]))
    if found.going:
        cancellable = found.job and found.job.state != "COMPLETING"
        verbs = ["logs --follow", "cancel"] if cancellable else ["logs --follow"]
    elif found.text in ("done", "COMPLETED"):
        verbs = ["evaluate"]
    else:
        again = found.attempt.launcher if found.attempt and found.attempt.job else ""
        return [f"python -m slurm_train logs {run}", resume_again(again, run)]
    return [f"python -m slurm_train {verb} {run}" for verb in verbs]


def _name(path: Path, ids: Sequence[str]) -> str:
    """The shortest that finds the run."""
    below = path.parent.parent == Path.cwd() / "runs"
    return path.name if below and ids.count(path.name) == 1 else os.path.relpath(path) if below else str(path)


def _activity(path: Path) -> float:
    """When anything was last told of a run."""
    times = []
    for name in ("config.yaml", "events.jsonl", "metrics.jsonl"):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
