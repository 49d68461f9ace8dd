"""The last lines of a run: how good, how long, how fast, and where everything lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_train.report.rundir import RunDirectory


def summary(run: RunDirectory) -> str:
    """The figures of the newest attempt, then the run directory alone on the last line.

    A figure that is not known is left out; a run of which nothing is known gives the run directory alone.
    """
    started, ended = _newest_attempt(run)
    lines = [_scores(ended), _costs(started, ended), "run directory:", str(run.path)]
    return "\n".join(line for line in lines if line)


def duration(seconds: float) -> str:
    """A time for humans: 0.4 s, 12.3 s, 4:05, 2:03:09.

    >>> duration(245)
    '4:05'
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def bytes_text(size: int) -> str:
    """A number of bytes in the largest unit that leaves at least 1, such as "1.5 GiB"."""
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.3g} {units[0]}" if value < 1000 else f"{value:.0f} {units[0]}"


def _newest_attempt(run: RunDirectory) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The last `started` event and the `done` or `evaluated` event after it; empty where there is none."""
    started: Mapping[str, Any] = {}
    ended: Mapping[str, Any] = {}
    for record in run.events():
        if record["event"] == "started":
            started, ended = record, {}
        elif record["event"] in ("done", "evaluated"):
            ended = record
    return started, ended


def _scores(ended: Mapping[str, Any]) -> str:
    names = (("test_accuracy", "test accuracy"), ("test_loss", "test loss"))
    scores = [f"{label} {ended[name]:.4f}" for name, label in names if isinstance(ended.get(name), float)]
    if ended.get("result") is not None:
        scores.append(f"result {ended['result']}")
    return "   ".join(scores)


def _costs(started: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    costs = []
    if "seconds" in ended:
        costs.append(f"time {duration(ended['seconds'])}")
    if "samples_per_s" in ended:
        costs.append(f"{ended['samples_per_s']:,.0f} samples/s")
    if "steps" in ended:
        costs.append(f"{ended['steps']:,} steps")
    if ended.get("peak_memory"):
        costs.append(f"{bytes_text(max(ended['peak_memory']))} of memory at the peak")
    world = started.get("world_size", 0)
    if costs and world > 1:
        costs.append(f"{world} ranks")
    return "   ".join(costs)
