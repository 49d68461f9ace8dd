"""What becomes of a job whose ranks have ended before their run was done: run by its batch shell, after srun.

    srun ... || exec python -m slurm_train.launch.restart "$?" resume RUN

The ranks only save and leave with exit code 75; whether there is more to do is asked of Slurm here, once for a job,
where its commands are at hand and no process group has to live any longer. The same job goes back into the queue, or,
where Slurm refuses that, a new one is submitted. What the signals mean (manuals of sbatch, scancel and slurm.conf; each
was seen on a real cluster):

- SIGUSR2, the job RUNNING: the time limit is near, or somebody wants it to be so;
- SIGTERM, the job RUNNING with a PreemptTime: it is preempted;
- SIGTERM, the job COMPLETING: it was cancelled, or requeued by somebody else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_train.config.compose import compose
from slurm_train.config.saved import load
from slurm_train.errors import EXIT_SAVED, EXIT_USER, SlurmTrainError
from slurm_train.launch import queue, start
from slurm_train.launch.causes import outcomes
from slurm_train.launch.queue import Standing
from slurm_train.launch.runs import find_run, resume_again
from slurm_train.report.position import Attempt, Position, position
from slurm_train.report.restarts import Restarts, restarts
from slurm_train.report.rundir import RunDirectory
from slurm_train.topology.jobs import job_id
from slurm_train.topology.limits import lead_seconds

FINAL = {"BadNumber", "Superseded"}
"""Errors after which another start would come to the same end."""


UNHEARD = 140
"""Exit code of a rank that SIGUSR2 has ended before it could listen to it: 128 and the number of the signal."""


@dataclass(frozen=True)
class Verdict:
    """Whether a run starts again, and why."""

    again: bool
    why: str
    """In a few words, such as "preempted"."""


@dataclass(frozen=True)
class End:
    """How the ranks of a job have ended."""

    place: Position
    """The run."""

    job: str
    """The job."""

    code: int
    """The exit code of srun; not 0."""

    standing: Standing
    """How Slurm has the job now."""

    history: Restarts
    """What has happened before."""

    kinds: Sequence[str] = ()
    """The errors that ranks have told of, by name."""

    @property
    def saved(self) -> bool:
        """Whether they were asked to stop, and have lost nothing."""
        return _attempt(self.place).ended == "saved" or self.code == EXIT_SAVED or self.code == UNHEARD

    @property
    def told(self) -> str:
        """That, in a few words."""
        return f"saved at step {self.place.step}" if self.place.step and self.saved else f"exit code {self.code}"


def verdict(end: End, limit: int) -> Verdict:
    """Judge the end of a job.

    Args:
        end: how its ranks have ended.
        limit: launcher.restarts.
    """
    attempt, standing = _attempt(end.place), end.standing
    if attempt.job != end.job:
        return Verdict(False, f"job {attempt.job} has taken over" if attempt.job else "the run has not started")
    if attempt.ended == "done":
        return Verdict(False, "the run is done")
    if standing.state in ("COMPLETING", "CANCELLED"):
        return Verdict(False, "cancelled")
    if not end.saved and not standing.preempted and (why := _hopeless(end)):
        return Verdict(False, why)
    if attempt.stopped_by == "SIGTERM" and not standing.preempted:
        return Verdict(False, "asked to stop by SIGTERM")
    if end.history.count >= limit:
        return Verdict(False, f"it has started again {end.history.count} times: launcher.restarts={limit}")
    if standing.preempted:
        return Verdict(True, "preempted")
    return Verdict(True, "near its time limit" if end.saved else "failed")


def _hopeless(end: End) -> str:
    """Why a run is not to start again after a failure; "" if it is."""
    if end.code == EXIT_USER:
        return "its input is at fault"
    if final := FINAL.intersection(end.kinds):
        return f"another start would come to the same {', '.join(sorted(final))}"
    if not end.place.stepped:
        return "it failed before its first step"
    if end.history.failed_from == end.place.checkpoint_step:
        since = f"from step {end.place.checkpoint_step}" if end.place.checkpoint_step else "without a checkpoint"
        return f"it has failed twice {since}; train.save_steps saves more often"
    return ""


def settle(run: RunDirectory, job: str, code: int) -> int:
    """Let a run start again if it is to, and say what becomes of it.

    Args:
        run: the run.
        job: its job, whose batch shell this is.
        code: exit code of srun.

    Returns:
        the exit code for the job: that of the ranks, 75 if they have saved.
    """
    place, config = position(run), load(run.config)
    kinds = [str(word.get("kind", "")) for word in outcomes(run.logs, job)]
    end = End(place, job, code, queue.standing(job), restarts(run.events()), kinds)
    code = EXIT_SAVED if end.saved else code
    found = verdict(end, config.launcher.restarts)
    by_hand = _attempt(place).launcher != "slurm"
    command = resume_again(_attempt(place).launcher, run.path)
    if not found.again:
        _say(f"{end.told}; not started again: {found.why}" + f"; go on with: {command}" * end.saved)
        return code
    word = {"job": job, "why": found.why, "step": place.step, "checkpoint": place.checkpoint_step}
    longer = [] if by_hand else _longer_lead(end.history.save_seconds, config.launcher.signal_seconds)
    refusal = f"it needs {longer[0]}" if longer else _requeue(run, word, end.standing)
    if not refusal:
        _say(f"{end.told}, {found.why}: job {job} goes back into the queue")
    elif by_hand:
        _say(f"{end.told}, {found.why}; job {job} cannot be requeued ({refusal}); go on with: {command}")
    else:
        _say(f"{end.told}, {found.why}; a new job goes on, since job {job} cannot be requeued ({refusal})")
        run.append_event("requeued", **word, new_job=True)
        start.resume(str(run.path), longer, after=job)
    return code


def _requeue(run: RunDirectory, word: Mapping[str, Any], standing: Standing) -> str:
    """Put the job back into the queue; why that cannot be, "" if it is done."""
    if not standing.requeue:
        return "it was submitted with --no-requeue, or the cluster has JobRequeue=0"
    # The word comes first: this process ends with the requeue.
    run.append_event("requeued", **word)
    try:
        queue.requeue(str(word["job"]))
    except SlurmTrainError as error:
        run.append_event("requeued", **word, refused=str(error))
        return str(error)
    return ""


def _longer_lead(save_seconds: float, lead: int) -> list[str]:
    """The override by which the ranks are told earlier, if saves take long; a job that is requeued keeps its own."""
    needed = lead_seconds(save_seconds)
    return [f"launcher.signal_seconds={needed}"] if needed > lead else []


def _attempt(place: Position) -> Attempt:
    """The newest attempt to train; one of no job if there is none."""
    return place.training or Attempt("", "train", 0.0)


def run_of(words: Sequence[str], job: str) -> RunDirectory | None:
    """The run that a job has trained, from the words after `python -m slurm_train`; None if it has trained none.

    Raises:
        SlurmTrainError: the run is not found.
    """
    if words[:1] == ["resume"] and len(words) > 1:
        return find_run(words[1])
    if words and "=" not in words[0] and words[0] != "run" and not words[0].startswith("-"):
        return None  # another verb
    try:
        return find_run(job)
    except SlurmTrainError:
        place = compose([word for word in words if "=" in word and not word.startswith("-")]).config.run.dir
        if not place or not Path(place).expanduser().is_dir():
            raise
        return RunDirectory.open(Path(place).expanduser())


def main(arguments: Sequence[str]) -> int:
    """The batch shell's last word.

    Args:
        arguments: exit code of srun, then the words that the ranks were started with.

    Returns:
        the exit code for the job.
    """
    code, words = int(arguments[0]), list(arguments[1:])
    job = job_id(os.environ)
    try:
        run = run_of(words, job) if job else None
        return code if run is None or job is None else settle(run, job, code)
    except Exception as error:  # whatever it is, the ranks' own exit code is that of the job
        _say(f"exit code {code}; not started again: {error or type(error).__name__}")
        return code


def _say(text: str) -> None:
    print(f"slurm_train: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
