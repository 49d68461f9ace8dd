"""The files that the ranks of a job print into, read as they grow, with each line's rank in front."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurm_train.launch.state import local_job
from slurm_train.report.position import Attempt, Position

BLOCK = 1 << 20
"""Bytes read at once."""

_LAUNCHER_LINE = re.compile(rb"submitit [A-Z]+ \(")


@dataclass
class Log:
    """One growing file. It is open only while it is read, for there may be thousands."""

    path: Path
    label: str
    """What stands in front of its lines, such as `0: `."""

    offset: int = 0
    _partial: bytes = field(default=b"", repr=False)

    def lines(self, last: bool = False) -> Iterator[str]:
        """The lines added since the last call.

        Args:
            last: no more will come: a line without its end counts too.
        """
        try:
            size = self.path.stat().st_size
        except OSError:
            size = 0
        if size < self.offset:  # it was written anew
            self.offset, self._partial = 0, b""
        while self.offset < size and (block := self._block()):
            *whole, self._partial = (self._partial + block).split(b"\n")
            yield from self._shown(whole)
            # Of a progress bar only what it says last is kept. A \r at the end may belong to a \r\n.
            self._partial = self._partial[self._partial[:-1].rfind(b"\r") + 1 :]
        if last and self._partial:
            partial, self._partial = self._partial, b""
            yield from self._shown([partial])

    def _block(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            block = file.read(BLOCK)
        self.offset += len(block)
        return block

    def skip_to_last(self, count: int) -> None:
        """Begin with the last lines of what is in the file by now."""
        try:
            with self.path.open("rb") as file:
                end = start = file.seek(0, 2)
                tail = b""
                # one more line end than lines: the one before the first of them
                while start > 0 and tail.rstrip(b"\n").count(b"\n") < count:
                    start = max(start - BLOCK, 0)
                    file.seek(start)
                    tail = file.read(end - start)
        except OSError:
            return
        kept = tail.splitlines(keepends=True)[-count:] if count else []
        self.offset = end - sum(map(len, kept))

    def _shown(self, lines: Iterable[bytes]) -> Iterator[str]:
        """Lines as they are shown, without those of submitit's own logger."""
        for line in lines:
            text = line.rstrip(b"\r").rpartition(b"\r")[2]
            if not _LAUNCHER_LINE.match(text):
                yield self.label + text.decode("utf-8", errors="replace")


class Logs:
    """The files of one job of a run.

    Args:
        place: the run.
        attempt: the start of the run whose files they are.
        rank: of this rank only, without a label; None for all, and the batch shell's words.
    """

    def __init__(self, place: Position, attempt: Attempt, rank: int | None = None) -> None:
        self._place = place
        self._attempt = attempt
        self._rank = rank
        self._logs: dict[Path, Log] = {}

    def files(self) -> list[Log]:
        """Those that are there by now: the batch shell's, then rank by rank."""
        for path, label in self._paths():
            if path not in self._logs:
                self._logs[path] = Log(path, label)
        return list(self._logs.values())

    def _paths(self) -> list[tuple[Path, str]]:
        attempt, folder = self._attempt, self._place.run.logs
        if attempt.launcher == "inline":
            path = Path(str(self._place.plan.get("cwd", ".")), f"slurm-{attempt.job}.out")
            return [(path, "")] if attempt.job and path.exists() else []
        job = local_job(self._place) if attempt.launcher == "local" else attempt.job
        try:
            names = os.listdir(folder)
        except OSError:
            return []
        found = []
        for name in names:
            match = re.fullmatch(rf"{re.escape(job)}_(\d+)_log\.(out|err)", name)
            if match and self._rank in (None, int(match[1])):
                found.append((int(match[1]), match[2] == "err", name))
        paths = [(folder / name, "" if self._rank is not None else f"{rank}: ") for rank, _, name in sorted(found)]
        batch = folder / f"{job}_batch.log"
        return [(batch, "batch: "), *paths] if self._rank is None and batch.exists() else paths


def missing(place: Position, attempt: Attempt, rank: int | None) -> str:
    """Why there is nothing to show."""
    if attempt.launcher != "inline":
        whose = f"rank {rank}" if rank is not None else "its ranks"
        return f"{place.run.path} has no log of {whose}{f' in job {attempt.job}' if attempt.job else ''}"
    where = f", or in the file that sbatch was told; there is no slurm-{attempt.job}.out" if attempt.job else ""
    return f"{place.run.path} was started by hand: what its ranks print is where it was started{where}"
