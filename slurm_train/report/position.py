"""Where a run is: its attempts, how far training came and how fast it goes, from the run directory alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from slurm_train.errors import EXIT_INTERRUPTED, EXIT_SAVED
from slurm_train.report.rundir import RunDirectory, parsed

TAIL_BYTES = 1 << 18
"""How much of metrics.jsonl is read, from its end: some thousand steps, which is more than one block of them."""

Record = Mapping[str, Any]


@dataclass
class Attempt:
    """One start of a run: by a launcher, or by ranks that were started by hand. A requeued job is one attempt."""

    launcher: str
    """slurm, local or inline."""

    verb: str
    """train or evaluate."""

    time: float
    """When it was submitted or started, in seconds since 1970."""

    job: str = ""
    """Id of its Slurm job; "" for none."""

    starts: list[Record] = field(default_factory=list)
    """Its `started` events: more than one after a requeue."""

    ended: str = ""
    """How it ended by its own word: done, saved, failed, interrupted or cancelled; "" when it has not said."""

    error: str = ""
    """Why it failed, where the launcher told."""

    stopped_by: str = ""
    """The signal after which it saved and left, such as SIGUSR2; "" for none."""


@dataclass(frozen=True)
class Position:
    """A run as its directory shows it."""

    run: RunDirectory
    plan: Record
    """plan.json; empty if it cannot be read."""

    attempts: tuple[Attempt, ...]
    """Oldest first."""

    scores: Mapping[str, float]
    """The newest val_loss, val_accuracy, test_loss and test_accuracy, as far as they are known."""

    newest: Record
    """The newest record of a step: step, epoch from 0, loss, time; empty if there is none."""

    pace: float | None
    """Seconds a step, lately, evaluations included; None where it cannot be told."""

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def training(self) -> Attempt | None:
        """The newest attempt to train; an evaluation changes nothing about how a run stands."""
        return next((attempt for attempt in reversed(self.attempts) if attempt.verb == "train"), None)

    @property
    def jobs(self) -> list[str]:
        """The ids of all its Slurm jobs, oldest first."""
        return list(dict.fromkeys(attempt.job for attempt in self.attempts if attempt.job))

    @cached_property
    def _started(self) -> Record:
        """The newest `started` event."""
        return next((attempt.starts[-1] for attempt in reversed(self.attempts) if attempt.starts), {})

    @property
    def _fresh(self) -> bool:
        """Whether the newest record is of the newest start: what is newer was lost with the ranks that computed it."""
        return bool(self.newest) and float(self.newest.get("time", 0.0)) >= float(self._started.get("time", 0.0))

    @property
    def stepped(self) -> bool:
        """Whether the newest start has done a step."""
        return self._fresh

    @property
    def step(self) -> int | None:
        """Optimizer steps done."""
        return self.newest.get("step") if self._fresh else self._started.get("step", self.newest.get("step"))

    @property
    def steps(self) -> int | None:
        """Steps of the whole run."""
        return (self._started or self.plan).get("total_steps")

    @property
    def epoch(self) -> int | None:
        """The epoch that it is in, counted from 1."""
        if self._fresh or not self._started:
            return self.newest["epoch"] + 1 if "epoch" in self.newest else None
        per_epoch, step = self._started.get("steps_per_epoch"), self.step
        if not per_epoch or step is None:
            return None
        epoch: int = step // per_epoch + 1
        return min(epoch, self.epochs) if self.epochs else epoch

    @property
    def epochs(self) -> int | None:
        """Epochs of the whole run."""
        epochs: int | None = self._started.get("epochs", self.plan.get("epochs"))
        return epochs

    @property
    def loss(self) -> float | None:
        """Of the newest step."""
        step = self.step
        return self.newest.get("loss") if step is not None and self.newest.get("step", step + 1) <= step else None

    @property
    def seconds_left(self) -> float | None:
        """How long training takes from here, as fast as it went lately; None where it cannot be told."""
        if self.pace is None or self.steps is None or self.step is None or not self._fresh:
            return None
        return max(self.steps - self.step, 0) * self.pace

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint, by its number. Whether it is whole, a resume finds out."""
        return max(self._checkpoints)[1] if self._checkpoints else None

    @property
    def checkpoint_step(self) -> int:
        """The number of the newest checkpoint; 0 for none."""
        return max(self._checkpoints)[0] if self._checkpoints else 0

    @cached_property
    def _checkpoints(self) -> list[tuple[int, Path]]:
        return [
            (int(match[1]), path)
            for path in self.run.checkpoints.glob("step_*")
            if (match := re.fullmatch(r"step_(\d+)", path.name))
        ]


def position(run: RunDirectory) -> Position:
    """Read where a run is. Of the metrics only the end is read, for they can be large."""
    try:
        plan = parsed(run.plan.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        plan = {}
    attempts: list[Attempt] = []
    scores: dict[str, float] = {}
    for event in run.events():
        _take(attempts, event, str(plan.get("launcher", "")))
        scores |= {
            name: value
            for name, value in event.items()
            if name in ("val_loss", "val_accuracy", "test_loss", "test_accuracy") and isinstance(value, float)
        }
    since = attempts[-1].starts[-1].get("time", 0.0) if attempts and attempts[-1].starts else 0.0
    lines = _tail(run.metrics)
    newest = next(_steps(reversed(lines)), {})
    return Position(run, plan, tuple(attempts), scores, newest, _pace(lines, newest, since))


def _take(attempts: list[Attempt], event: Record, launcher: str) -> None:
    """Let an event change or add to the attempts."""
    name, now, job = event["event"], float(event.get("time", 0.0)), str(event.get("job") or "")
    last = attempts[-1] if attempts else None
    if name in ("done", "stopped"):  # of training, though an evaluation may have begun since
        last = next((found for found in reversed(attempts) if found.verb == "train" and not found.ended), last)
    elif name == "cancelled":
        last = next((found for found in reversed(attempts) if job and found.job == job), last)
    if name == "submitted":
        if last is None or not job or job != last.job:  # else the job was faster than the word of its submission
            attempts.append(last := Attempt(launcher, "train", now, job))
        last.launcher, last.verb = str(event.get("launcher", launcher)), str(event.get("verb", "train"))
    elif name == "started":
        again = last is not None and last.ended != "done" and (not last.starts or (job and job == last.job))
        if last is None or not again:
            attempts.append(last := Attempt(launcher, "train", now))
        last.job, last.ended, last.error, last.stopped_by = job or last.job, "", "", ""
        last.starts.append(event)
    elif last is None:
        return
    elif name in ("done", "evaluated"):
        last.ended = "done"
        if name == "evaluated" and len(last.starts) <= 1:
            last.verb = "evaluate"
    elif name == "stopped":
        last.ended, last.stopped_by = "saved", str(event.get("reason", ""))
    elif name == "cancelled":
        last.ended = last.ended or "cancelled"
    elif name == "failed":
        words = {EXIT_SAVED: "saved", EXIT_INTERRUPTED: "interrupted"}
        last.ended, last.error = words.get(event.get("exit_code", 1), "failed"), str(event.get("error", ""))


def _tail(path: Path) -> list[bytes]:
    """The last whole lines of a file; none if it is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - TAIL_BYTES, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    # The last one is empty, or torn; so may be the first where the file is longer.
    return lines[1 if size > TAIL_BYTES else 0 : -1]


def _steps(lines: Iterator[bytes]) -> Iterator[Record]:
    """The records of training steps among lines."""
    for line in lines:
        record = parsed(line.decode("utf-8", errors="replace"))
        if {"step", "epoch", "loss", "time"} <= record.keys():
            yield record


def _pace(lines: list[bytes], newest: Record, since: float) -> float | None:
    """Seconds a step, from the oldest of the lines that belongs to the newest start to the newest."""
    first = next((record for record in _steps(iter(lines)) if record["time"] >= since), None)
    if first is None or newest["step"] <= first["step"] or newest["time"] <= first["time"]:
        return None
    pace: float = (newest["time"] - first["time"]) / (newest["step"] - first["step"])
    return pace
