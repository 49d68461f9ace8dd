"""A run that is killed without a word and gone on with: each step counts once, and it has one owner at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slurm_train
from slurm_train.report.fence import holder
from tests.integration.runs import SAMPLE, losses

SLOW = """
import os, time
class Slow:
    def on_step(self, context):
        time.sleep(float(os.environ.get("PAUSE", 0)))
"""
WORDS = (
    "+experiment=fmnist",
    SAMPLE,
    "model.width=8",
    "train.batch_size=500",
    "train.max_steps=60",
    "train.save_steps=7",
    "train.log_seconds=0.05",
    "train.keep_checkpoints=0",
    "launcher.tasks_per_node=2",
    "parallel=ddp",
    "+train.callbacks.slow._target_=slow.Slow",
    "run.dir=run",
)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


def start(work: Path, *words: str, pause: float = 0.0) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(slurm_train.__file__).parents[1]), "PAUSE": str(pause)}
    return subprocess.Popen(
        [sys.executable, "-m", "slurm_train", *words],
        cwd=work,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_at(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Kill a local run with all of its processes once it is at a step."""
    metrics = run / "metrics.jsonl"
    end = time.monotonic() + 90
    while not metrics.exists() or metrics.read_text().count('"loss"') < step:
        assert time.monotonic() < end and process.poll() is None, process.communicate()
        time.sleep(0.05)
    table = subprocess.run(["ps", "-e", "-o", "pid=,sid=,args="], capture_output=True, text=True).stdout.splitlines()
    ours = [line.split(None, 2) for line in table]
    for pid, _, words in ours:
        if str(run.parent) in words and "submitit" in words:
            os.kill(int(pid), signal.SIGKILL)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_killed_twice_each_step_is_there_once(work: Path) -> None:
    run = work / "run"
    kill_at(start(work, *WORDS, pause=0.03), run, 10)
    kill_at(start(work, "resume", "run", pause=0.03), run, 30)
    done = start(work, "resume", "run")
    _, errors = done.communicate(timeout=120)
    assert done.returncode == 0, errors
    assert sorted(losses(run)) == list(range(1, 61))
    assert list(losses(run)) == list(range(1, 61)), "out of order"
    validations = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "val_loss" in line]
    assert len(validations) == 3
    assert sorted(path.name for path in (run / "claims").iterdir()) == ["0001", "0002", "0003"]
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_of_two_that_go_on_with_a_run_the_second_is_refused(work: Path) -> None:
    run = work / "run"
    first = start(work, *WORDS, pause=0.2)
    while not holder(run) and first.poll() is None:
        time.sleep(0.05)
    second = start(work, "resume", "run")
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 2
    assert errors.startswith(f"error: {run}: process ") and len(errors.splitlines()) == 1, errors
    assert "trains in this run directory; wait for it, or press Ctrl-C there" in errors
    first.send_signal(signal.SIGTERM)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 75, errors
    done = start(work, "resume", "run")
    _, errors = done.communicate(timeout=120)
    assert done.returncode == 0, errors
    assert list(losses(run)) == list(range(1, 61))


def test_a_job_that_is_requeued_again_and_again_ends(work: Path) -> None:
    done = start(work, *WORDS, "launcher.restarts=5")
    _, errors = done.communicate(timeout=120)
    assert done.returncode == 0, errors
    environment = os.environ | {
        "PYTHONPATH": str(Path(slurm_train.__file__).parents[1]),
        "SLURM_JOB_ID": "12",
        "SLURM_RESTART_COUNT": "6",
    }
    words = [sys.executable, "-m", "slurm_train", "resume", "run", "launcher.name=inline", "train.max_steps=70"]
    words += ["launcher.tasks_per_node=1", "parallel=single"]
    again = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True, timeout=120)
    told = "error: launcher.restarts=5: Slurm has requeued this job 6 times; see why, and resume the run\n"
    assert (again.returncode, again.stderr) == (2, told)
