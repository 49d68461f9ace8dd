"""status, logs and cancel on real jobs: what they print from the queue to the end, and how often they ask Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import slurm_train.data
from tests.cluster.jobs import REPO, Cluster, slurm, wait_for_accounting, wait_for_job, wait_until

SAMPLE = f"data.root={Path(slurm_train.data.__file__).parent / 'sample'}"
SLOW = ("+experiment=fmnist", SAMPLE, "model._target_=mine.Slow", "train.validation=0", "train.log_seconds=0.2")
MINE = """
import os, time
from torch import nn

class Slow(nn.Module):
    def __init__(self, seconds: float = 0.1, failing: int = -1):
        super().__init__()
        self.layer, self.seconds, self.failing = nn.Linear(784, 10), seconds, failing

    def forward(self, images):
        if os.environ["SLURM_PROCID"] == str(self.failing):
            raise ValueError("a number\\nthat is bad")
        if self.training:
            time.sleep(self.seconds)
        return self.layer(images.flatten(1))
"""


@pytest.fixture
def work(shared_tmp: Path) -> Path:
    """A working directory with a slow model in it."""
    (shared_tmp / "mine.py").write_text(MINE)
    return shared_tmp


def begin(*words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`python -m slurm_train` as a user types it, going on beside the test."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), **(env or {})}
    command = [sys.executable, "-m", "slurm_train", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)


def typed(*words: str, cwd: Path, env: dict[str, str] | None = None, code: int = 0) -> str:
    """What the command prints; it has to end with this exit code."""
    process = begin(*words, cwd=cwd, env=env)
    output, error = process.communicate(timeout=180)
    assert process.returncode == code, output + error
    return output + error


def submit(*words: str, cwd: Path) -> str:
    """Submit a run of two nodes; returns the job id."""
    # little memory, so that the jobs of a test need not wait for each other
    layout = ("launcher=slurm", "launcher.nodes=2", "launcher.mem=1500", "parallel=ddp")
    return re.search(r"job (\d+) submitted", typed(*SLOW, *layout, *words, cwd=cwd))[1]


def told(job: str, cwd: Path) -> dict[str, object]:
    """What `status` tells programs about a run."""
    return json.loads(typed("status", job, "--json", cwd=cwd))


def test_a_run_is_followed_from_the_queue_over_a_requeue_to_its_end(work: Path) -> None:
    job = submit("launcher.sbatch.hold=true", "train.max_steps=60", "launcher.time=30", cwd=work)
    follower = begin("logs", "--follow", job, cwd=work)
    assert "it is held; scontrol release" in typed("status", job, cwd=work)
    assert follower.stdout.readline() == "waiting: PENDING (JobHeldUser)\n"
    slurm("scontrol", "release", job)
    wait_until(lambda: (told(job, work)["step"] or 0) > 5, 120, "it trains")
    found = told(job, work)
    assert (found["state"], found["job"], found["steps"], found["epochs"]) == ("RUNNING", job, 60, 5)
    assert found["nodes"] and found["job_left"].startswith(("29:", "28:")) and 0 < found["seconds_left"] < 60
    slurm("scontrol", "requeue", job)
    lines = []
    while not lines or lines[-1] != "waiting: PENDING (BeginTime)":
        lines.append(follower.stdout.readline().removesuffix("\n"))
        assert lines[-1] or follower.poll() is None, lines
    assert told(job, work)["checkpoint"]
    slurm("scontrol", "update", f"jobid={job}", "starttime=now")
    output, error = follower.communicate(timeout=180)
    assert (follower.returncode, error) == (0, "")
    later = output.splitlines()
    assert later[-1] == f"job {job} COMPLETED"
    assert [line for line in lines if line.startswith("0: 2 ranks on cpu")]
    order = ("0: going on from step ", "0: 2 ranks on cpu", "0: test accuracy 0.")
    assert [line for line in later if line.startswith(order)] == [
        next(line for line in later if line.startswith(word)) for word in order
    ]
    lines += later
    assert not [line for line in lines if "submitit INFO" in line]
    found = told(job, work)
    assert (found["state"], found["step"], found["restarts"], found["exit_code"]) == ("COMPLETED", 60, 1, 0)
    assert 0 < found["scores"]["test_accuracy"] <= 1
    assert typed("logs", job, "--rank", "1", cwd=work).startswith("1: ") is False


def test_cancel_lets_the_ranks_save_and_two_calls_tell_of_all_runs(work: Path) -> None:
    jobs = [submit("train.max_steps=600", f"run.name=r{number}", cwd=work) for number in range(2)]
    elsewhere = submit("launcher.sbatch.hold=true", "run.dir=else/where", cwd=work)
    wait_until(lambda: all(told(job, work)["step"] for job in jobs), 120, "both train")

    counted = work / "bin"
    counted.mkdir()
    for name in ("squeue", "sacct", "scontrol"):
        lines = f'#!/bin/sh\necho {name} >> {counted}/calls\nexec {shutil.which(name)} "$@"\n'
        (counted / name).write_text(lines)
        (counted / name).chmod(0o755)
    table = typed("status", cwd=work, env={"PATH": f"{counted}{os.pathsep}{os.environ['PATH']}"})
    assert (counted / "calls").read_text().split() == ["squeue"]
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert rows["r0"][:2] == [jobs[0], "RUNNING"] and rows["r1"][:2] == [jobs[1], "RUNNING"]
    assert rows[str(work / "else" / "where")][:3] == [elsewhere, "PENDING", "(JobHeldUser)"]

    output = typed("cancel", jobs[0], "r1", elsewhere, cwd=work)
    assert f"job {jobs[0]} cancelled, it was RUNNING on " in output
    assert f"job {elsewhere} cancelled, it was PENDING (else/where)\n" in output
    assert {wait_for_job(job) for job in (*jobs, elsewhere)} == {"CANCELLED"}
    for job in jobs:
        found = told(job, work)
        assert (found["state"], found["exit_code"]) == ("CANCELLED (saved)", 75)
        assert found["checkpoint"] and "it was cancelled; stopped by SIGTERM, saved at step" in found["cause"]
    assert typed("logs", "-f", "r1", cwd=work, code=75).endswith(f"job {jobs[1]} CANCELLED (saved)\n")
    assert typed("cancel", "r1", cwd=work) == f"job {jobs[1]} has ended already: CANCELLED (saved) (runs/fmnist/r1)\n"

    wait_for_accounting(jobs[0])
    (counted / "calls").unlink()
    typed("status", cwd=work, env={"PATH": f"{counted}{os.pathsep}{os.environ['PATH']}"})
    assert len((counted / "calls").read_text().split()) == 2


def test_the_first_cause_of_a_failure_is_told(work: Path) -> None:
    job = submit("++model.failing=1", cwd=work)
    assert wait_for_job(job, timeout=120) == "FAILED"
    found = told(job, work)
    assert (found["state"], found["exit_code"]) == ("FAILED (exit code 1)", 1)
    assert re.fullmatch(r"rank 1 on \S+: ValueError: a number that is bad", found["cause"])
    assert "1: ValueError: a number\n1: that is bad\n" in typed("logs", job, cwd=work)


def test_a_directory_that_the_nodes_do_not_see_is_named(work: Path, own_cluster: Cluster, tmp_path: Path) -> None:
    job = submit(f"run.dir={tmp_path}/run", cwd=work)
    assert wait_for_job(job, timeout=120) == "FAILED"
    assert told(job, work)["cause"] == f"the nodes could not open the log files: do they share {tmp_path}/run?"


def test_what_is_started_by_hand_is_found_by_its_job(work: Path) -> None:
    train = f"srun --label {sys.executable} -m slurm_train {' '.join(SLOW)} parallel=ddp train.max_steps=20"
    environment = f"PYTHONPATH={REPO}"
    words = ("--parsable", "--array=3-4", "-n2", f"--export=ALL,{environment}", "--wrap", train)
    array = slurm("sbatch", *words, cwd=work)
    assert wait_for_job(f"{array}_4", timeout=120) == "COMPLETED", (work / f"slurm-{array}_4.out").read_text()
    found = told(f"{array}_4", work)
    assert (found["launcher"], found["job"], found["state"], found["step"]) == ("inline", f"{array}_4", "done", 20)
    output = typed("logs", "-f", f"{array}_4", cwd=work)
    assert "\n0: test accuracy" in output and output.endswith(f"job {array}_4 done\n")
    wait_for_job(f"{array}_3", timeout=120)
    assert f"2 runs belong to job {array}; name one: " in typed("status", array, cwd=work, code=2)
