"""What becomes of a job whose ranks have ended early: each end, as Slurm and the run directory tell of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slurm_train.launch import restart
from slurm_train.launch.queue import Standing
from slurm_train.launch.restart import End, verdict
from slurm_train.report.position import position
from slurm_train.report.restarts import Restarts, restarts
from slurm_train.report.rundir import RunDirectory
from tests.unit.launch.fake_slurm import FakeSlurm, install

RUNNING = Standing("RUNNING")
PREEMPTED = Standing("RUNNING", preempted=True)
SHOWN = "JobId=12 JobName=x\n   JobState=RUNNING Reason=None Dependency=(null)\n   Requeue=1 Restarts=0\n"
SUBMITTED = {"event": "submitted", "launcher": "slurm", "job": "12", "time": 1.0}
STARTED = {"event": "started", "job": "12", "time": 2.0, "step": 0}


def made(path: Path, *events: Mapping[str, Any], step: int = 7, checkpoint: int = 0) -> RunDirectory:
    """A run directory with these events, so many steps, and a checkpoint."""
    config = "launcher: {restarts: 2, signal_seconds: 90}\n"
    run = RunDirectory.create(path, config, json.dumps({"launcher": "slurm"}))
    run.event_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    if step:
        run.append_metrics([{"step": step, "epoch": 0, "loss": 1.0, "time": 3.0}])
    if checkpoint:
        (run.checkpoints / f"step_{checkpoint:06d}").mkdir()
    return run


def stopped(by: str, **fields: Any) -> dict[str, Any]:
    return {"event": "stopped", "reason": by, "time": 4.0, **fields}


def requeued(why: str, checkpoint: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event": "requeued", "job": "12", "why": why, "checkpoint": checkpoint, "time": 1.5, **fields}


FAILED = (SUBMITTED, STARTED)
CASES: dict[str, tuple[tuple[dict[str, Any], ...], int, Standing, bool, str]] = {
    "time limit": ((*FAILED, stopped("SIGUSR2")), 75, RUNNING, True, "near its time limit"),
    "preempted": ((*FAILED, stopped("SIGTERM")), 75, PREEMPTED, True, "preempted"),
    "preempted before it could save": (FAILED, 143, PREEMPTED, True, "preempted"),
    "cancelled": ((*FAILED, stopped("SIGTERM")), 75, Standing("COMPLETING"), False, "cancelled"),
    "told by hand": ((*FAILED, stopped("SIGTERM")), 75, RUNNING, False, "asked to stop by SIGTERM"),
    "torchrun hides the 75": ((*FAILED, stopped("SIGUSR2")), 1, RUNNING, True, "near its time limit"),
    "warned before Python listened": ((SUBMITTED,), 140, RUNNING, True, "near its time limit"),
    "killed": (FAILED, 137, RUNNING, True, "failed"),
    "user's fault": (FAILED, 2, RUNNING, False, "its input is at fault"),
    "twice from the beginning": (
        (*FAILED, requeued("failed"), {**STARTED, "time": 2.5}),
        1,
        RUNNING,
        False,
        "it has failed twice without a checkpoint; train.save_steps saves more often",
    ),
    "twice in all, with a preemption between": (
        (*FAILED, requeued("failed"), STARTED, requeued("preempted"), STARTED),
        1,
        RUNNING,
        False,
        "it has failed twice without a checkpoint; train.save_steps saves more often",
    ),
    "the user has started it anew": ((requeued("failed"), *FAILED), 1, RUNNING, True, "failed"),
    "limit": (
        (*FAILED, requeued("preempted"), STARTED, requeued("preempted"), STARTED, stopped("SIGUSR2")),
        75,
        RUNNING,
        False,
        "it has started again 2 times: launcher.restarts=2",
    ),
    "another job has taken over": ((*FAILED, {**SUBMITTED, "job": "13"}), 1, RUNNING, False, "job 13 has taken over"),
    "done": ((*FAILED, {"event": "done", "time": 4.0}), 1, RUNNING, False, "the run is done"),
    "never started": ((), 1, RUNNING, False, "the run has not started"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict(name: str, tmp_path: Path) -> None:
    events, code, standing, again, why = CASES[name]
    run = made(tmp_path / "run", *events)
    found = verdict(End(position(run), "12", code, standing, restarts(run.events())), limit=2)
    assert (found.again, found.why) == (again, why)


def test_a_failure_from_another_checkpoint_than_the_one_before_starts_again(tmp_path: Path) -> None:
    run = made(tmp_path / "run", *FAILED, requeued("failed", 20), {**STARTED, "step": 20}, step=45, checkpoint=40)
    end = End(position(run), "12", 1, RUNNING, restarts(run.events()))
    assert verdict(end, 9).again
    run = made(tmp_path / "other", *FAILED, requeued("failed", 40), {**STARTED, "step": 40}, step=45, checkpoint=40)
    end = End(position(run), "12", 1, RUNNING, restarts(run.events()))
    assert verdict(end, 9).why == "it has failed twice from step 40; train.save_steps saves more often"


def test_what_fails_before_its_first_step_is_not_tried_again(tmp_path: Path) -> None:
    run = made(tmp_path / "run", *FAILED, step=0)
    found = verdict(End(position(run), "12", 1, RUNNING, Restarts()), 9)
    assert (found.again, found.why) == (False, "it failed before its first step")


def test_an_error_that_would_come_again(tmp_path: Path) -> None:
    run = made(tmp_path / "run", *FAILED)
    found = verdict(End(position(run), "12", 1, RUNNING, Restarts(), ["BadNumber", "DistError"]), 9)
    assert (found.again, found.why) == (False, "another start would come to the same BadNumber")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    return install(tmp_path, monkeypatch)


def test_the_job_goes_back_into_the_queue(tmp_path: Path, slurm: FakeSlurm, capfd: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run", SUBMITTED, STARTED, stopped("SIGUSR2"), checkpoint=7)
    slurm.says("scontrol", SHOWN)
    assert restart.main(["75", "resume", str(run.path)]) == 75
    assert slurm.calls == ["scontrol show job 12", "scontrol requeue 12"]
    assert capfd.readouterr().err == (
        "slurm_train: saved at step 7, near its time limit: job 12 goes back into the queue\n"
    )
    word = run.events()[-1]
    assert (word["event"], word["why"], word["checkpoint"]) == ("requeued", "near its time limit", 7)


def test_a_task_of_an_array_goes_by_its_own_id(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    task = {"job": "11_4"}
    run = made(tmp_path / "run", SUBMITTED | task, STARTED | task, stopped("SIGUSR2"))
    slurm.says("scontrol", SHOWN)
    restart.main(["75", "resume", str(run.path)])
    assert slurm.calls[-1] == "scontrol requeue 11_4"


def test_a_run_by_hand_that_cannot_be_requeued_is_told_how_to_go_on(
    tmp_path: Path, slurm: FakeSlurm, capfd: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", STARTED, stopped("SIGUSR2"))
    run.plan.write_text(json.dumps({"launcher": "inline"}))
    slurm.says("scontrol", SHOWN.replace("Requeue=1", "Requeue=0"))
    assert restart.main(["75", "resume", str(run.path)]) == 75
    assert slurm.calls == ["scontrol show job 12"]
    told = capfd.readouterr().err
    assert "job 12 cannot be requeued (it was submitted with --no-requeue, or the cluster has JobRequeue=0)" in told
    assert f"go on with: sbatch sbatch_templates/srun.sbatch resume {run.path}" in told


@pytest.mark.parametrize(
    ("saved", "shown", "overrides"),
    [
        ({"seconds": 1.0}, SHOWN.replace("Requeue=1", "Requeue=0"), []),
        ({"seconds": 60.0}, SHOWN, ["launcher.signal_seconds=130"]),
    ],
)
def test_a_new_job_goes_on_where_the_old_one_cannot(
    saved: dict[str, Any],
    shown: str,
    overrides: list[str],
    tmp_path: Path,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = made(tmp_path / "run", SUBMITTED, STARTED, {"event": "saved", "time": 3.5, **saved}, stopped("SIGUSR2"))
    slurm.says("scontrol", shown)
    calls = []
    monkeypatch.setattr(restart.start, "resume", lambda *words, **named: calls.append((words, named)))
    assert restart.main(["75", "resume", str(run.path)]) == 75
    assert calls == [((str(run.path), overrides), {"after": "12"})]
    assert slurm.calls == ["scontrol show job 12"]
    assert restarts(run.events()).count == 1


def test_a_requeue_that_slurm_refuses_is_no_restart(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path / "run", SUBMITTED, STARTED, stopped("SIGUSR2"))
    script = '#!/bin/sh\n[ "$1" = show ] && cat "$0.txt" && exit\necho "Requested operation is disabled" >&2\nexit 1\n'
    (slurm.folder / "scontrol").write_text(script.replace("cat", "/bin/cat"))
    (slurm.folder / "scontrol.txt").write_text(SHOWN)
    (slurm.folder / "scontrol").chmod(0o755)
    monkeypatch.setattr(restart.start, "resume", lambda *words, **named: None)
    restart.main(["75", "resume", str(run.path)])
    assert [event.get("refused") for event in run.events() if event["event"] == "requeued"] == [
        None,
        "Requested operation is disabled",
        None,
    ]
    assert restarts(run.events()).count == 1


@pytest.mark.parametrize("words", [["evaluate", "x"], ["plan", "+experiment=fmnist"], ["status"]])
def test_other_verbs_end_as_they_do(words: list[str], slurm: FakeSlurm) -> None:
    assert restart.main(["1", *words]) == 1
    assert slurm.calls == []


def test_whatever_goes_wrong_the_exit_code_stays(slurm: FakeSlurm, capfd: pytest.CaptureFixture[str]) -> None:
    assert restart.main(["75", "resume", "/no/such/run"]) == 75
    assert "not started again: there is no run directory or run id /no/such/run" in capfd.readouterr().err
