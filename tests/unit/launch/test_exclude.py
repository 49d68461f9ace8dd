"""A job goes back into the queue without a node that has failed: once, and only where it can start without it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.launch import exclude
from slurm_train.launch.causes import failure
from slurm_train.launch.queue import Job
from slurm_train.report.position import position
from slurm_train.report.preflight import Report, reports
from slurm_train.report.rundir import RunDirectory
from tests.unit.launch.fake_slurm import FakeSlurm, install

FAULT = "node n2 fails its preflight: torch: ImportError"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory.create(tmp_path / "run", "{}\n", "{}\n")
    made.preflight.mkdir()
    made.append_event("submitted", launcher="slurm", job="12", verb="train")
    Report("12", 0, 2.0, {}, FAULT, ("n2",)).save(made)
    return made


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    fake = install(tmp_path, monkeypatch)
    fake.says("squeue", "n[4-5]\n")
    fake.says("scontrol", "JobId=12 JobState=RUNNING Requeue=1")
    fake.says("sbatch", error="sbatch: Job 13 to start at 2026-12-03T10:00:00")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(exclude, "TRIES", 2)
    before = signal.getsignal(signal.SIGTERM)
    yield fake
    signal.signal(signal.SIGTERM, before)


def cause(run: RunDirectory) -> str:
    """What status would show of the job, were it to end now."""
    return failure(position(run), Job("12", "FAILED", exit_code="1:0"))


def test_requeued_without_the_node_and_without_the_user_s_own(run: RunDirectory, slurm: FakeSlurm) -> None:
    assert exclude.main([str(run.path), "script"]) == 1
    assert slurm.calls[-3:] == [
        "sbatch --test-only --exclude=n[4-5,2] script",
        "scontrol requeue 12",
        "scontrol update JobId=12 ExcNodeList=n[4-5,2]",
    ]
    assert reports(run, "12")[0].excluded
    assert cause(run) == f"{FAULT}; job 12 goes back into the queue without n2"
    run.append_event("started", job="12")
    assert "preflight" not in cause(run)


def ends(run: RunDirectory, slurm: FakeSlurm) -> str:
    """The job ends and is not requeued; the cause that status shows."""
    assert exclude.main([str(run.path), "script"]) == 1
    assert "scontrol requeue 12" not in slurm.calls
    return cause(run)


def test_only_once(run: RunDirectory, slurm: FakeSlurm) -> None:
    Report("12", 0, 2.0, {}, FAULT, ("n2",), excluded=True).save(run)
    Report("12", 1, 2.0, {}, "node n3 fails its preflight: disk: full", ("n3",)).save(run)
    told = "node n3 fails its preflight: disk: full; the job ends, for it was requeued once already, without n2"
    assert ends(run, slurm) == told


def test_a_job_that_needs_all_its_nodes(run: RunDirectory, slurm: FakeSlurm) -> None:
    slurm.says("sbatch", error="allocation failure: Requested node configuration is not available", code=1)
    told = "the job ends, for without it there are too few nodes (allocation failure: Requested node configuration"
    assert ends(run, slurm).startswith(f"{FAULT}; {told}")


def test_a_job_that_may_not_be_requeued(run: RunDirectory, slurm: FakeSlurm) -> None:
    slurm.says("scontrol", "JobId=12 JobState=RUNNING Requeue=0")
    assert ends(run, slurm).endswith("it may not be requeued; resume the run with launcher.exclude='n[4-5,2]'")


def test_a_fault_that_is_no_node_s(run: RunDirectory, slurm: FakeSlurm) -> None:
    Report("12", 0, 2.0, {}, "2 of 3 nodes fail their preflight; n1: disk: full").save(run)
    slurm.says("squeue", "\n")
    assert ends(run, slurm) == "2 of 3 nodes fail their preflight; n1: disk: full; the job ends"


def test_slurm_does_not_answer(run: RunDirectory, slurm: FakeSlurm) -> None:
    slurm.says("squeue", error="squeue: error: Unable to contact slurm controller", code=1)
    assert "Slurm does not tell about it: squeue: error: Unable to contact" in ends(run, slurm)


def test_no_word_at_all(run: RunDirectory, slurm: FakeSlurm) -> None:
    (run.preflight / "12_0.json").unlink()
    assert ends(run, slurm) == "the preflight has left no word on the nodes"


def test_a_requeue_that_is_refused(run: RunDirectory, slurm: FakeSlurm) -> None:
    refuses = '#!/bin/sh\n[ "$1" != requeue ] || { echo no >&2; exit 1; }\necho JobState=RUNNING\n'
    (slurm.folder / "scontrol").write_text(refuses)
    assert exclude.main([str(run.path), "script"]) == 1
    assert cause(run) == f"{FAULT}; the job cannot be requeued without it: no"
