"""What a node is by itself, without torch: its memory, and the run directory as it sees it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_train.errors import SlurmTrainError

MIB = 1 << 20
GIB = 1 << 30

RANK_BYTES = 256 * MIB
"""Host memory that a rank takes for Python and torch alone, before any model."""

SHM_BYTES = 64 * MIB
"""What /dev/shm must have free: the loader's workers and NCCL pass their data through it. 64 MiB is what a container
has by default."""

WRITTEN_BYTES = 8 * MIB
SLOWEST_BYTES = 1 * MIB
"""Bytes a second below which a run directory is taken to be broken rather than slow."""


@dataclass(frozen=True)
class Figure:
    """What was measured."""

    text: str
    value: float | None = None
    """The number in the text, for those that can be compared."""


class NodeFault(SlurmTrainError):
    """A check that was not passed.

    Args:
        message: what is wrong, with figure and limit.
        figure: what was measured.
        blames: the nodes of which one is at fault; empty for this one.
    """

    def __init__(self, message: str, figure: Figure | None = None, blames: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.figure = figure or Figure("bad")
        self.blames = blames


@dataclass(frozen=True)
class Needs:
    """Bytes that a run needs of a node, as far as its plan tells."""

    host: int
    """Of the host's memory, free."""

    device: int
    """Of the memory of each device, free; 0 where it is not known."""

    disk: int
    """Of the run directory's disk, free: two checkpoints, for a new one is written beside the old one."""


def needs(plan: Mapping[str, Any], gpus: int) -> Needs:
    """What a run needs of each node.

    Args:
        plan: plan.json; empty if it cannot be read.
        gpus: devices of a node; 0 for a run on CPUs.
    """
    costs, ranks = plan.get("costs") or {}, int(plan.get("tasks_per_node") or 1)
    memory = {kind: size or 0 for kind, size in (costs.get("memory") or {}).items()}
    on_host = not gpus or costs.get("offload")
    rank = sum(memory.values())
    saved = memory.get("weights", 0) + memory.get("optimizer", 0) + memory.get("ema", 0)
    per_weight = saved / memory["weights"] if memory.get("weights") else 1.0
    return Needs(
        host=ranks * (RANK_BYTES + (rank if on_host else 0)),
        device=0 if on_host else rank * -(-ranks // gpus),
        disk=round(2 * 4 * int(plan.get("parameters") or 0) * per_weight) + WRITTEN_BYTES,
    )


def directory(run_dir: Path) -> Figure:
    """That this node sees the run directory of whoever has submitted the job."""
    try:
        (run_dir / "plan.json").read_bytes()
    except OSError as error:
        raise NodeFault(f"{run_dir}/plan.json cannot be read: {error.strerror}; all nodes must share it") from None
    return Figure("ok")


def memory(needed: int) -> Figure:
    """The memory that is free, or can be made so (MemAvailable of /proc/meminfo, proc(5))."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return _at_least(free, needed, "of memory are free")


def shared_memory() -> Figure:
    """What is free of /dev/shm."""
    return _at_least(shutil.disk_usage("/dev/shm").free, SHM_BYTES, "are free in /dev/shm")


def disk(run_dir: Path, needed: int) -> Figure:
    """What is free on the disk of the run directory. A quota below that is not seen."""
    return _at_least(shutil.disk_usage(run_dir).free, needed, f"are free for {run_dir}, which two checkpoints need")


def write_speed(path: Path) -> Figure:
    """How fast a file is written as far as the disk; what is then read must be the same.

    Args:
        path: of a file to make and take away again.
    """
    written = os.urandom(WRITTEN_BYTES)
    try:
        began = time.monotonic()
        with path.open("wb") as file:
            file.write(written)
            file.flush()
            os.fsync(file.fileno())
            speed = WRITTEN_BYTES / (time.monotonic() - began)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that it is read from the disk
        same = path.read_bytes() == written
        path.unlink()
    except OSError as error:
        raise NodeFault(f"{path.parent} cannot be written: {error.strerror}") from None
    figure = Figure(f"{speed / MIB:.0f} MiB/s", round(speed / MIB, 2))
    if not same:
        raise NodeFault(f"a file in {path.parent} was not read as it was written", figure)
    if speed < SLOWEST_BYTES:
        raise NodeFault(f"{speed / MIB:.2f} MiB/s to {path.parent}, at least {SLOWEST_BYTES // MIB} MiB/s", figure)
    return figure


def _at_least(found: int, needed: int, what: str) -> Figure:
    figure = Figure(size(found), round(found / GIB, 3))
    if found < needed:
        raise NodeFault(f"{size(found)} {what}, at least {size(needed)}", figure)
    return figure


def size(count: int) -> str:
    """Bytes as text: 1.5 GiB, 64 MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
