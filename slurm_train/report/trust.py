"""Who else can write where a run lies: what lies there decides which code its jobs run, and with which weights."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurm_train.errors import RunDirectoryError

INSIDE = ("", "config.yaml", "plan.json", "logs", "checkpoints")
"""What is looked at in a run directory: the pickles of jobs lie in logs."""


def require_trusted(run_dir: Path) -> list[str]:
    """Refuse a run directory that everybody can write, or replace.

    Args:
        run_dir: it, or where it is to be made.

    Returns:
        a line for each thing that is worth a warning: that a group can write.

    Raises:
        RunDirectoryError: everybody can write there.
    """
    modes = {place: mode for place in (run_dir / name for name in INSIDE) if (mode := _mode(place)) is not None}
    above = {place: mode for place in run_dir.parents if (mode := _mode(place)) is not None}
    # In a sticky directory, such as /tmp, one can replace only what is one's own.
    for place, mode in {**modes, **{place: mode for place, mode in above.items() if not mode & stat.S_ISVTX}}.items():
        if mode & stat.S_IWOTH:
            raise RunDirectoryError(f"everybody can write {place}", "run.dir", f"chmod o-w {place}, or use another one")
    return [f"the group can write {place}" for place, mode in modes.items() if mode & stat.S_IWGRP]


def umask_of(run_dir: Path) -> int:
    """The umask for what is written into a run directory: as open as the directory, 0o077 where it is not there yet."""
    mode = _mode(run_dir)
    return 0o077 if mode is None else 0o777 & ~stat.S_IMODE(mode)


@contextmanager
def private(run_dir: Path) -> Iterator[None]:
    """Inside, this process and those that it starts, jobs among them, write as `umask_of` says."""
    before = os.umask(umask_of(run_dir))
    try:
        yield
    finally:
        os.umask(before)


def opener(path: str, flags: int) -> int:
    """For `open`: makes files that are as open as their directory."""
    return os.open(path, flags, 0o666 & ~umask_of(Path(path).parent))


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except OSError:
        return None
