"""Runs that are there, sweeps, and files that grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.errors import ConfigError, RunDirectoryError
from slurm_train.launch.follow import Tail
from slurm_train.launch.runs import find_run, is_finished, resume_command
from slurm_train.launch.sweep import points
from slurm_train.report.rundir import RunDirectory


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(path: str) -> RunDirectory:
    return RunDirectory.create(path, "seed: 0\n", "{}")


def test_a_run_is_found_by_path_and_by_id() -> None:
    run = make("runs/fmnist/one")
    assert find_run("runs/fmnist/one").path == find_run("one").path == run.path


def test_an_id_of_two_runs_is_refused_with_both_named() -> None:
    make("runs/a/same"), make("runs/b/same")
    with pytest.raises(RunDirectoryError, match="runs/a/same runs/b/same"):
        find_run("same")


def test_what_is_no_run_is_told_with_the_newest_one() -> None:
    with pytest.raises(RunDirectoryError, match="there are no runs"):
        find_run("x")
    make("runs/a/one")
    with pytest.raises(RunDirectoryError, match="the newest run is runs/a/one"):
        find_run("x")
    Path("empty").mkdir()
    with pytest.raises(RunDirectoryError, match="empty is not a run directory"):
        find_run("empty")


@pytest.mark.parametrize(
    ("names", "finished"),
    [
        ((), False),
        (("submitted", "started"), False),
        (("submitted", "started", "done"), True),
        (("submitted", "done", "submitted"), False),
        (("started", "done"), True),
        (("submitted", "done", "evaluate", "started", "evaluated"), True),
    ],
)
def test_a_run_is_finished_when_its_newest_training_is_done(names: tuple[str, ...], finished: bool) -> None:
    run = make("run")
    for name in names:
        if name == "evaluate":
            run.append_event("submitted", verb="evaluate")
        else:
            run.append_event(name)
    assert is_finished(run) is finished


def test_the_command_that_goes_on_can_be_pasted() -> None:
    assert resume_command("train", Path("/a b/$c")) == "python -m slurm_train resume '/a b/$c'"
    assert resume_command("evaluate", Path("/a")) == "python -m slurm_train evaluate /a"


def test_a_sweep_is_the_product_in_hydras_order() -> None:
    assert points(["+experiment=x", "optim.lr=1e-3,1e-2", "train.epochs=range(1,3)"]) == [
        ("+experiment=x", "optim.lr=0.001", "train.epochs=1"),
        ("+experiment=x", "optim.lr=0.001", "train.epochs=2"),
        ("+experiment=x", "optim.lr=0.01", "train.epochs=1"),
        ("+experiment=x", "optim.lr=0.01", "train.epochs=2"),
    ]


@pytest.mark.parametrize("text", ["run.name='a,b'", "train.callbacks={}", "model=mlp", "a=b=c", "~x", "nonsense"])
def test_what_is_no_sweep_is_left_as_typed(text: str) -> None:
    assert points([text]) == [(text,)]


def test_an_interval_has_no_points() -> None:
    with pytest.raises(ConfigError, match="optim.lr=interval"):
        points(["optim.lr=interval(0, 1)"])


def test_a_growing_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.lines() == []
    with path.open("wb", buffering=0) as file:
        file.write("é a\nb".encode())
        assert tail.lines() == ["é a"]
        file.write(b"c\n\xff\nrest")
        assert tail.lines() == ["bc", "\ufffd"]
    assert tail.lines() == []
    assert tail.lines(last=True) == ["rest"]
    assert Tail(path, from_end=True).lines(last=True) == []


def test_a_file_that_was_cut_is_followed_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("1\n2\n3\n4")
    tail = Tail(path)
    assert tail.lines() == ["1", "2", "3"]
    beside = tmp_path / "beside"
    beside.write_text("1\n2\n")
    beside.replace(path)
    assert tail.lines() == []
    with path.open("a") as file:
        file.write("3\n")
    assert tail.lines() == ["3"]
