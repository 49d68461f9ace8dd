"""The verb logs: files as they grow, with Slurm's words given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_train.cli import main
from slurm_train.launch import logfiles
from slurm_train.launch import logs as module
from slurm_train.launch.logfiles import Log
from slurm_train.report.rundir import RunDirectory
from tests.unit.launch.fake_slurm import FakeSlurm, install

Output = pytest.CaptureFixture[str]

SHOWN = """\
JobId=8 JobName=fmnist
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}:0
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Slurm, and an empty working directory."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return install(tmp_path, monkeypatch)


@pytest.fixture
def run(slurm: FakeSlurm) -> RunDirectory:
    """A run of job 7 with two ranks."""
    run = RunDirectory.create("runs/x/a", "seed: 0\n", json.dumps({"launcher": "slurm"}))
    run.append_event("submitted", launcher="slurm", job="7", verb="train")
    return run


def write(run: RunDirectory, name: str, data: bytes) -> None:
    with (run.logs / name).open("ab") as file:
        file.write(data)


@pytest.fixture
def later(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Does things beside a follower, each when it has asked Slurm twice since the one before; it looks often."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "EVENT_SECONDS", 0.01)
    monkeypatch.setattr(module, "SLURM_SECONDS", 0.05)
    threads: list[threading.Thread] = []

    def begin(*actions: Callable[[], object]) -> None:
        def work() -> None:
            for action in actions:
                asked, deadline = slurm.names.count("squeue"), time.monotonic() + 60
                while slurm.names.count("squeue") < asked + 2 and time.monotonic() < deadline:
                    time.sleep(0.01)
                action()

        threads.append(threading.Thread(target=work))
        threads[0].start()

    yield begin
    for thread in threads:
        thread.join()


def test_each_line_has_its_rank_in_front(run: RunDirectory, capsys: Output) -> None:
    write(run, "7_0_log.out", b"submitit INFO (2026) - Starting\nhello\n\nlast without end")
    write(run, "7_10_log.out", b"ten\n")
    write(run, "7_2_log.err", b"a\xff b\r\n 10%\r 20%\r 30%\n")
    write(run, "7_2_log.out", b"two\n")
    write(run, "7_batch.log", b"module loaded\n")
    write(run, "71_0_log.out", b"of another job\n")
    write(run, "7_0_result.pkl", b"x")
    assert main(["logs", "a"]) == 0
    assert capsys.readouterr().out == (
        "batch: module loaded\n0: hello\n0: \n0: last without end\n2: two\n2: a\ufffd b\n2:  30%\n10: ten\n"
    )
    assert main(["logs", "a", "--rank", "2"]) == 0
    assert capsys.readouterr().out == "two\na\ufffd b\n 30%\n"
    assert main(["logs", "a", "-n", "1"]) == 0
    assert capsys.readouterr().out == "batch: module loaded\n0: last without end\n2: two\n2:  30%\n10: ten\n"


def test_the_newest_job_is_shown_and_another_when_asked_for(run: RunDirectory, capsys: Output) -> None:
    write(run, "7_0_log.out", b"first\n")
    run.append_event("submitted", launcher="slurm", job="8", verb="train")
    assert main(["logs", "a"]) == 2
    assert capsys.readouterr().err == f"error: {run.path} has no log of its ranks in job 8; --follow waits for it\n"
    write(run, "8_0_log.out", b"second\n")
    assert main(["logs", "a"]) == 0 and main(["logs", "a", "--job", "7"]) == 0
    assert capsys.readouterr().out == "0: second\n0: first\n"
    assert main(["logs", "a", "--job", "9"]) == 2
    assert capsys.readouterr().err == f"error: --job 9: {run.path} has no such job; its jobs are 7, 8\n"
    assert main(["logs", "a", "--rank", "5"]) == 2
    assert "has no log of rank 5 in job 8" in capsys.readouterr().err


def test_a_run_by_hand_is_read_where_sbatch_puts_it(slurm: FakeSlurm, capsys: Output) -> None:
    run = RunDirectory.create("runs/x/job-7", "seed: 0\n", json.dumps({"launcher": "inline", "cwd": os.getcwd()}))
    assert main(["logs", "job-7"]) == 2
    assert capsys.readouterr().err == f"error: {run.path} was never started\n"
    run.append_event("started", job="7")
    assert main(["logs", "job-7"]) == 2
    assert (
        "was started by hand: what its ranks print is where it was started, or in the file that sbatch was told; "
        in (capsys.readouterr().err)
    )
    Path("slurm-7.out").write_text("0: as srun labels it\n")
    assert main(["logs", "job-7"]) == 0
    assert capsys.readouterr().out == "0: as srun labels it\n"


def test_following_goes_over_a_requeue_to_the_end_of_the_job(
    run: RunDirectory, slurm: FakeSlurm, capsys: Output, later: Callable[..., None]
) -> None:
    slurm.says("squeue", "7|PENDING||10:00|Resources|(null)\n")
    slurm.says("sacct", "7|COMPLETED|0:0|n1|\n")
    later(
        lambda: slurm.says("squeue", "7|PENDING||10:00|Priority|(null)\n"),
        lambda: slurm.says("squeue", "7|RUNNING|n1|9:00|None|(null)\n"),
        lambda: write(run, "7_0_log.out", b"one\ntw"),
        lambda: write(run, "7_0_log.out", b"o\n"),
        lambda: slurm.says("squeue", "7|PENDING||10:00|BeginTime|(null)\n"),
        lambda: write(run, "7_1_log.err", b"three\n"),
        lambda: write(run, "7_0_log.out", b"end"),
        lambda: slurm.says("squeue", error="slurm_load_jobs error: Invalid job id specified", code=1),
    )
    assert main(["logs", "-f", "a"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "waiting: PENDING (Resources)",
        "waiting: PENDING (Priority)",
        "0: one",
        "0: two",
        "waiting: PENDING (BeginTime)",
        "1: three",
        "0: end",
        "job 7 COMPLETED",
    ]


def test_following_goes_on_into_the_job_of_a_resume(
    run: RunDirectory, slurm: FakeSlurm, capsys: Output, later: Callable[..., None]
) -> None:
    write(run, "7_0_log.out", b"old\nfirst\n")
    slurm.says("squeue", "7|RUNNING|n1|9:00|None|(null)\n8|RUNNING|n1|9:00|None|(null)\n")
    slurm.says("scontrol", SHOWN.format(code=2))
    later(
        lambda: run.append_event("submitted", launcher="slurm", job="8", verb="train"),
        lambda: write(run, "8_0_log.out", b"second\n"),
        lambda: slurm.says("squeue", "7|FAILED|n1|9:00|None|(null)\n8|RUNNING|n1|9:00|None|(null)\n"),
        lambda: slurm.says("squeue", "7|FAILED|n1|9:00|None|(null)\n8|FAILED|n1|9:00|None|(null)\n"),
    )
    assert main(["logs", "7", "-f", "-n", "1"]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "0: first",
        "the run goes on in job 8",
        "0: second",
        "job 8 FAILED (exit code 2)",
    ]


def test_following_a_run_outlives_a_slurm_that_does_not_answer(
    run: RunDirectory, slurm: FakeSlurm, capsys: Output, later: Callable[..., None]
) -> None:
    slurm.says("squeue", error="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    slurm.says("scontrol", SHOWN.replace("Id=8", "Id=7").format(code=1).replace("FAILED", "NODE_FAIL"))
    later(
        lambda: write(run, "7_0_log.out", b"one\n"),
        lambda: slurm.says("squeue", "7|NODE_FAIL|n1|9:00|None|(null)\n"),
    )
    assert main(["logs", "7", "-f"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "waiting: slurm_load_jobs error: Unable to contact slurm controller",
        "0: one",
        "job 7 NODE_FAIL",
    ]


def test_ctrl_c_ends_the_following_alone(run: RunDirectory, slurm: FakeSlurm) -> None:
    slurm.says("squeue", "7|RUNNING|n1|9:00|None|(null)\n")
    slurm.says("scancel")
    write(run, "7_0_log.out", b"one\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "slurm_train", "logs", "-f", "7"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == "0: one\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.communicate(timeout=60) == ("", "")
        finally:
            process.kill()
    assert process.returncode == 130
    assert "scancel" not in slurm.names


@pytest.mark.parametrize(
    ("event", "code", "last"),
    [("done", 0, "run done"), ("stopped", 75, "run saved"), ("failed", 1, "run failed")],
)
def test_following_a_local_run_ends_with_it(slurm: FakeSlurm, capsys: Output, event: str, code: int, last: str) -> None:
    run = RunDirectory.create("runs/x/a", "seed: 0\n", json.dumps({"launcher": "local"}))
    run.append_event("submitted", launcher="local", verb="train")
    (run.logs / "55_submitted.pkl").touch()
    write(run, "55_0_log.out", b"one\n")
    run.append_event(event)
    assert main(["logs", "-f", "a"]) == code
    assert capsys.readouterr().out.splitlines() == ["0: one", last]
    assert slurm.calls == []


def test_a_file_is_read_in_blocks_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfiles, "BLOCK", 7)
    path = tmp_path / "log"
    log = Log(path, "")
    assert list(log.lines()) == []
    text = "".join(f"line {number}\n" for number in range(20))
    path.write_text(text + " 1%\r 2%\r")
    assert list(log.lines()) == text.splitlines()
    with path.open("a") as file:
        file.write("\n")
    assert list(log.lines()) == [" 2%"]
    path.write_text("anew\n")
    assert list(log.lines()) == ["anew"]


@pytest.mark.parametrize(("text", "count"), [("a\nb\nc\n", 2), ("a\nb\nc", 2), ("\n\n\n", 2), ("a\n", 5), ("a\n", 0)])
def test_the_last_lines_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, count: int) -> None:
    monkeypatch.setattr(logfiles, "BLOCK", 2)
    path = tmp_path / "log"
    path.write_text(text)
    log = Log(path, "")
    log.skip_to_last(count)
    lines = text.splitlines()
    assert list(log.lines(last=True)) == (lines[-count:] if count else [])
