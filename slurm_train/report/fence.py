"""Which attempt a run directory belongs to: only the newest one that trains may write there.

A node that drops off the network goes on with its tasks beside the job that Slurm has restarted elsewhere. So each
attempt claims the run directory with the next number, by a file that only one can make; whoever finds a higher number
than its own has been superseded.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import Superseded
from slurm_train.report.trust import opener

FOLDER = "claims"
"""Where the claims of a run directory lie: 0001, 0002 and so on, each saying whose it is."""


@dataclass(frozen=True)
class Fence:
    """The claim of one attempt."""

    folder: Path
    number: int

    def check(self) -> None:
        """Make sure that no newer attempt has claimed the run directory; takes microseconds.

        Raises:
            Superseded: one has.
        """
        newer = self._of(self.number + 1)
        if os.path.exists(newer):
            raise Superseded(f"{_whose(newer)} has gone on with this run; this attempt ends")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, others can see that the attempt lives: it locks its claim, and the lock ends with the process."""
        with open(self._of(self.number), "rb") as file:
            _lock(file.fileno())
            yield

    def _of(self, number: int) -> str:
        return os.path.join(self.folder, f"{number:04d}")


def claim(run_dir: Path, job: str | None = None) -> Fence:
    """Claim a run directory; all earlier attempts are superseded.

    Args:
        run_dir: the run directory.
        job: the Slurm job of this attempt, for others to read.
    """
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    number = max(_numbers(folder), default=0)
    word = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": job, "time": time.time()})
    while True:
        number += 1
        try:
            with open(folder / f"{number:04d}", "x", encoding="utf-8", opener=opener) as file:
                file.write(word)
            return Fence(folder, number)
        except FileExistsError:  # another one was faster
            continue


def holder(run_dir: Path) -> str:
    """Who trains in a run directory now, such as "process 12 on n1"; "" if nobody is known to.

    A process that has died holds nothing, nor one on a host that is gone, once the file system has noticed.
    """
    folder = run_dir / FOLDER
    newest = folder / f"{max(_numbers(folder), default=0):04d}"
    try:
        with newest.open("rb") as file:
            return "" if _lock(file.fileno()) else _whose(newest)
    except OSError:
        return ""


def _lock(descriptor: int) -> bool:
    """Lock a file; False if another process has. True too where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]


def _whose(path: str | Path) -> str:
    try:
        word = json.loads(Path(path).read_text(encoding="utf-8"))
        return f"process {word['pid']} on {word['host']}" + (f" (job {word['job']})" if word.get("job") else "")
    except (OSError, ValueError, KeyError, TypeError):  # it is being written
        return "another process"
