"""The run directory: made whole or not at all, refused when used, read back as written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import RunDirectoryError
from slurm_train.report.rundir import RunDirectory


def make(path: Path) -> RunDirectory:
    return RunDirectory.create(path, "seed: 0\n", "{}", "#!/bin/sh\n")


def test_a_new_directory_holds_what_the_run_is_made_from(tmp_path: Path) -> None:
    run = make(tmp_path / "deep" / "er" / "odd $x é;'\"\n")
    assert run.config.read_text() == "seed: 0\n"
    assert run.plan.read_text() == "{}"
    assert (run.path / "submission.sh").read_text() == "#!/bin/sh\n"
    assert run.logs.is_dir() and run.checkpoints.is_dir()
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert RunDirectory.open(run.path).path == run.path


def test_an_empty_directory_is_taken_and_a_used_one_refused(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(RunDirectoryError, match="is used already"):
        make(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "seed: 0\n"


def test_a_directory_with_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="is used already"):
        make(tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_nothing_is_left_of_a_directory_that_could_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        make(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("below", ["file", "file/run"])
def test_a_file_in_the_way_is_told(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="not a directory"):
        make(tmp_path / below)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_parent_is_told_before_anything_is_made(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "not writable" in RunDirectory.problem(tmp_path / "run")
    tmp_path.chmod(0o700)


def test_a_name_that_no_file_system_takes_is_told(tmp_path: Path) -> None:
    assert "name too long" in RunDirectory.problem(tmp_path / ("x" * 300)).lower()


def test_no_run_directory_is_opened_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        RunDirectory.open(tmp_path)


def test_events_are_read_back_without_a_cut_off_line(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert run.events() == []
    written = [run.append_event("started", step=0), run.append_event("message", text="é\nb")]
    with run.event_file.open("a") as file:
        file.write('{"event": "do')
    assert run.events() == written


def test_a_changed_config_keeps_the_previous_ones(tmp_path: Path) -> None:
    run = make(tmp_path)
    for number in (1, 2):
        run.replace(f"seed: {number}\n", "{}")
    run.replace("seed: 2\n", "[]")
    assert run.config.read_text() == "seed: 2\n"
    assert run.plan.read_text() == "[]"
    kept = sorted(path.name for path in tmp_path.glob("config.*.yaml"))
    assert [(tmp_path / name).read_text() for name in kept] == ["seed: 0\n", "seed: 1\n"]


def test_a_run_that_was_never_started_leaves_nothing_behind(tmp_path: Path) -> None:
    there = tmp_path / "mine"
    there.mkdir()
    run = RunDirectory.create(there / "runs" / "a", "seed: 0\n", "{}", "#!/bin/bash\n")
    (run.logs / "x.pkl").write_text("")
    run.discard()
    assert list(tmp_path.rglob("*")) == [there]
    other = RunDirectory.create(there / "runs" / "b", "seed: 0\n", "{}")
    again = RunDirectory.create(there / "runs" / "a", "seed: 0\n", "{}")
    other.discard()
    assert again.config.exists()


def test_what_is_newer_than_a_checkpoint_is_forgotten(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    records = [{"step": step, "epoch": 0, "loss": 1.0 / step} for step in range(1, 5)]
    validated, tested = {"step": 4, "val_loss": 1.0}, {"step": 4, "test_loss": 1.0}
    run.append_metrics([*records, validated, tested, {"step": 5, "epoch": 1, "loss": 0.1}])
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "epo')  # torn
    run.event_file.write_text('{"event": "saved"}\n{"event": "do')

    def left() -> list[dict[str, Any]]:
        return [json.loads(line) for line in run.metrics.read_text().splitlines()]

    run.forget_after(4, evaluated=True)
    assert left() == [*records, validated]
    file = run.metrics.stat().st_ino
    run.forget_after(4, evaluated=True)  # nothing to cut: the file stays
    assert (left(), run.metrics.stat().st_ino) == ([*records, validated], file)
    run.forget_after(4, evaluated=False)
    assert left() == records
    run.forget_after(0, evaluated=True)
    assert left() == []
    run.append_event("started")
    assert [event["event"] for event in run.events()] == ["saved", "started"]
