"""The local launcher: the ranks of a run as processes of this host, in the foreground, with rank 0's progress live."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from submitit import Job
from submitit.local.local import LocalExecutor, LocalJob

from slurm_train.errors import EXIT_SAVED, Interrupted, RankFailed, Saved, SlurmTrainError, StartError
from slurm_train.launch.children import importable
from slurm_train.launch.follow import Follower
from slurm_train.launch.local_controller import COMMAND_PID
from slurm_train.launch.outcome import failure, rank_ends
from slurm_train.launch.plan import LaunchPlan
from slurm_train.launch.runs import resume_command
from slurm_train.report.progress import ProgressView
from slurm_train.report.rundir import RunDirectory
from slurm_train.report.summary import duration
from slurm_train.report.trust import private
from slurm_train.task import Task
from slurm_train.topology.jobs import job_id, scrub

WARNING_SECONDS = 30
"""How long before the end of launcher.time the ranks are asked to save; half of the time if that is less."""

LOOK_SECONDS = 0.1
"""Seconds between two looks at what the ranks have written."""


class Executor(LocalExecutor):
    """submitit's local executor with our controller, no time limit of its own, and an environment that is given.

    Args:
        folder: where submitit keeps its pickles and logs.
        environment: of the ranks, whole.
        time_seconds: time limit; None for none.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], time_seconds: int | None) -> None:
        super().__init__(folder)
        self._environment = environment
        self._time_seconds = time_seconds or 0
        self.controller: subprocess.Popen[bytes] | None = None

    def _submit_command(self, command: str) -> LocalJob[Any]:
        ranks = self._num_tasks()
        environment = {
            **self._environment,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_FOLDER": str(self.folder),
            "SUBMITIT_LOCAL_NTASKS": str(ranks),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(self._time_seconds),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(min(WARNING_SECONDS, self._time_seconds // 2)),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "",
            COMMAND_PID: str(os.getpid()),
        }
        with (self.folder / "controller.log").open("a") as log:
            process = self.controller = subprocess.Popen(
                [sys.executable, "-m", "slurm_train.launch.local_controller", str(self.folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that the terminal's Ctrl-C reaches this process alone, which decides
            )
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=list(range(ranks)))


def run(plan: LaunchPlan, directory: RunDirectory, task: Task, view: ProgressView | None = None) -> None:
    """Run all ranks on this host and return when they are done.

    Args:
        plan: what to run.
        directory: the run directory, already made.
        task: what each rank does.
        view: where to show the progress; by default standard output.

    Raises:
        RankFailed: a rank died or raised.
        UserError: a rank met a fault of the user's.
        Saved: the run was asked to stop (SIGTERM, SIGHUP, SIGUSR2, or the end of launcher.time) and has saved.
        Interrupted: Ctrl-C.
    """
    view = view or ProgressView()
    follower = Follower(directory, view)
    around = job_id(os.environ)  # the job of the shell around, such as srun --pty
    directory.append_event("submitted", launcher="local", job=around, world_size=plan.world_size, verb=plan.verb)
    with _signals() as signals:
        try:
            with private(directory.path):
                job, controller = _submit(plan, directory, task)
            signals.send_to(controller)
            follower.follow_output(job.paths.stdout)
            while controller.poll() is None:
                follower.show()
                time.sleep(LOOK_SECONDS)
            follower.show(last=True)
        finally:
            view.close()
    error = _error(plan, directory, str(job.job_id), signals)
    if error is not None:
        directory.append_event("failed", error=str(error), exit_code=error.exit_code)
        raise error


def _submit(plan: LaunchPlan, directory: RunDirectory, task: Task) -> tuple[Job[Any], subprocess.Popen[bytes]]:
    """Start the controller, which starts the ranks; returns submitit's job and the controller's process."""
    logging.getLogger("submitit").setLevel(logging.ERROR)
    environment = importable({**scrub(os.environ), **plan.environment})
    executor = Executor(directory.logs, environment, plan.time_seconds)
    executor.update_parameters(tasks_per_node=plan.world_size)
    job = executor.submit(task)
    if executor.controller is None:
        raise StartError("submitit did not start the controller of the ranks")
    return job, executor.controller


def _error(plan: LaunchPlan, directory: RunDirectory, job: str, signals: _Signals) -> SlurmTrainError | None:
    """Why the job failed; None if it did not."""
    if signals.interrupts:
        return Interrupted("interrupted")
    resume = resume_command(plan.verb, directory.path)
    ends = rank_ends(directory.logs, job)
    failed = [end for end in ends if end.code]
    # A rank that had no handler yet was ended by the signal itself; one that had says that it stopped.
    early = any(not end.outcome for end in failed) and all(not end.outcome or end.code == EXIT_SAVED for end in failed)
    if signals.stop and (not ends or early):
        return Saved(f"stopped by {signals.stop} before the first step", remedy=f"go on with: {resume}")
    if not ends:
        log = directory.logs / "controller.log"
        return StartError("the controller of the ranks ended without a word", remedy=f"see {log}")
    if failed and plan.time_seconds and all(not end.own for end in failed):
        problem = f"the ranks were ended at the time limit of {duration(plan.time_seconds)}"
        return RankFailed(problem, "launcher.time", f"go on with: {resume}")
    return failure(ends, resume)


class _Signals:
    """What this process was told by signals, told on to the controller of the ranks."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.stop = ""
        self._controller: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def send_to(self, controller: subprocess.Popen[bytes]) -> None:
        """From now on, this is whom to tell; what came before is told now."""
        self._controller = controller
        for number in self._early:
            controller.send_signal(number)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C: end all ranks; the second time without waiting."""
        self.interrupts += 1
        self._tell(signal.SIGINT)

    def ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        """Save and leave. The ranks listen to SIGTERM and SIGUSR2."""
        self.stop = signal.Signals(number).name
        self._tell(number if number == signal.SIGUSR2 else signal.SIGTERM)

    def _tell(self, number: int) -> None:
        if self._controller is None:
            self._early.append(number)
        else:
            self._controller.send_signal(number)


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Listen to the signals that end a run; the handlers before are restored at the end."""
    signals = _Signals()
    handlers: dict[int, Callable[[int, FrameType | None], None]] = {signal.SIGINT: signals.interrupt}
    for name in ("SIGTERM", "SIGHUP", "SIGUSR2"):
        handlers[getattr(signal, name)] = signals.ask_to_stop
    before = {number: signal.getsignal(number) for number in handlers}
    # HUP is ignored under nohup. INT is too for a script's background process, but whoever sends it means it.
    ignored = {number for number, handler in before.items() if handler is signal.SIG_IGN} - {signal.SIGINT}
    for number in handlers.keys() - ignored:
        signal.signal(number, handlers[number])
    try:
        yield signals
    finally:
        for number in handlers.keys() - ignored:
            signal.signal(number, before[number])
