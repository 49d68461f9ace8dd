"""Files that another process appends to, read as they grow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from slurm_train.report.progress import ProgressView
from slurm_train.report.rundir import RunDirectory, parsed

_LAUNCHER_LINE = re.compile(r"submitit [A-Z]+ \(")


class Tail:
    """The lines that are added to a text file, which may not be there yet.

    Args:
        path: the file.
        from_end: leave out what is in it already.
    """

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._partial = b""
        self._file = _identity(path)

    def lines(self, last: bool = False) -> list[str]:
        """The whole lines added since the last call.

        Args:
            last: no more will come: a line without its end counts too.
        """
        try:
            with self._path.open("rb") as file:
                if _identity(self._path) != self._file:  # cut at a resume, and written anew
                    self._file = _identity(self._path)
                    self._offset, self._partial = min(self._offset, file.seek(0, 2)), b""
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(added)
        *whole, self._partial = (self._partial + added).split(b"\n")
        if last and self._partial:
            whole.append(self._partial)
            self._partial = b""
        return [line.decode("utf-8", errors="replace") for line in whole]


def _identity(path: Path) -> int:
    """What tells a file from another one of its name; 0 while there is none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


class Follower:
    """Shows a run that other processes do: its events, its newest metrics and what rank 0 prints.

    Args:
        run: the run directory; what is in it already is not shown again.
        view: where to show it.
    """

    def __init__(self, run: RunDirectory, view: ProgressView) -> None:
        self._view = view
        self._events = Tail(run.event_file, from_end=True)
        self._metrics = Tail(run.metrics, from_end=True)
        self._output: Tail | None = None

    def follow_output(self, path: Path) -> None:
        """Show the lines of rank 0's output too."""
        self._output = Tail(path, from_end=True)

    def show(self, last: bool = False) -> None:
        """Show what has come since the last call; `last` when the run has ended."""
        for line in self._printed(last):
            self._view.line(line)
        # Events are read first: what led to one is then among the metrics.
        events = [parsed(line) for line in self._events.lines(last)]
        records = events + [parsed(line) for line in self._metrics.lines(last)]
        records.sort(key=lambda record: float(record.get("time", 0.0)))
        for index, record in enumerate(records):
            if "event" in record:
                self._view.event(record)
            elif index + 1 == len(records) or "event" in records[index + 1]:  # only the newest figures are seen
                self._view.metrics(record)

    def _printed(self, last: bool) -> Iterator[str]:
        for line in self._output.lines(last) if self._output else ():
            if not _LAUNCHER_LINE.match(line):
                yield line.rpartition("\r")[2]
