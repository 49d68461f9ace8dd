"""Files of a run that are torn, changed, missing or cannot be written."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.local import DDP, RUN, end, events, goes_on, same, start
from tests.faults.table import BITWISE, CLEAR, note


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step_*"))


def torn(run: Path) -> None:
    shard = max(newest(run).glob("__*"), key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size // 2)


def flipped(run: Path) -> None:
    shard = max(newest(run).glob("__*"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)


def missing(run: Path) -> None:
    next(newest(run).glob("__1_*")).unlink()


def without_manifest(run: Path) -> None:
    (newest(run) / "manifest.json").unlink()


def empty(run: Path) -> None:
    (run / "checkpoints" / "step_000023").mkdir()


def temporary(run: Path) -> None:
    shutil.copytree(newest(run), run / "checkpoints" / ".claim-0001" / "step_000018")


def torn_lines(run: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 14, "epo')


DAMAGES: dict[str, Callable[[Path], None]] = {
    "newest checkpoint torn": torn,
    "a bit flipped in the newest checkpoint": flipped,
    "a shard of the newest checkpoint missing": missing,
    "a checkpoint without its manifest": without_manifest,
    "an empty checkpoint directory": empty,
    "a leftover of a save": temporary,
    "metrics and events torn in the middle of a line": torn_lines,
}
BREAKING = {torn, flipped, missing, without_manifest, empty}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped at step 14, with checkpoints of steps 6, 12 and 14."""
    work = tmp_path_factory.mktemp("stopped")
    code, errors = end(start(work, *RUN, *DDP, "run.dir=run", fault="step:14:-2:TERM"))
    assert code == 75, errors
    return work


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if damage in (flipped, torn_lines) else pytest.mark.slow)
        for name, damage in DAMAGES.items()
    ],
)
def test_damaged_files(name: str, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped / "run", tmp_path / "run")
    damage = DAMAGES[name]
    damage(tmp_path / "run")
    goes_on(name, tmp_path, reached=14)
    told = [str(event["text"]) for event in events(tmp_path / "run", "message") if "is left out" in str(event["text"])]
    assert len(told) == (damage in BREAKING), told


@pytest.mark.slow
def test_all_checkpoints_damaged(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped / "run", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("step_*"):
        (path / "manifest.json").write_text("{")
    goes_on("all checkpoints damaged: from the beginning", tmp_path, reached=14, lost=20)


@pytest.mark.slow
def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("to make a file system read-only takes root")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a file system: {done.stderr.strip()}")
    try:
        code, errors = end(start(disk, *RUN, *DDP, "run.dir=run", fault="step:14:-2:TERM"))
        assert code == 75, errors
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        code, errors = end(start(tmp_path, "resume", str(disk / "run")))
        assert (code, len(errors.splitlines())) == (2, 1), errors
        assert "cannot be written: Read-only file system" in errors
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        goes_on("the run directory is read-only, and later not", disk)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"), [("slow disk", "step:3:0:slow disk"), ("the clock set back by an hour", "step:9:0:clock")]
)
def test_what_a_run_does_not_mind(name: str, fault: str, tmp_path: Path) -> None:
    code, errors = end(start(tmp_path, *RUN, *DDP, "run.dir=run", fault=fault))
    assert code == 0, errors
    same(tmp_path / "run")
    note(name, BITWISE, 0)


def test_data_that_is_gone_ends_clearly(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped / "run", tmp_path / "run")
    code, errors = end(start(tmp_path, "resume", "run", "data.root=/no/such/place"))
    assert (code, len(errors.splitlines())) == (2, 1)
    assert "/no/such/place" in errors
    note("the data is gone", CLEAR)
