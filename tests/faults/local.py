"""Runs on the ranks of this host that a fault hits: how they end, how they go on, and what they come to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

import slurm_train
from slurm_train.report.rundir import RunDirectory
from tests.faults.table import BITWISE, note
from tests.integration.runs import SAMPLE, losses, weights

STEPS = 40
RUN = (
    "+experiment=fmnist",
    SAMPLE,
    "model.width=16",
    "model.dropout=0.1",
    "train.batch_size=500",
    f"train.max_steps={STEPS}",
    "train.save_steps=6",
    "train.log_seconds=0.02",
    "train.threads=1",
    "+train.callbacks.faulty._target_=faulty.Faulty",
)
DDP = ("parallel=ddp", "launcher.tasks_per_node=2")


def start(
    work: Path, *words: str, fault: str = "", pause: float = 0.0, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """`python -m slurm_train` in a directory, with a fault to come."""
    shutil.copy(Path(__file__).with_name("faulty.py"), work)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(slurm_train.__file__).parents[1]),
        "PAUSE": str(pause),
        "FAULT_MARK": str(work / "mark"),
        **({"FAULT": fault} if fault else {}),
        **(env or {}),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "slurm_train", *words],
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    """Exit code and standard error of a process."""
    _, errors = process.communicate(timeout=seconds)
    return process.returncode, errors


def wait_for_step(run: Path, step: int) -> None:
    """Wait until a run has written down a step."""
    deadline = time.monotonic() + 90
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count('"loss"') < step:
        assert time.monotonic() < deadline, f"{run} does not come to step {step}"
        time.sleep(0.02)


@cache
def left_alone(layout: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The weights of a run to which nothing happens."""
    work = Path(mkdtemp(prefix="left-alone-"))
    try:
        code, errors = end(start(work, *RUN, *layout, "run.dir=run"))
        assert code == 0, errors
        return weights(work / "run")
    finally:
        shutil.rmtree(work)


def events(run: Path, name: str) -> list[dict[str, object]]:
    """The events of one kind of a run."""
    return [record for record in RunDirectory(run).events() if record["event"] == name]


def same(run: Path, layout: Sequence[str] = DDP) -> None:
    """A run that is done has done each step once, and has the very weights of one left alone."""
    assert list(losses(run)) == list(range(1, STEPS + 1))
    found, expected = weights(run), left_alone(tuple(layout))
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def goes_on(fault: str, work: Path, layout: Sequence[str] = DDP, reached: int = 0, lost: int = 6) -> None:
    """Resume a run that a fault has ended: it comes to the weights of one left alone, each step once. Notes the row.

    Args:
        fault: what has happened, for the table.
        work: where it runs, in run/.
        layout: the words that tell its layout.
        reached: the last step that is known to have been done.
        lost: how many steps may have to be done again.
    """
    run = work / "run"
    before = max([reached, *_steps(run)], default=0)
    since = time.time()
    code, errors = end(start(work, "resume", "run"))
    assert code == 0, errors
    same(run, layout)
    resumed = [int(str(event["step"])) for event in events(run, "resumed")]
    again = before - (resumed[-1] if resumed else 0)
    assert 0 <= again <= lost, f"{again} steps were done again"
    times = [record["time"] for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
    first = min((moment for moment in times if moment > since), default=None)
    note(fault, BITWISE, again, first and first - since)


def _steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]
