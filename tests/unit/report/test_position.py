"""Where a run is, from the files in its directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_train.report import position as module
from slurm_train.report.position import position
from slurm_train.report.rundir import RunDirectory
from slurm_train.report.table import aligned

PLAN = {"launcher": "inline", "epochs": 3, "steps_per_epoch": 100, "total_steps": 300}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "seed: 0\n", json.dumps(PLAN))


def start(run: RunDirectory, time: float, step: int = 0, **fields: object) -> None:
    facts = {"steps_per_epoch": 100, "epochs": 3, "total_steps": 300, "step": step, "host": "h", "pid": 1}
    event(run, "started", time, **(facts | fields))


def event(run: RunDirectory, name: str, time: float, **fields: object) -> None:
    with run.event_file.open("a") as file:
        file.write(json.dumps({"event": name, "time": time, **fields}) + "\n")


def steps(run: RunDirectory, first: int, last: int, time: float, pace: float = 0.5) -> None:
    run.append_metrics(
        {"step": step, "epoch": (step - 1) // 100, "loss": 1 / step, "time": time + (step - first) * pace}
        for step in range(first, last + 1)
    )


def test_a_new_run_knows_only_its_plan(run: RunDirectory) -> None:
    found = position(run)
    assert (found.attempts, found.step, found.steps, found.epoch, found.epochs) == ((), None, 300, None, 3)
    assert (found.loss, found.seconds_left, found.checkpoint, found.jobs) == (None, None, None, [])


def test_a_run_is_where_its_newest_record_is(run: RunDirectory) -> None:
    event(run, "submitted", 5, launcher="slurm", job="12", verb="train")
    start(run, 10, job="12")
    steps(run, 1, 150, 11)
    event(run, "epoch", 60, epoch=0, val_loss=0.5, val_accuracy=0.75)
    with run.metrics.open("a") as file:
        file.write('{"step": 150, "epoch": 1, "val_loss": 0.5, "time": 90}\n{"step": 151, "epo')
    found = position(run)
    assert (found.step, found.steps, found.epoch, found.epochs, found.loss) == (150, 300, 2, 3, 1 / 150)
    assert found.seconds_left == pytest.approx(150 * 0.5)
    assert found.scores == {"val_loss": 0.5, "val_accuracy": 0.75}
    (attempt,) = found.attempts
    assert (attempt.launcher, attempt.verb, attempt.job, attempt.ended, len(attempt.starts)) == (
        *("slurm", "train", "12", ""),
        1,
    )


def test_a_restart_is_where_its_checkpoint_was_and_then_as_fast_as_it_is_now(run: RunDirectory) -> None:
    start(run, 10, job="12")
    steps(run, 1, 150, 11)
    event(run, "stopped", 99, step=120)
    start(run, 1000, step=120, job="12")
    found = position(run)
    assert (found.step, found.epoch, found.loss, found.seconds_left) == (120, 2, None, None)
    assert [(len(attempt.starts), attempt.ended) for attempt in found.attempts] == [(2, "")]
    steps(run, 121, 141, 1001, pace=2.0)
    found = position(run)
    assert (found.step, found.loss) == (141, 1 / 141)
    assert found.seconds_left == pytest.approx((300 - 141) * 2.0)


def test_only_the_end_of_the_metrics_is_read(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    start(run, 10)
    steps(run, 1, 200, 11, pace=9.0)
    steps(run, 201, 260, 2000, pace=0.1)
    monkeypatch.setattr(module, "TAIL_BYTES", 2000)
    found = position(run)
    assert found.step == 260
    assert found.seconds_left == pytest.approx(40 * 0.1)


@pytest.mark.parametrize(
    ("names", "ended"),
    [
        (["started", "done"], "done"),
        (["started", "stopped"], "saved"),
        (["started", "stopped", "failed 75"], "saved"),
        (["submitted", "failed 2"], "failed"),
        (["started", "failed 130"], "interrupted"),
        (["started", "cancelled"], "cancelled"),
        (["started", "cancelled", "stopped"], "saved"),
        (["started", "stopped", "cancelled"], "saved"),
        (["started", "failed 1", "submitted"], ""),
        (["submitted", "started"], ""),
    ],
)
def test_an_attempt_tells_how_it_ended(run: RunDirectory, names: list[str], ended: str) -> None:
    for number, name in enumerate(names):
        word, _, code = name.partition(" ")
        event(run, word, number, **({"exit_code": int(code), "error": "why"} if code else {}))
    assert position(run).attempts[-1].ended == ended


def test_a_resume_is_another_attempt_and_an_evaluation_is_none_to_train(run: RunDirectory) -> None:
    event(run, "submitted", 1, launcher="slurm", job="12", verb="train")
    start(run, 2, job="12")
    event(run, "submitted", 3, launcher="slurm", job="13", verb="train")
    start(run, 4, job="13")
    event(run, "done", 5, test_loss=0.4)
    event(run, "submitted", 6, launcher="slurm", job="14", verb="evaluate")
    start(run, 7, job="14")
    found = position(run)
    assert found.jobs == ["12", "13", "14"]
    assert found.attempt is found.attempts[2]
    assert found.training is found.attempts[1] and found.training.ended == "done"
    assert found.scores == {"test_loss": 0.4}


def test_a_job_may_be_faster_than_the_word_of_its_submission(run: RunDirectory) -> None:
    start(run, 2, job="12")
    event(run, "submitted", 3, launcher="slurm", job="12", verb="evaluate")
    (attempt,) = position(run).attempts
    assert (attempt.launcher, attempt.verb, attempt.job, len(attempt.starts)) == ("slurm", "evaluate", "12", 1)


def test_an_evaluation_by_hand_is_none_to_train(run: RunDirectory) -> None:
    start(run, 2)
    event(run, "done", 3)
    start(run, 4)
    event(run, "evaluated", 5, test_loss=0.25)
    assert [attempt.verb for attempt in position(run).attempts] == ["train", "evaluate"]


def test_the_newest_checkpoint_is_that_of_the_highest_number(run: RunDirectory) -> None:
    for name in ("step_9000", "step_10000", ".step_20000.tmp", "step_x"):
        (run.checkpoints / name).mkdir()
    assert position(run).checkpoint == run.checkpoints / "step_10000"


def test_broken_files_tell_nothing(run: RunDirectory) -> None:
    run.plan.write_text("{")
    run.event_file.write_bytes(b'{"event": "started"}\n{"event": "done", "ti')
    run.metrics.write_bytes(b"\xff\n[1]\n{}\n\n")
    found = position(run)
    assert (found.plan, found.step, found.steps, found.seconds_left) == ({}, None, None, None)
    assert found.attempts[0].launcher == ""


def test_columns_are_aligned() -> None:
    assert aligned([["RUN", "STEP"], ["a longer name", "1"], ["b", "-"]]).splitlines() == [
        "RUN            STEP",
        "a longer name  1",
        "b              -",
    ]


def test_the_end_of_training_is_not_that_of_an_evaluation_meanwhile(run: RunDirectory) -> None:
    event(run, "submitted", 1, launcher="slurm", job="7", verb="train")
    event(run, "started", 2, job="7")
    event(run, "submitted", 3, launcher="local", verb="evaluate")
    event(run, "started", 4)
    event(run, "evaluated", 5, test_loss=0.25)
    event(run, "done", 6)
    found = [(attempt.verb, attempt.job, attempt.ended) for attempt in position(run).attempts]
    assert found == [("train", "7", "done"), ("evaluate", "", "done")]
