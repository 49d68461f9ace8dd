"""What a run writes down while it runs: events, metrics and words for the user, by rank 0 alone."""

from __future__ import annotations

from typing import Any, Protocol

from slurm_train.report.rundir import RunDirectory


class View(Protocol):
    """Something that shows events and metrics as they come, such as the progress bar."""

    def event(self, record: dict[str, Any]) -> None:
        """Show an event."""

    def metrics(self, record: dict[str, Any]) -> None:
        """Show the newest metrics."""


class RunLog:
    """Writes into the run directory, and shows what it writes.

    Args:
        directory: where to write; None on every rank but 0, where all methods do nothing.
        view: who else is told; used when no other process follows the run directory.
    """

    def __init__(self, directory: RunDirectory | None, view: View | None = None) -> None:
        self._directory = directory
        self._view = view

    def event(self, name: str, **fields: Any) -> None:
        """One event, e.g. event("saved", step=100)."""
        if self._directory is None:
            return
        record = self._directory.append_event(name, **fields)
        if self._view is not None:
            self._view.event(record)

    def message(self, text: str) -> None:
        """A line for the user."""
        self.event("message", text=text)

    def metrics(self, records: list[dict[str, Any]]) -> None:
        """Lines of metrics.jsonl, in order."""
        if self._directory is None or not records:
            return
        self._directory.append_metrics(records)
        if self._view is not None:
            self._view.metrics(records[-1])
