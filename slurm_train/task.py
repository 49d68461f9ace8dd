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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from slurm_train.errors import EXIT_FAILURE, EXIT_INTERRUPTED, Saved, SlurmTrainError


@dataclass(frozen=True)
class Creation:
    """What rank 0 makes the run directory from, where no launcher has made it."""

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
    """train or evaluate."""

    create: Creation | None = None
    """Given when rank 0 has to make the run directory, once the ranks have met."""

    live: bool = False
    """Whether rank 0 shows the progress itself, because no other process follows the run directory."""

    def __call__(self) -> dict[str, Any]:
        """Train or evaluate.

        Under the local launcher a rank that fails leaves a word on why (its outcome file) and ends with the error's
        exit code; elsewhere the error is raised.
        """
        outcome = _outcome_file()
        try:
            self._find_user_files()
            with _stop_before_start():
                # Late, so that whoever only pickles a task needs no torch.
                from slurm_train.train.run import run

                return run(self)
        except BaseException as error:
            if outcome is None or (isinstance(error, SystemExit) and not error.code):
                raise
            _leave(outcome, error)

    def _find_user_files(self) -> None:
        """Let a user's own targets be imported from where the command was typed, and from their --config-dir."""
        text = self.create.plan_json if self.create else Path(self.run_dir, "plan.json").read_text(encoding="utf-8")
        plan = json.loads(text)
        wanted = [plan["cwd"], *plan["config_dirs"]]
        sys.path[:] = wanted + [path for path in sys.path if path not in wanted]


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


def _outcome_file() -> Path | None:
    """Where a rank of the local launcher leaves word: logs/<job>_<rank>.outcome.json; None under other launchers."""
    if os.environ.get("SUBMITIT_EXECUTOR") != "local":
        return None
    job, rank = os.environ["SUBMITIT_LOCAL_JOB_ID"], os.environ["SUBMITIT_LOCAL_GLOBALID"]
    return Path(os.environ["SUBMITIT_FOLDER"], f"{job}_{rank}.outcome.json")


def _leave(path: Path, error: BaseException) -> NoReturn:
    """Write the outcome file and end this process with the error's exit code."""
    code = exit_code(error)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    outcome = {
        "rank": int(os.environ["SUBMITIT_LOCAL_GLOBALID"]),
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
    print(text, file=sys.stderr)
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
