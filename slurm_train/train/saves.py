"""When a checkpoint is due: it is written and told of, and a failure on the way does not end a run that goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from slurm_train.errors import CheckpointError
from slurm_train.topology.limits import lead_seconds
from slurm_train.train.checkpoint import CheckpointStore
from slurm_train.train.log import RunLog

TOLERATED = 2
"""How many saves in a row may fail: the disk may be full for a while, or a server away."""


class Saves:
    """The saves of a run.

    Args:
        store: where they go.
        log: where they are told of.
        lead: how many seconds before its time limit the job is told to save; None where it has no such limit.
    """

    def __init__(self, store: CheckpointStore, log: RunLog, lead: float | None = None) -> None:
        self._store = store
        self._log = log
        self._lead = lead
        self._failed = 0
        self._held = 0.0

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        extra: Mapping[str, Any],
        metrics: Mapping[str, float],
        required: bool,
    ) -> None:
        """Save. Collective.

        Args:
            step, tensors, extra, metrics: as for CheckpointStore.save.
            required: whether the run has no later chance to save.

        Raises:
            CheckpointError: this save, which is required, or too many in a row have failed.
        """
        self._settle(step)
        since = time.perf_counter()

        def published(path: Path) -> None:
            seconds = time.perf_counter() - since
            held = self._held or seconds
            self._log.event("saved", step=step, path=str(path), seconds=seconds, held=held)
            self._warn_of_lead(seconds)

        self._held = 0.0
        try:
            self._store.save(step, tensors, extra, metrics, published)
        except CheckpointError as error:
            self._note(step, error, required)
        else:
            self._held = time.perf_counter() - since
            if not self._store.pending:
                self._failed = 0
        if required:
            self._store.wait()

    def _settle(self, step: int) -> None:
        """Let an earlier save come to its end; one that has failed is followed by this one."""
        pending = self._store.pending
        try:
            self._store.wait()
        except CheckpointError as error:
            self._note(step, error, required=False)
        else:
            self._failed = 0 if pending else self._failed

    def _note(self, step: int, error: CheckpointError, required: bool) -> None:
        self._failed += 1
        if required or self._failed > TOLERATED:
            raise error
        self._log.event("save_failed", step=step, error=str(error))

    def _warn_of_lead(self, seconds: float) -> None:
        needed = lead_seconds(seconds)
        if self._lead is not None and needed > self._lead:
            self._log.message(
                f"saving took {seconds:.0f} s, but the job is told to save only {self._lead:.0f} s before its time "
                f"limit; the next one will be told {needed} s before (launcher.signal_seconds={needed})"
            )
            self._lead = None
