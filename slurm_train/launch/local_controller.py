"""Starts the ranks of a local run and stays until the last has ended.

    python -m slurm_train.launch.local_controller FOLDER

submitit's own controller waits for all tasks, whatever becomes of them. This one ends all when one fails, when the
command that started it is gone, or when it is told to; no rank outlives it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from submitit.core import utils
from submitit.local.local import Controller

from slurm_train.errors import EXIT_SAVED

COMMAND_PID = "SLURM_TRAIN_COMMAND_PID"
"""Environment variable: the process that is gone when this one's parent is another."""

LAST_WORDS = 0.5
"""Seconds that the other ranks have, after one failed, to write down why they fail too."""

SAVING = 10.0
"""The same, after one has saved and left: they leave as well, each in its own time."""

INTERRUPTED = 0.5
"""Seconds between the interrupt and the kill when the user presses Ctrl-C."""


class LocalController(Controller):
    """submitit's controller, with ranks that end together and an account of how each of them ended.

    Args:
        folder: the log folder, where <job>_exits.json is written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._parent = int(os.environ.get(COMMAND_PID, os.getppid()))
        self._ends: dict[int, dict[str, Any]] = {}
        self._interrupts = 0
        self._signalled = False
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGUSR2, self._forward_signal)

    @property
    def exits(self) -> list[dict[str, Any]]:
        """How each rank ended, in rank order.

        Each has rank, exit_code (negative for a signal), own (whether before any was killed) and time.
        """
        return [self._ends[rank] for rank in sorted(self._ends)]

    def start_tasks(self) -> None:
        """Start each rank in a process group of its own, so that its workers end with it."""
        self.folder.mkdir(exist_ok=True)
        command = os.getpid()
        for rank in range(self.ntasks):
            paths = utils.JobPaths(self.folder, self.pid, rank)
            # of an older job that had the same process id
            paths.folder.joinpath(f"{self.pid}_{rank}.outcome.json").unlink(missing_ok=True)
            self.stdouts.append(paths.stdout.open("a"))
            self.stderrs.append(paths.stderr.open("a"))
            environment = os.environ | {
                "SUBMITIT_LOCAL_LOCALID": str(rank),
                "SUBMITIT_LOCAL_GLOBALID": str(rank),
                "SUBMITIT_LOCAL_JOB_ID": self.pid,
            }
            self.tasks.append(
                subprocess.Popen(
                    self.command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self.stdouts[rank],
                    stderr=self.stderrs[rank],
                    start_new_session=True,
                    preexec_fn=lambda: _die_with(command),
                )
            )

    def wait(self, freq: int = 20) -> Sequence[int | None]:
        """Wait until all ranks have ended, or until they have to be ended.

        Args:
            freq: looks per second.

        Returns:
            the exit code of each rank; None for one that is still to be killed.
        """
        began = time.monotonic()
        deadline = float("inf")
        while self._alive():
            now = time.monotonic()
            deadline = min(deadline, now + self._grace())
            if now >= deadline or os.getppid() != self._parent:
                break
            if self.timeout_s and now - began >= self.timeout_s:
                break
            if self.timeout_s and not self._signalled and now - began >= self.timeout_s - self.signal_delay_s:
                self._signalled = True
                self._forward_signal(signal.SIGUSR2)
            time.sleep(1.0 / freq)
        return [task.poll() for task in self.tasks]

    def kill_tasks(self) -> None:
        """Kill what is left of the ranks and of the processes that they started."""
        self._alive()
        for task in self.tasks:
            try:
                os.killpg(task.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for task in self.tasks:
            task.wait()
        self._alive(own=False)
        self.tasks = []
        for file in self.stdouts + self.stderrs:
            file.close()
        self.stdouts, self.stderrs = [], []

    def run(self, max_retry: int = 1) -> None:
        """Start the ranks, wait, end what is left, and write the account."""
        try:
            self.start_tasks()
            self.wait()
        finally:
            self.kill_tasks()
            path = self.folder / f"{self.pid}_exits.json"
            path.with_suffix(".tmp").write_text(json.dumps(self.exits))
            path.with_suffix(".tmp").replace(path)

    def _alive(self, own: bool = True) -> bool:
        """Whether any rank runs; notes those that have ended since the last look."""
        for rank, task in enumerate(self.tasks):
            if rank not in self._ends and (code := task.poll()) is not None:
                self._ends[rank] = {"rank": rank, "exit_code": code, "own": own, "time": time.time()}
        return len(self._ends) < len(self.tasks)

    def _grace(self) -> float:
        """Seconds until the ranks are killed, as things stand."""
        if self._interrupts:
            return INTERRUPTED if self._interrupts == 1 else 0.0
        codes = {end["exit_code"] for end in self._ends.values()} - {0}
        if not codes:
            return float("inf")
        return SAVING if codes == {EXIT_SAVED} else LAST_WORDS

    def _forward_signal(self, signum: int, *args: Any) -> None:
        for task in self.tasks:
            if task.poll() is None:
                task.send_signal(signum)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._forward_signal(signal.SIGINT)


def _die_with(parent: int) -> None:
    """In a new rank: be killed when the controller dies, even by SIGKILL (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before
            os._exit(1)


def main() -> None:
    """Run the tasks that the environment describes; exit with 1 when any of them failed."""
    controller = LocalController(Path(sys.argv[1]))
    controller.run()
    sys.exit(int(any(end["exit_code"] for end in controller.exits)))


if __name__ == "__main__":
    main()
