"""What a rank is asked to do: the only bridge from the launch side, which knows no torch, to training.

A task is small and pickles by name, so that a job starts from the run directory and not from what its submitter held
in memory.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from slurm_train.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    TRACEBACK,
    RankError,
    RunDirectoryError,
    Saved,
    SlurmTrainError,
)
from slurm_train.report.rundir import RunDirectory
from slurm_train.report.summary import summary
from slurm_train.report.trust import umask_of
from slurm_train.topology.jobs import job_id
from slurm_train.topology.ranks import ranks


@dataclass(frozen=True)
class Settings:
    """A configuration and a plan that are not, or not yet, those in the run directory."""

    config_yaml: str
    """Text of config.yaml."""

    plan_json: str
    """Text of plan.json."""


@dataclass(frozen=True)
class Task:
    """One run, as each of its ranks is told of it.

    Calling it does the work in this process, as the rank that the environment names, and returns the final metrics.
    """

    run_dir: str
    """The run directory."""

    verb: str = "train"
    """train, evaluate, generate or verify."""

    settings: Settings | None = None
    """What to go by instead of config.yaml and plan.json of the run directory."""

    create: bool = False
    """Whether rank 0 has to make the run directory from the settings, once the ranks have met."""

    live: bool = False
    """Whether rank 0 shows the progress and the summary itself, because no other process follows the run directory."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of generate or verify, such as the prompt."""

    def __call__(self) -> dict[str, Any]:
        """Do what the verb says.

        Under submitit, local or on Slurm, a rank that fails leaves a word on why (its outcome file) and ends with the
        error's exit code; elsewhere the error is raised.
        """
        outcome = _outcome_file(os.environ)
        if outcome is not None:
            outcome.unlink(missing_ok=True)  # of the same job before it was requeued
        try:
            os.umask(umask_of(Path(self.run_dir)))
            self._find_user_files()
            with _stop_before_start():
                # Late, so that whoever only pickles a task needs no torch.
                from slurm_train.train.run import run

                results = run(self)
            if self.live and ranks(os.environ).rank == 0:
                print(summary(RunDirectory(self.run_dir)), flush=True)
            return results
        except BaseException as error:
            _leave_undisturbed()
            if outcome is None or (isinstance(error, SystemExit) and not error.code):
                raise
            _leave(outcome, error)

    def _find_user_files(self) -> None:
        """Let a user's own targets be imported from where the command was typed, and from their --config-dir."""
        plan = json.loads(self.settings.plan_json if self.settings else self._read("plan.json"))
        wanted = [plan["cwd"], *plan["config_dirs"]]
        sys.path[:] = wanted + [path for path in sys.path if path not in wanted]

    def _read(self, name: str) -> str:
        """A file of the run directory, which another host has written."""
        try:
            return Path(self.run_dir, name).read_text(encoding="utf-8")
        except OSError as error:
            raise RunDirectoryError(
                f"{self.run_dir} cannot be read on {socket.gethostname()}: {error.strerror}",
                "run.dir",
                "use a directory that all nodes share",
            ) from None


@contextmanager
def _stop_before_start() -> Iterator[None]:
    """A request to stop that comes before training listens for it ends the task: there is nothing to save yet."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Saved(f"stopped by {signal.Signals(number).name} before the first step")

    names = ("SIGTERM", "SIGUSR2") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_undisturbed() -> None:
    """A rank that is about to end does so with its own exit code, though the end of another has srun send SIGTERM."""
    try:
        several = ranks(os.environ).world_size > 1
    except RankError:  # this is what it ends with
        return
    if several and threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGUSR2"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _outcome_file(env: Mapping[str, str]) -> Path | None:
    """Where a rank that submitit has started leaves word: logs/<job>_<rank>.outcome.json; None for others."""
    executor = env.get("SUBMITIT_EXECUTOR")
    if executor == "local":
        job, rank = env["SUBMITIT_LOCAL_JOB_ID"], env["SUBMITIT_LOCAL_GLOBALID"]
    elif executor == "slurm" and "SUBMITIT_FOLDER" in env:
        job, rank = job_id(env) or "", env["SLURM_PROCID"]
    else:
        return None
    return Path(env["SUBMITIT_FOLDER"], f"{job}_{rank}.outcome.json")


def _leave(path: Path, error: BaseException) -> NoReturn:
    """Write the outcome file and end this process with the error's exit code."""
    code = exit_code(error)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    outcome = {
        "rank": ranks(os.environ).rank,
        "host": socket.gethostname(),
        "exit_code": code,
        "kind": type(error).__name__,
        "message": str(error) if isinstance(error, SlurmTrainError) else one_line(error),
        "traceback": text,
        "time": time.time(),
    }
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(outcome), encoding="utf-8")
    beside.replace(path)
    told = isinstance(error, SlurmTrainError) and code != EXIT_FAILURE and os.environ.get(TRACEBACK) != "1"
    print(error if told else text, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: its clean-up would wait for ranks that no longer answer.
    os._exit(code)


def exit_code(error: BaseException) -> int:
    """The exit code of a process that ends with this error."""
    if isinstance(error, SlurmTrainError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF
    return EXIT_FAILURE


def one_line(error: BaseException, limit: int = 500) -> str:
    """An error as one line: its kind and its text, cut at `limit` characters."""
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= limit else line[: limit - 3] + "..."
