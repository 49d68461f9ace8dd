"""The verbs status and cancel, and finding a run by its job: real run directories, with Slurm's words given."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_train.cli import main
from slurm_train.errors import RunDirectoryError
from slurm_train.launch import causes
from slurm_train.launch.queue import Job
from slurm_train.launch.runs import find_run
from slurm_train.report.position import position
from slurm_train.report.rundir import RunDirectory
from tests.unit.launch.fake_slurm import FakeSlurm, install

Output = pytest.CaptureFixture[str]
PLAN = {"launcher": "slurm", "epochs": 5, "steps_per_epoch": 844, "total_steps": 4220, "world_size": 4}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Slurm, and an empty working directory."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return install(tmp_path, monkeypatch)


def make(path: str, job: str | None = None, launcher: str = "slurm", **plan: object) -> RunDirectory:
    """A run that was submitted."""
    run = RunDirectory.create(path, "seed: 0\n", json.dumps(PLAN | {"launcher": launcher} | plan))
    if launcher != "inline":
        run.append_event("submitted", launcher=launcher, verb="train", **({"job": job} if job else {}))
    return run


def start(run: RunDirectory, step: int = 0, job: str | None = None, **fields: object) -> None:
    facts = {"step": step, "epochs": 5, "steps_per_epoch": 844, "total_steps": 4220, "world_size": 4}
    run.append_event("started", **(facts | {"job": job, "host": "elsewhere", "pid": 1} | fields))


def steps(run: RunDirectory, last: int, pace: float = 0.5) -> None:
    now = time.time()
    run.append_metrics(
        {"step": step, "epoch": step // 844, "loss": 0.25, "time": now + step * pace} for step in range(1, last + 1)
    )


def end(run: RunDirectory, job: str, rank: int, message: str, code: int = 1, at: float = 0.0) -> None:
    """What a rank leaves that failed."""
    word = {"rank": rank, "host": f"n{rank}", "exit_code": code, "kind": "", "message": message, "time": at}
    (run.logs / f"{job}_{rank}.outcome.json").write_text(json.dumps(word))


def test_the_table_takes_two_calls_whatever_the_number_of_runs(slurm: FakeSlurm, capsys: Output) -> None:
    for number in range(1, 9):
        make(f"runs/fmnist/r{number}", job=str(number))
    start(RunDirectory("runs/fmnist/r2"), job="2")
    steps(RunDirectory("runs/fmnist/r2"), 1200)
    os.utime("runs/fmnist/r2/metrics.jsonl", (1, 1))
    for number in range(1, 9):
        for name in ("config.yaml", "events.jsonl"):
            os.utime(f"runs/fmnist/r{number}/{name}", (number, number))
    other = make("elsewhere/z", job="9")
    slurm.says(
        "squeue",
        "1|PENDING||10:00|Resources|(null)\n2|RUNNING|n[1-2]|1:59:30|None|(null)\n"
        f"9|PENDING||UNLIMITED|Priority|slurm_train:{other.path}\n10|RUNNING|n4|1:00|None|not ours\n"
        "8|COMPLETED|n3|1:00|None|(null)\n",
    )
    slurm.says("sacct", "3|FAILED|75:0|n1|\n4|FAILED|1:0|n1|\n5|TIMEOUT|0:0|n1|\n6|CANCELLED by 0|0:0|n1|\n")
    assert main(["status"]) == 0
    assert slurm.names == ["squeue", "sacct"]
    expected = f"""\
RUN  JOB  STATE                 NODES   EPOCH  STEP         LOSS    LEFT   JOB LEFT
{other.path}  9    PENDING (Priority)    -       -      -            -       -      -
r1   1    PENDING (Resources)   -       -      -            -       -      10:00
r2   2    RUNNING               n[1-2]  2/5    1,200/4,220  0.2500  25:10  1:59:30
r3   3    FAILED (saved)        n1      -      -            -       -      -
r4   4    FAILED (exit code 1)  n1      -      -            -       -      -
r5   5    TIMEOUT               n1      -      -            -       -      -
r6   6    CANCELLED             n1      -      -            -       -      -
r7   7    unknown               -       -      -            -       -      -
r8   8    COMPLETED             n3      -      -            -       -      -
"""
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        line.split() for line in expected.splitlines()
    ]


def test_the_newest_twenty_are_shown(slurm: FakeSlurm, capsys: Output) -> None:
    for number in range(23):
        make(f"runs/a/r{number}", launcher="local").append_event("done")
        for name in ("config.yaml", "events.jsonl"):
            os.utime(f"runs/a/r{number}/{name}", (number, number))
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [f"r{number}" for number in range(3, 23)]
    assert lines[-1] == "(3 older ones: --all)"
    assert main(["status", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 24


def test_without_slurm_local_runs_are_shown_in_their_own_words(slurm: FakeSlurm, capsys: Output) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "no runs below runs/ here, and none of your jobs in the queue\n"
    here = {"host": socket.gethostname()}
    ends = {"a": "done", "b": "stopped", "c": "failed", "d": "", "e": "", "f": "", "g": "interrupted", "h": ""}
    for name, word in ends.items():
        run = make(f"runs/x/{name}", launcher="local", ranks=[{"node": here["host"]}])
        if name != "h":
            start(run, **(here | {"pid": os.getpid() if name == "d" else 2**22 + 1}))
        if name == "f":
            start(run, host="elsewhere", pid=os.getpid())
        if word:
            code = {"failed": 1, "interrupted": 130}.get(word)
            run.append_event(*(["failed"] if code else [word]), **({"exit_code": code, "error": "why"} if code else {}))
    assert main(["status", "--json"]) == 0
    output = capsys.readouterr()
    states = {row["run"]: row["state"] for row in json.loads(output.out)}
    assert states == {
        "a": "done",
        "b": "saved",
        "c": "failed",
        "d": "lost",  # the process lives, but is not one of this project
        "e": "lost",
        "f": "running on elsewhere",
        "g": "interrupted",
        "h": "lost",
    }
    assert slurm.calls == [] and output.err == ""


def test_a_local_run_lives_as_long_as_its_process(slurm: FakeSlurm, capsys: Output) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", "slurm_train"], stdin=subprocess.PIPE) as process:
        run = make("runs/x/a", launcher="local", ranks=[{"node": socket.gethostname()}])
        (run.logs / f"{process.pid}_submitted.pkl").touch()
        assert state_of("a", capsys) == "starting"
        start(run, host=socket.gethostname(), pid=process.pid)
        assert state_of("a", capsys) == "running"
        assert main(["cancel", "a"]) == 2
        error = f"error: runs/x/a: it is run by process {process.pid} on {socket.gethostname()}, not by a Slurm job"
        assert capsys.readouterr().err == f"{error}; press Ctrl-C there\n"
        process.kill()
    assert state_of("a", capsys) == "lost"


def state_of(name: str, capsys: Output) -> str:
    assert main(["status", name, "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["state"])


def test_when_slurm_does_not_answer_the_runs_are_shown_with_a_note(slurm: FakeSlurm, capsys: Output) -> None:
    make("runs/x/a", job="1").append_event("done")
    slurm.says("squeue", error="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert main(["status"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[1].split() == ["a", "1", "done"]
    words = "slurm_load_jobs error: Unable to contact slurm controller"
    assert output.err == f"note: {words} (so states are what the runs themselves have told)\n"
    (slurm.folder / "squeue").unlink()
    assert main(["status", "a"]) == 0
    assert "note: no squeue on PATH" in capsys.readouterr().err


def test_one_run_is_shown_line_by_line(slurm: FakeSlurm, capsys: Output) -> None:
    run = make("runs/x/a", job="7")
    start(run, job="7")
    run.append_event("epoch", epoch=0, val_loss=0.5, val_accuracy=0.875)
    start(run, job="7")
    steps(run, 1200)
    (run.checkpoints / "step_000844").mkdir()
    slurm.says("squeue", "7|RUNNING|n[1-2]|1:59:30|None|(null)\n")
    assert main(["status", "7"]) == 0
    assert (
        capsys.readouterr().out
        == f"""\
run directory  {run.path}
launcher       slurm
job            7
state          RUNNING
nodes          n[1-2]
ranks          4
restarts       1
epoch          2/5
step           1,200/4,220
loss           0.2500
validation     loss 0.5000   accuracy 0.8750
checkpoint     checkpoints/step_000844
time left      25:10 of training, 1:59:30 of the job
next           python -m slurm_train logs --follow a
next           python -m slurm_train cancel a
"""
    )


def test_an_evaluation_changes_nothing_about_a_run_that_is_done(slurm: FakeSlurm, capsys: Output) -> None:
    run = make("runs/x/a", job="7")
    start(run, job="7")
    run.append_event("done")
    run.append_event("submitted", launcher="slurm", job="8", verb="evaluate")
    slurm.says("squeue", "8|RUNNING|n1|1:00|None|(null)\n")
    slurm.says("sacct", "7|COMPLETED|0:0|n1|\n")
    assert state_of("a", capsys) == "RUNNING"
    slurm.says("squeue", "8|FAILED|n1|1:00|None|(null)\n")
    assert state_of("a", capsys) == "COMPLETED"


REASONS = {
    "PartitionTimeLimit": "launcher.time=10: more than the partition allows; lower it, or choose another partition",
    "PartitionNodeLimit": "launcher.nodes: more, or fewer, than the partition allows in one job",
    "BadConstraints": "launcher.constraint: no node is like this; sinfo -o '%P %f %G %c %m' tells how they are",
    "ReqNodeNotAvail, UnavailableNodes:n3": "launcher.time=10: nodes are down, or kept for a reservation or "
    "maintenance before the job could end",
    "AssocMaxJobsLimit": "launcher.account: it allows no more jobs at once; this one starts when others end",
    "AssocGrpCpuLimit": "launcher.cpus_per_task: more CPUs than your account or QOS allows at once",
    "QOSMaxWallDurationPerJobLimit": "launcher.time=10: more than your account or QOS allows",
    "QOSMaxGRESPerUser": "launcher.gpus_per_node: more than your account or QOS allows at once",
    "JobHeldUser": "it is held; scontrol release 7 lets it go on",
    "DependencyNeverSatisfied": "launcher.sbatch: the job that it waits for has failed; cancel this one",
    "Resources": "",
    "Priority": "",
    "": "",
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_that_does_not_pass_is_explained_by_its_key(slurm: FakeSlurm, reason: str) -> None:
    run = make("runs/x/a", job="7", sbatch_keys={"time": "launcher.time=10"})
    assert causes.waiting(position(run), Job("7", "PENDING", reason)) == REASONS[reason]


def test_the_first_cause_of_a_failure_is_told(slurm: FakeSlurm) -> None:
    run = make("runs/x/a", job="7", sbatch_keys={"mem": "launcher.mem=1G"})
    failed = Job("7", "FAILED", exit_code="1:0")

    def why(job: Job = failed) -> str:
        return causes.failure(position(run), job)

    assert why() == "it ended with exit code 1"
    assert why(Job("7", "FAILED", exit_code="0:9")) == "it was ended by signal 9"
    unopened = f"the nodes could not open the log files: do they share {run.path}?"
    assert why(Job("7", "FAILED", exit_code="0:53")) == unopened
    (run.logs / "7_1_log.err").write_text("x\nslurmstepd: error: execve(): /no/python: No such file or directory\n")
    assert why() == "rank 1: slurmstepd: error: execve(): /no/python: No such file or directory"
    batch = run.logs / "7_batch.log"
    batch.write_text("setup\nslurmstepd-n1: error: execve(): /no/python: No such file or directory\n")
    assert why() == "slurmstepd-n1: error: execve(): /no/python: No such file or directory"
    end(run, "7", 0, "RuntimeError: Connection closed by peer", at=5.0)
    end(run, "7", 2, "stopped by SIGTERM, saved at step 3", code=75, at=1.0)
    end(run, "7", 3, "ValueError: a\n bad number", at=4.0)
    (run.logs / "7_4.outcome.json").write_text("{")
    assert why() == "rank 3 on n3: ValueError: a bad number"
    batch.write_text("srun: error: n1: task 1: Out Of Memory\nsrun: error: n0: task 0: Exited with exit code 1\n")
    assert why() == "rank 1 on n1: Out Of Memory; raise launcher.mem=1G"
    batch.write_text("srun: error: n3: task 3: Exited with exit code 1\nsrun: error: n1: tasks 0-1: Killed\n")
    assert why() == "rank 3 on n3: ValueError: a bad number"
    more = "it needed more memory than it had asked for; raise launcher.mem=1G; stopped by SIGTERM, saved at step 3"
    assert why(Job("7", "OUT_OF_MEMORY")) == more
    assert why(Job("7", "TIMEOUT")) == "it ran into its time limit; stopped by SIGTERM, saved at step 3"
    assert why(Job("7", "COMPLETED")) == ""


def test_cancel_ends_what_goes_on_and_says_of_each_what_became_of_it(slurm: FakeSlurm, capsys: Output) -> None:
    first, second, third = make("runs/x/a", job="7"), make("runs/x/b", job="8"), make("runs/x/c", job="9")
    slurm.says("squeue", "7|RUNNING|n[1-2]|1:00|None|(null)\n8|PENDING||1:00|Priority|(null)\n")
    slurm.says("sacct", "9|COMPLETED|0:0|n1|\n")
    slurm.says("scancel")
    assert main(["cancel", "a", "b", "c", "7"]) == 0
    assert slurm.calls[-1] == "scancel 7 8" and slurm.names == ["squeue", "sacct", "scancel"]
    assert (
        capsys.readouterr().out
        == f"""\
job 7 cancelled, it was RUNNING on n[1-2] (runs/x/a)
  its ranks save now; go on with: python -m slurm_train resume {first.path}
job 8 cancelled, it was PENDING (runs/x/b)
job 9 has ended already: COMPLETED (runs/x/c)
"""
    )
    ends = [[event.get("job") for event in run.events() if event["event"] == "cancelled"] for run in (first, second)]
    assert ends == [["7"], ["8"]]
    assert "cancelled" not in [event["event"] for event in third.events()]


def test_what_slurm_does_not_let_be_cancelled_is_told(slurm: FakeSlurm, capsys: Output) -> None:
    run = make("runs/x/a", job="7")
    slurm.says("squeue", "7|RUNNING|n1|1:00|None|(null)\n")
    words = "scancel: error: Kill job error on job id 7: Access/permission denied"
    slurm.says("scancel", error=words, code=1)
    assert main(["cancel", "a"]) == 2
    assert capsys.readouterr().err == f"error: {words}\n"
    assert [event["event"] for event in run.events()] == ["submitted"]


def test_a_run_by_hand_that_is_done_is_not_cancelled_with_its_job(slurm: FakeSlurm, capsys: Output) -> None:
    run = make("runs/x/job-7", launcher="inline")
    start(run, job="7")
    run.append_event("done")
    slurm.says("squeue", "7|RUNNING|n1|1:00|None|(null)\n")
    slurm.says("scancel")
    assert main(["cancel", "7"]) == 0
    assert capsys.readouterr().out == "job 7 has ended already: done (runs/x/job-7)\n"
    assert "scancel" not in slurm.names


def test_a_run_is_found_by_its_job(slurm: FakeSlurm) -> None:
    a, b, c = make("runs/x/a", job="12"), make("runs/x/b", job="120_4"), make("runs/x/c", launcher="inline")
    start(c, job="13")
    a.append_event("submitted", launcher="slurm", job="14", verb="train")
    found = {name: find_run(name).path for name in ("12", "14", "120_4", "120", "13")}
    assert found == {"12": a.path, "14": a.path, "120_4": b.path, "120": b.path, "13": c.path}
    hand = make("runs/x/job-15", launcher="inline")
    assert find_run("15").path == hand.path
    named = make("runs/x/12", launcher="local")  # a run id comes first
    assert find_run("12").path == named.path


def test_several_runs_of_a_job_are_told_apart_by_the_user(slurm: FakeSlurm) -> None:
    for name in ("job-12", "job-12-2", "job-120", "job-12_3"):
        make(f"runs/x/{name}", launcher="inline")
    with pytest.raises(
        RunDirectoryError,
        match="3 runs belong to job 12; name one: runs/x/job-12 runs/x/job-12-2 runs/x/job-12_3$",
    ):
        find_run("12")


def test_a_job_leads_to_a_run_elsewhere_by_its_comment(slurm: FakeSlurm) -> None:
    run = make("else where/z", job="12")
    comment = f"slurm_train:{str(run.path).replace(' ', '%20')}"
    slurm.says("squeue", f"12|RUNNING|n1|1:00|None|{comment}\n")
    assert find_run("12").path == run.path
    slurm.says("squeue", error="slurm_load_jobs error: Invalid job id specified", code=1)
    slurm.says("sacct", f"12|COMPLETED|0:0|n1|{comment}\n")
    assert find_run("12").path == run.path
    with pytest.raises(RunDirectoryError, match="there is no run directory or run id 99"):
        find_run("99")


def test_status_starts_without_hydra_and_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from slurm_train.cli import main; main(['status']); "
        "sys.exit(', '.join({'torch', 'hydra', 'omegaconf', 'submitit'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stderr.strip() == ""
