"""What a run shows while it runs: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from slurm_train.report.summary import duration

LINE_SECONDS = 10.0
"""Without a terminal: the least time between two lines within an epoch."""

Record = Mapping[str, Any]


class ProgressView:
    """Shows events and metrics as they come.

    Args:
        stream: where to; standard output by default. The bar is drawn if it is a terminal.
        clock: seconds, for the pace of lines.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stdout
        self._clock = clock
        self._bar = _Bar(self._stream) if _is_terminal(self._stream) else None
        self._pace = _Pace({})
        self._last_line = clock()

    def event(self, record: Record) -> None:
        """Show an event; those that only matter to programs show nothing."""
        name = record.get("event")
        if name == "started":
            self._pace = _Pace(record)
            if self._pace.total > self._pace.step and self._bar:
                self._bar.start(self._pace)
        if name in ("done", "evaluated", "stopped", "failed"):
            self.close()
        if text := _text(record, self._pace):
            self.line(text)

    def metrics(self, record: Record) -> None:
        """Show the newest metrics."""
        if "loss" not in record:
            return
        self._pace.add(record)
        if self._bar:
            self._bar.update(self._pace)
        elif self._clock() - self._last_line >= LINE_SECONDS:
            self.line(self._pace.text())

    def line(self, text: str) -> None:
        """Print a line of text, above the bar if there is one."""
        self._last_line = self._clock()
        if self._bar:
            self._bar.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Take the bar away. May be called twice."""
        if self._bar:
            self._bar.stop()


class _Pace:
    """Where a run is and how fast it goes, from its `started` event and its metrics."""

    def __init__(self, started: Record) -> None:
        self.epochs: int = started.get("epochs") or 0
        self.total: int = started.get("total_steps") or 0
        self.step: int = started.get("step") or 0
        self.epoch = 0
        self.loss = float("nan")
        self.batch: int = started.get("batch_size") or 0
        self.samples_per_s = 0.0
        self._per_epoch: int = started.get("steps_per_epoch") or 0
        self._first: tuple[int, float] | None = None
        self._mark: tuple[int, float] | None = None
        self._now = 0.0

    def add(self, record: Record) -> None:
        """Take in a step's record."""
        step, now = record["step"], record.get("time", time.time())
        if self._first is None or step < self.step:
            self._first = self._mark = (step, now)
        elif self._mark and now - self._mark[1] >= 0.2:
            rate = (step - self._mark[0]) * self.batch / (now - self._mark[1])
            same_epoch = record["epoch"] == self.epoch
            # a validation between the epochs is no part of the speed
            if same_epoch:
                self.samples_per_s = 0.7 * self.samples_per_s + 0.3 * rate if self.samples_per_s else rate
            self._mark = (step, now)
        self.step, self.epoch, self.loss, self._now = step, record["epoch"], record["loss"], now

    @property
    def left(self) -> float | None:
        """Seconds to the last step at the speed so far, evaluations included; None if it cannot be told."""
        if not self.total or self._first is None or self.step <= self._first[0]:
            return None
        return (self.total - self.step) * (self._now - self._first[1]) / (self.step - self._first[0])

    def text(self) -> str:
        """One line for a log."""
        parts = [f"epoch {self.epoch + 1}/{self.epochs}" if self.epochs else f"epoch {self.epoch + 1}"]
        parts.append(f"step {self.step:,}/{self.total:,}" if self.total else f"step {self.step:,}")
        parts.append(f"loss {self.loss:.4f}")
        if self.samples_per_s:
            parts.append(f"{self.samples_per_s:,.0f} samples/s")
        if self.left is not None:
            parts.append(f"{duration(self.left)} left")
        return "   ".join(parts)


class _Bar:
    """The live line, drawn by rich; drawn again only when something came, so that it costs the run nothing."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._progress: Any = None
        self._task: Any = None

    def start(self, pace: _Pace) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self.stop()
        self._progress = Progress(
            TextColumn("{task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:3.0f}%"),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            auto_refresh=False,
            expand=True,
            transient=True,
        )
        self._task = self._progress.add_task("", total=pace.total, completed=pace.step, epoch="", figures="starting")
        self._progress.start()
        _drawn.append(self)
        self._progress.refresh()

    def update(self, pace: _Pace) -> None:
        if self._progress is None:
            return
        left = f"  {duration(pace.left)} left" if pace.left is not None else ""
        speed = f"  {pace.samples_per_s:,.0f}/s" if pace.samples_per_s else ""
        epoch = f"epoch {pace.epoch + 1}/{pace.epochs}" if pace.epochs else f"epoch {pace.epoch + 1}"
        figures = f"loss {pace.loss:.4f}{speed}{left}"
        self._progress.update(self._task, completed=pace.step, epoch=epoch, figures=figures, refresh=True)

    def print(self, text: str) -> None:
        self._console.print(text, markup=False, emoji=False)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            _drawn.remove(self)


_drawn: list[_Bar] = []


def _text(record: Record, pace: _Pace) -> str:
    """An event as a line; "" for one that is not shown."""
    name = record.get("event")
    if name == "message":
        return str(record.get("text", ""))
    if name == "started":
        return _started(record)
    if name == "resumed":
        return f"going on from step {record.get('step', 0):,} ({record.get('checkpoint', '')})"
    if name == "epoch":
        return _epoch(record, pace)
    if name == "save_failed":
        return f"warning: {record.get('error', '')}; the older ones stand, and the run goes on"
    return ""


def _started(record: Record) -> str:
    ranks, threads = record.get("world_size", 1), record.get("threads", 1)
    each = " each" if ranks > 1 else ""
    first = f"{_counted(ranks, 'rank')} on {record.get('device', '?')} with {_counted(threads, 'thread')}{each}"
    parts = []
    if "parameters" in record:
        parts.append(f"{record['parameters']:,} parameters")
    if record.get("train_samples"):
        parts.append(f"{record['train_samples']:,} samples")
    if record.get("steps_per_epoch"):
        parts.append(f"{record['epochs']} x {record['steps_per_epoch']:,} steps of {record['batch_size']}")
        if record["total_steps"] < record["epochs"] * record["steps_per_epoch"]:
            parts.append(f"ends after {record['total_steps']:,} steps")
    return "\n".join(line for line in (first, "   ".join(parts)) if line)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _epoch(record: Record, pace: _Pace) -> str:
    number = record["epoch"] + 1
    parts = [f"epoch {number}/{pace.epochs}" if pace.epochs else f"epoch {number}"]
    figures = {"loss": pace.loss if pace.epoch == record["epoch"] else None}
    figures |= {name: record.get(name) for name in ("val_loss", "val_accuracy")}
    parts += [f"{name} {value:.4f}" for name, value in figures.items() if isinstance(value, float) and value == value]
    if "samples_per_s" in record:
        parts.append(f"{record['samples_per_s']:,.0f} samples/s")
    return "  ".join(parts)


def close_all() -> None:
    """Take away every bar that is still drawn, before something else is printed."""
    while _drawn:
        _drawn[-1].stop()


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
