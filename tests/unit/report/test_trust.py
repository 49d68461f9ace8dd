"""Who can write where a run lies, and who can read what it writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_train.errors import RunDirectoryError
from slurm_train.report.fence import claim
from slurm_train.report.rundir import RunDirectory
from slurm_train.report.trust import private, require_trusted, umask_of


def made(path: Path) -> RunDirectory:
    return RunDirectory.create(path, "seed: 0\n", "{}", "#!/bin/sh\n")


@pytest.mark.parametrize("name", ["", "config.yaml", "plan.json", "logs", "checkpoints"])
def test_what_everybody_can_write_is_refused(name: str, tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    assert require_trusted(run.path) == []
    place = run.path / name
    place.chmod(place.stat().st_mode | 0o020)
    assert require_trusted(run.path) == [f"the group can write {place}"]
    place.chmod(place.stat().st_mode | 0o002)
    with pytest.raises(RunDirectoryError) as caught:
        require_trusted(run.path)
    assert str(caught.value) == f"run.dir: everybody can write {place}; chmod o-w {place}, or use another one"


def test_a_directory_above_that_everybody_can_write(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert RunDirectory.problem(open_to_all / "runs" / "a") == f"everybody can write {open_to_all}"
    with pytest.raises(RunDirectoryError, match="everybody can write"):
        made(open_to_all / "runs" / "a")
    assert list(open_to_all.iterdir()) == []
    open_to_all.chmod(0o1777)  # as /tmp is
    assert RunDirectory.problem(open_to_all / "runs" / "a") == ""


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_is_written_is_the_user_s_alone(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        run = made(tmp_path / "run")
        run.append_event("submitted")
        run.append_metrics([{"step": 1}])
        run.replace("seed: 1\n", "{}", "#!/bin/sh\n")
        claim(run.path)
        with private(run.path):
            (run.logs / "log").write_text("x")
            (run.path / "profile").mkdir()
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (run.path, *run.path.rglob("*"))}
    assert len(modes) > 9
    assert {path: mode for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}


def test_a_directory_that_was_opened_to_the_group_stays_open(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    run.path.chmod(0o750)
    assert umask_of(run.path) == 0o027
    run.append_event("started")
    assert run.event_file.stat().st_mode & 0o777 == 0o640
