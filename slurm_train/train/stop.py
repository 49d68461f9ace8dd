"""The stop flag: a signal only sets it; all ranks agree on it later, between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = ("SIGTERM", "SIGUSR2")
"""What asks a run to stop: Slurm's end of a job and the time-limit warning. USR1 is left to NCCL."""


class StopFlag:
    """Whether this rank was asked to stop, and by which signal.

    Nothing else happens in the handler: a collective save started there would deadlock, since the other ranks may be
    inside another collective operation.
    """

    def __init__(self) -> None:
        self.reason = ""

    @property
    def requested(self) -> bool:
        """True once a signal has come."""
        return bool(self.reason)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """A flag that SIGTERM and SIGUSR2 set; the handlers that were there before are restored at the end."""
    flag = StopFlag()
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    before = {number: signal.signal(number, flag._handle) for number in numbers}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
