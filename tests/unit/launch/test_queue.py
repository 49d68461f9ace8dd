"""What Slurm prints, as recorded from Slurm 22.05, to jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.errors import UserError
from slurm_train.launch import queue
from slurm_train.launch.queue import Job, active, job_ids, run_directory
from tests.unit.launch.fake_slurm import FakeSlurm, install

SQUEUE = """\
26_3|PENDING||UNLIMITED|JobArrayTaskLimit|(null)
15|COMPLETED|n[1-2]|364-23:59:31|None|slurm_train:/data/a%20b/runs/x|y
2|RUNNING|n[1-2]|1:59:30|None|my own|comment
30|PENDING||10:00|ReqNodeNotAvail, UnavailableNodes:n3|slurm_train:/data/r
12+0|RUNNING|n1|9:00|None|(null)
12+1|RUNNING|n2|9:00|None|(null)
CLUSTER: other
25|FAILED|n2|365-00:00:00|NonZeroExitCode|a
"""

SACCT = """\
4+0|COMPLETED|0:0|n1|
4+1|FAILED|1:0|n2|
6|CANCELLED by 0|0:0|None assigned|
25|FAILED|75:0|n2|
3_2|COMPLETED|0:0|n3|
7_[5-9:2,12%2]|CANCELLED by 1000|0:0|None assigned|
9|RUNNING|0:0|n1|
"""

SHOWN = """\
JobId=7 ArrayJobId=3 ArrayTaskId=0 ArrayTaskThrottle=2 JobName=JobState=RUNNING Reason=x
   UserId=someone(1000) GroupId=someone(1000) MCS_label=N/A
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=2:0
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n3
   Comment=slurm_train:/data/r

JobId=5 HetJobId=4 HetJobOffset=1 JobName=wrap
   JobState=FAILED Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=3:0
   NodeList=n4

"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install(tmp_path, monkeypatch)


def test_squeue_is_read_whatever_stands_in_a_comment(slurm: FakeSlurm) -> None:
    slurm.says("squeue", SQUEUE)
    assert queue.mine() == [
        Job("26_3", "PENDING", "JobArrayTaskLimit", "", "UNLIMITED"),
        Job("15", "COMPLETED", "", "n[1-2]", run_dir=Path("/data/a b/runs/x|y")),
        Job("2", "RUNNING", "", "n[1-2]", "1:59:30"),
        Job("30", "PENDING", "ReqNodeNotAvail, UnavailableNodes:n3", "", "10:00", run_dir=Path("/data/r")),
        Job("12", "RUNNING", "", "n1", "9:00"),
        Job("25", "FAILED", "NonZeroExitCode", "n2"),
    ]
    assert slurm.names == ["squeue"]


def test_two_calls_tell_of_any_number_of_jobs(slurm: FakeSlurm) -> None:
    slurm.says("squeue", SQUEUE)
    slurm.says("sacct", SACCT)
    found = queue.jobs(["2", "25", "4", "6", "3_2", "7_7", "9", "99"])
    assert {name: (job.state, job.exit_code, job.nodes) for name, job in found.items()} == {
        "2": ("RUNNING", "", "n[1-2]"),
        "25": ("FAILED", "75:0", "n2"),
        "4": ("COMPLETED", "0:0", "n1"),
        "6": ("CANCELLED", "0:0", ""),
        "3_2": ("COMPLETED", "0:0", "n3"),
        "7_7": ("CANCELLED", "0:0", ""),
    }
    assert slurm.names == ["squeue", "sacct"]
    assert slurm.calls[1].endswith("--jobs=25,4,6,3_2,7_7,9,99")


def test_accounting_is_not_asked_of_jobs_in_the_queue(slurm: FakeSlurm) -> None:
    slurm.says("squeue", SQUEUE)
    assert list(queue.jobs(["2", "15", "26_3"])) == ["2", "15", "26_3"]
    assert queue.jobs([]) == {}
    assert slurm.names == ["squeue"]


def test_without_sacct_the_controller_tells_of_what_ended(slurm: FakeSlurm) -> None:
    slurm.says("squeue", error="slurm_load_jobs error: Invalid job id specified", code=1)
    slurm.says("scontrol", SHOWN)
    ended = Job("3_0", "FAILED", "NonZeroExitCode", "n3", "", "2:0", Path("/data/r"))
    assert queue.jobs(["3_0", "4", "5"]) == {"3_0": ended}


@pytest.mark.parametrize("fault", ["Slurm accounting storage is disabled", "Problem talking to the database"])
def test_without_accounting_two_calls_must_do(slurm: FakeSlurm, fault: str) -> None:
    slurm.says("squeue", "4|FAILED|n1|0:00|None|(null)\n5|COMPLETED|n1|0:00|None|(null)\n6|FAILED|n1|0:00|None|x\n")
    slurm.says("scontrol", SHOWN)
    slurm.says("sacct", error=f"sacct: error: {fault}", code=1)
    assert {job.state for job in queue.jobs(["4", "5", "6", "7"]).values()} == {"FAILED", "COMPLETED"}
    assert slurm.names == ["squeue", "sacct"]


def test_what_nobody_knows_is_no_job(slurm: FakeSlurm) -> None:
    slurm.says("squeue", error="slurm_load_jobs error: Invalid job id specified", code=1)
    slurm.says("sacct")
    assert queue.jobs(["99"]) == {}


def test_a_cluster_that_does_not_answer_is_told_in_slurms_words(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="^no squeue on PATH; run this where Slurm's commands are$"):
        queue.mine()
    words = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    slurm.says("squeue", error=f"squeue: error: retrying\n{words}\n", code=1)
    with pytest.raises(UserError, match=f"^{words.replace('(', '[(]').replace(')', '[)]')}$"):
        queue.mine()
    slurm.says("squeue", code=3)
    with pytest.raises(UserError, match="^squeue ended with exit code 3$"):
        queue.mine()
    (slurm.folder / "squeue").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(queue, "CALL_SECONDS", 0.2)
    with pytest.raises(UserError, match="^squeue did not answer within 0 s; try again later$"):
        queue.mine()
    (slurm.folder / "squeue").chmod(0o644)
    with pytest.raises(UserError, match="^squeue cannot be run: Permission denied$"):
        queue.mine()


def test_the_users_own_formats_and_filters_do_not_count(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.says("squeue", "1|RUNNING|n1|1:00|None|(null)\n")
    script = (slurm.folder / "squeue").read_text().replace("printf", 'test -z "$SQUEUE_FORMAT$SQUEUE_STATES" && printf')
    (slurm.folder / "squeue").write_text(script)
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    assert [job.id for job in queue.mine()] == ["1"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("123", ["123"]),
        ("120_4", ["120_4"]),
        ("120_[5-9%2]", ["120_5", "120_6", "120_7", "120_8", "120_9"]),
        ("120_[0-4:2,7]", ["120_0", "120_2", "120_4", "120_7"]),
        ("12+0", ["12"]),
        ("12+1", []),
        ("12.batch", []),
        ("", []),
        ("job", []),
    ],
)
def test_an_id_is_each_job_that_it_means(text: str, ids: list[str]) -> None:
    assert job_ids(text) == ids


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        *((state, True) for state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")),
        *((state, True) for state in ("REQUEUE_HOLD", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING")),
        *((state, False) for state in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "NODE_FAIL")),
        *((state, False) for state in ("OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")),
    ],
)
def test_a_job_is_active_until_nothing_can_start_it_again(state: str, expected: bool) -> None:
    assert active(Job("1", state)) is expected


def test_a_comment_leads_to_a_run_directory() -> None:
    assert run_directory("slurm_train:/data/50%25%20done") == Path("/data/50% done")
    assert run_directory("slurm_train:/data/r \n") == Path("/data/r")
    assert run_directory("(null)") is None and run_directory("mine slurm_train:/x") is None
