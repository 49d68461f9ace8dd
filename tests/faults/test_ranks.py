"""Signals and deaths of the ranks of this host, at each phase of a run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from slurm_train.launch.runs import is_finished
from slurm_train.report.rundir import RunDirectory
from tests.faults.local import DDP, RUN, end, events, goes_on, left_alone, same, start, wait_for_step
from tests.faults.table import BITWISE, CLEAR, note

SIGNALS = {
    "SIGTERM to all ranks in a step": "step:14:-2:TERM",
    "SIGUSR2 to all ranks in a step": "step:14:-2:USR2",
    "SIGTERM to rank 1 alone": "step:14:1:TERM",
    "SIGTERM before the first step": "start:0:0:TERM",
    "SIGTERM while a checkpoint is written": "save:0:0:TERM",
    "SIGTERM at the end of an epoch": "epoch:0:1:TERM",
}
"""After which the ranks save, and no step is lost."""

KILLS = {
    "rank 0 killed (SIGKILL) in a step": "step:14:0:KILL",
    "rank 1 killed (SIGKILL) in a step": "step:14:1:KILL",
    "rank 1 crashes (SIGSEGV)": "step:14:1:SEGV",
    "rank 0 killed before the first step": "start:0:0:KILL",
    "rank 0 killed while a checkpoint is published": "save:0:0:KILL",
    "rank 1 killed while it writes its shards": "save:0:1:KILL",
    "rank 1 killed at the end of an epoch": "epoch:0:1:KILL",
    "rank 1 raises": "step:14:1:raise",
    "rank 1 ends early with exit code 0": "step:14:1:exit",
    "the controller of the ranks killed": "step:14:0:controller",
}
"""After which the run fails within seconds, and loses the steps since its last checkpoint."""

QUICK = {
    "SIGTERM to rank 1 alone",
    "SIGTERM while a checkpoint is written",
    "rank 0 killed (SIGKILL) in a step",
    "rank 1 killed while it writes its shards",
    "rank 1 raises",
}


def cases(faults: dict[str, str]) -> list[object]:
    """The faults; all but the quick ones are for the full matrix."""
    return [pytest.param(name, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name in faults]


@pytest.mark.parametrize("name", cases(SIGNALS))
def test_after_a_signal_nothing_is_lost(name: str, tmp_path: Path) -> None:
    code, errors = end(start(tmp_path, *RUN, *DDP, "run.dir=run", fault=SIGNALS[name]))
    assert code == 75, errors
    assert "saved at step" in errors and "go on with: python -m slurm_train resume" in errors
    goes_on(name, tmp_path, lost=0)


@pytest.mark.parametrize("name", cases(KILLS))
def test_after_a_death_the_steps_since_the_checkpoint_are_lost(name: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    code, errors = end(start(tmp_path, *RUN, *DDP, "run.dir=run", fault=KILLS[name]))
    assert code == 1, errors
    assert time.monotonic() - begin < 90
    assert len([line for line in errors.splitlines() if line.startswith("error: ")]) == 1, errors
    goes_on(name, tmp_path, reached=int(KILLS[name].split(":")[1]))


@pytest.mark.slow
def test_a_signal_after_the_last_step_changes_nothing(tmp_path: Path) -> None:
    code, errors = end(start(tmp_path, *RUN, *DDP, "run.dir=run", fault="end:0:0:TERM"))
    assert code in (0, 75), errors
    if code:
        goes_on("SIGTERM after the last step", tmp_path, lost=0)
    else:
        assert is_finished(RunDirectory(tmp_path / "run"))
        note("SIGTERM after the last step", BITWISE, 0)


@pytest.mark.slow
def test_the_command_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, *RUN, *DDP, "run.dir=run", pause=0.1)
    wait_for_step(tmp_path / "run", 10)
    process.kill()
    process.communicate()
    rank = int(str(events(tmp_path / "run", "started")[0]["pid"]))
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{rank}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{rank}"), "a rank outlives its command"
    goes_on("the command killed; its ranks save", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_is_told_to_stop(number: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, *RUN, *DDP, "run.dir=run", pause=0.1)
    wait_for_step(tmp_path / "run", 10)
    process.send_signal(number)
    code, errors = end(process)
    assert code == (75 if number == signal.SIGTERM else 130), errors
    goes_on(f"{number.name} to the command", tmp_path, lost=0 if number == signal.SIGTERM else 6)


LAYOUTS = {
    "fsdp": ("parallel=fsdp", "launcher.tasks_per_node=2"),
    "tp": ("parallel=tp", "launcher.tasks_per_node=2", "model.dropout=0"),
    "pp": ("parallel=pp", "launcher.tasks_per_node=2", "parallel.cuts=[head]", "model.dropout=0"),
    "4 ranks of ddp": ("parallel=ddp", "launcher.tasks_per_node=4"),
    "asynchronous saves": (*DDP, "train.async_save=true"),
    "micro-batches": (*DDP, "train.micro_batch=100"),
    "DataLoader workers": (*DDP, "train.workers=1"),
    "one process": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["step:15:0:KILL", "step:15:0:TERM"], ids=["killed", "told to stop"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_other_layouts(layout: str, fault: str, tmp_path: Path) -> None:
    words = LAYOUTS[layout]
    left_alone(words)
    code, errors = end(start(tmp_path, *RUN, *words, "run.dir=run", fault=fault))
    killed = fault.endswith("KILL")
    assert code == (1 if killed else 75), errors
    name = f"rank 0 {'killed' if killed else 'told to stop'}: {layout}"
    goes_on(name, tmp_path, words, lost=12 if killed else 0)


@pytest.mark.slow
def test_twice_in_a_row(tmp_path: Path) -> None:
    code, errors = end(start(tmp_path, *RUN, *DDP, "run.dir=run", fault="step:9:-2:TERM"))
    assert code == 75, errors
    (tmp_path / "mark").unlink()
    code, errors = end(start(tmp_path, "resume", "run", fault="step:27:1:KILL"))
    assert code == 1, errors
    goes_on("told to stop at step 9, and rank 1 killed at step 27", tmp_path)


def test_two_go_on_with_it_at_a_time(tmp_path: Path) -> None:
    first = start(tmp_path, *RUN, *DDP, "run.dir=run", pause=0.1)
    wait_for_step(tmp_path / "run", 3)
    code, errors = end(start(tmp_path, "resume", "run"))
    assert code == 2 and "trains in this run directory" in errors
    code, errors = end(first)
    assert code == 0, errors
    same(tmp_path / "run")
    note("two resumes at a time", f"{BITWISE}; the second is refused", 0)


def test_a_fault_that_comes_again_ends_clearly(tmp_path: Path) -> None:
    for _ in range(2):
        words = ["resume", "run"] if (tmp_path / "run").exists() else [*RUN, *DDP, "run.dir=run"]
        code, errors = end(start(tmp_path, *words, fault="step:14:-2:raise"))
        assert code == 1
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert "ValueError: a bad sample" in line
    note("an error at the same step in each start", CLEAR)
