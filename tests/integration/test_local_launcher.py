"""The local launcher with real ranks: how a run ends, and what is told of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurm_train

LOOPS = """
import os, signal, sys, time
from slurm_train.errors import UserError
from slurm_train.models.linear_regression import fit


def slow(context):
    def pause(*_):
        time.sleep(0.05)
    context.callbacks._hooks["on_step"].append(pause)
    context._hears_steps = True
    fit(context)


def killed(context):
    context.world.barrier()
    if context.world.info.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    slow(context)


def raises(context):
    print("a word of rank", context.world.info.rank, flush=True)
    context.world.barrier()
    if context.world.info.rank == 1:
        raise ValueError("the answer\\nis wrong")
    slow(context)


def leaves(context):
    context.world.barrier()
    if context.world.info.rank == 1:
        os._exit(3)
    slow(context)


def stuck(context):
    context.world.barrier()
    if context.world.info.rank == 1:
        raise ValueError("first")
    while True:
        try:
            time.sleep(100)
        except BaseException:
            pass


def fault(context):
    raise UserError("is no good", "train.loop.x", "take another")
"""
TWO_RANKS = ["+experiment=linear_regression", "launcher.tasks_per_node=2", "train.epochs=100"]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "loops.py").write_text(LOOPS)
    return tmp_path


def start(work: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(slurm_train.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-m", "slurm_train", *words],
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def loop(name: str) -> list[str]:
    return [*TWO_RANKS, f"train.loop._target_=loops.{name}", "run.dir=run"]


def processes(work: Path) -> list[int]:
    """The controller and the ranks of the run in `work`: whoever has its log folder on the command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(work / "run" / "logs").encode() in words:
            found.append(int(entry.parent.name))
    return found


def wait_until(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


@pytest.fixture
def running(work: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of two ranks that has made its first steps and would go on for long."""
    process = start(work, *loop("slow"))
    try:
        wait_until(lambda: (work / "run" / "metrics.jsonl").exists() or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()
        wait_until(lambda: not processes(work))


ENDS = {
    "killed": (1, "error: rank 1 on HOST was killed by SIGKILL"),
    "raises": (1, "error: rank 1 on HOST: ValueError: the answer is wrong (its log: "),
    "leaves": (1, "error: rank 1 on HOST ended with exit code 3"),
    "stuck": (1, "error: rank 1 on HOST: ValueError: first"),
    "fault": (2, "error: train.loop.x: is no good; take another"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_rank_that_fails_ends_all_and_is_named(work: Path, name: str) -> None:
    code, text = ENDS[name]
    process = start(work, *loop(name))
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert len(errors.splitlines()) == 1
    assert errors.startswith(text.replace("HOST", os.uname().nodename))
    assert processes(work) == []
    assert [word for word in output.splitlines() if "word of" in word] == ["a word of rank 0"] * (name == "raises")
    assert "submitit" not in output
    events = [json.loads(line)["event"] for line in (work / "run" / "events.jsonl").read_text().splitlines()]
    assert (events[0], events[-1]) == ("submitted", "failed")


def test_a_rank_killed_from_outside_is_named_within_seconds(work: Path, running: subprocess.Popen[str]) -> None:
    exits = [pid for pid in processes(work) if b"submitit.core._submit" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    rank_1 = next(pid for pid in exits if b"GLOBALID=1" in Path(f"/proc/{pid}/environ").read_bytes())
    began = time.monotonic()
    os.kill(rank_1, signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    assert time.monotonic() - began < 5.0
    assert running.returncode == 1
    assert errors.startswith(f"error: rank 1 on {os.uname().nodename} was killed by SIGKILL")


def test_an_interrupt_ends_all_ranks(work: Path, running: subprocess.Popen[str]) -> None:
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (130, "interrupted\n")
    assert processes(work) == []


def test_a_killed_command_leaves_no_ranks(work: Path, running: subprocess.Popen[str]) -> None:
    assert len(processes(work)) == 3
    running.kill()
    wait_until(lambda: not processes(work), seconds=10.0)


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is signalled on Linux")
def test_a_killed_controller_leaves_no_ranks(work: Path, running: subprocess.Popen[str]) -> None:
    for pid in processes(work):
        if b"local_controller" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors.count("\n")) == (1, 1)
    wait_until(lambda: not processes(work), seconds=10.0)


def test_a_run_asked_to_stop_saves_and_goes_on_where_it_was(work: Path, running: subprocess.Popen[str]) -> None:
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 75
    assert errors.startswith("stopped by SIGTERM, saved at step ")
    assert errors.rstrip().endswith(f"go on with: python -m slurm_train resume {work / 'run'}")
    step = int(errors.split("saved at step ")[1].split(";")[0])

    further = ["train.loop._target_=slurm_train.models.linear_regression.fit", f"train.max_steps={step + 3}"]
    again = start(work, "resume", "run", *further)
    output, errors = again.communicate(timeout=120)
    assert (again.returncode, errors) == (0, "")
    assert f"going on from step {step}" in output
    assert output.splitlines()[-2:] == ["run directory:", str(work / "run")]
    steps = [
        json.loads(line)["step"]
        for line in (work / "run" / "metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]
    assert steps == list(range(1, step + 4))

    config = (work / "run" / "config.yaml").read_text()
    for words, text in (
        (["resume", "run"], "is finished, there is nothing to do"),
        (["evaluate", "run", "launcher.tasks_per_node=1"], "test loss 0."),
    ):
        process = start(work, *words)
        output, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
        assert text in output
    assert (work / "run" / "config.yaml").read_text() == config


def test_odd_letters_in_the_run_directory(work: Path) -> None:
    words = ["+experiment=linear_regression", "train.epochs=1", "run.dir='odd $x é;\"&'"]
    process = start(work, *words)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert output.splitlines()[-1] == str(work / 'odd $x é;"&')


def test_a_sweep_runs_its_points_one_after_the_other(work: Path) -> None:
    process = start(
        work, "-m", "+experiment=linear_regression", "train.epochs=1", "optim.lr=0.1,0.01", "run.name=sweep"
    )
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    runs = sorted(path.name for path in (work / "runs" / "linear_regression").iterdir())
    assert runs == ["sweep_0", "sweep_1"]
    assert [line.split()[2] for line in output.splitlines()[-2:]] == ["optim.lr=0.1", "optim.lr=0.01"]
