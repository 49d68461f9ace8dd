"""A disk that is full while a checkpoint is written: the older ones stand, and the run goes on or ends clearly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.train.checkpoint import CheckpointStore
from tests.integration.runs import losses
from tests.integration.test_lost import WORDS, start

HOG = """
import os, pathlib
class Hog:
    '''Leaves 2 MB of the disk, less than a checkpoint takes, from one step to another.'''
    def __init__(self, first, last):
        self.first, self.last = first, last
    def on_step(self, context):
        if context.world.info.rank:
            return
        file = context.directory.path.parent / "hog"
        if context.position.step == self.first:
            context.checkpoints.wait()
            free = os.statvfs(file.parent)
            with file.open("wb") as hog:
                os.posix_fallocate(hog.fileno(), 0, free.f_bavail * free.f_frsize - 2_000_000)
        if context.position.step == self.last:
            file.unlink()
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() or not mount:
        pytest.skip("a small file system of its own takes root")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=40m", "tmpfs", path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def events(run: Path, name: str) -> list[dict[str, object]]:
    records = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] == name]


def words(disk: Path, last: int, *more: str) -> list[str]:
    hog = [
        "+train.callbacks.hog._target_=hog.Hog",
        "+train.callbacks.hog.first=10",
        f"+train.callbacks.hog.last={last}",
    ]
    return [*WORDS, "model.width=512", "train.keep_checkpoints=2", *hog, f"run.dir={disk}/run", *more]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text("class Slow:\n    def on_step(self, context): pass\n")
    (tmp_path / "hog.py").write_text(HOG)
    return tmp_path


@pytest.mark.parametrize("background", ["false", "true"])
def test_the_run_goes_on_once_there_is_room(work: Path, disk: Path, background: str) -> None:
    process = start(work, *words(disk, 22, f"train.async_save={background}"))
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    run = disk / "run"
    failed = events(run, "save_failed")
    assert 0 < len(failed) <= 2 and all("no space left" in str(event["error"]) for event in failed), failed
    assert "warning: checkpoint step_000014 cannot be written: " in told
    assert 14 not in {event["step"] for event in events(run, "saved")}
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000056", "step_000060"]
    assert list(losses(run)) == list(range(1, 61))


def test_it_ends_clearly_if_there_is_none(work: Path, disk: Path) -> None:
    process = start(work, *words(disk, 1000))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "checkpoint step_000022 cannot be written: " in lines[0], errors
    assert "no space left" in lines[0]
    store = CheckpointStore(disk / "run" / "checkpoints")
    assert store.newest() == (disk / "run" / "checkpoints" / "step_000007", [])
    (disk / "hog").unlink()
    again = start(work, "resume", f"{disk}/run", "train.callbacks.hog.first=1000")
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert list(losses(disk / "run")) == list(range(1, 61))
