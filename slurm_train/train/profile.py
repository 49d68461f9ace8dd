"""Traces of a few training steps, one file a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch.profiler

WARMUP = 2


class Steps(Protocol):
    """What is told of each training step."""

    def step(self) -> None:
        """A training step ends."""


class _Untraced:
    def step(self) -> None:
        pass


@contextmanager
def profiled(steps: int, directory: Path, rank: int) -> Iterator[Steps]:
    """Trace `steps` training steps inside, after two that warm up, into <directory>/rank_0000.json.

    A run that ends sooner leaves the trace of what it did. The file is a Chrome trace, of the CPU and of the GPU
    where there is one.

    Args:
        steps: how many to trace; 0 traces nothing, at no cost.
        directory: made if need be.
        rank: this rank, the number in the file's name.
    """
    if not steps:
        yield _Untraced()
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank_{rank:04d}.json"
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=WARMUP, active=steps, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
    ) as profile:
        yield profile
