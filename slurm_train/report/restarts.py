"""How often a run has started again by itself, and why: what its events tell of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Restarts:
    """What happened since the user has last started the run."""

    count: int = 0
    """Times that it started again by itself."""

    why: str = ""
    """Why it did so the last time, such as "preempted"."""

    failed_from: int | None = None
    """The step of the checkpoint from which it went on after its newest failure, 0 for none; None before any."""

    save_seconds: float = 0.0
    """The longest that writing a checkpoint took."""


def restarts(events: Iterable[Mapping[str, Any]]) -> Restarts:
    """Read them from a run's events, oldest first."""
    count, why, failed_from, seconds = 0, "", None, 0.0
    for event in events:
        name = event["event"]
        if name == "submitted" and event.get("verb", "train") == "train" and not event.get("after"):
            count, why, failed_from = 0, "", None
        elif name == "requeued":
            count, why = count + (-1 if event.get("refused") else 1), str(event.get("why", ""))
            if event.get("why") == "failed":
                failed_from = int(event.get("checkpoint") or 0)
        elif name == "saved":
            seconds = max(seconds, float(event.get("seconds") or 0.0))
    return Restarts(count, why, failed_from, seconds)
