"""Which attempt may write into a run directory, and who holds it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurm_train.errors import Superseded
from slurm_train.report.fence import claim, holder
from slurm_train.report.rundir import RunDirectory


def test_only_the_newest_attempt_passes(tmp_path: Path) -> None:
    first = claim(tmp_path, "12")
    first.check()
    second = claim(tmp_path, "13")
    second.check()
    with pytest.raises(Superseded, match=r"^process \d+ on \S+ \(job 13\) has gone on with this run"):
        first.check()


def test_each_claim_is_another_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        numbers = [fence.number for fence in pool.map(lambda _: claim(tmp_path), range(64))]
    assert sorted(numbers) == list(range(1, 65))


def test_what_is_superseded_writes_no_event_and_no_metric(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.fence = claim(tmp_path)
    run.append_event("saved")
    run.append_metrics([{"step": 1}])
    before = (run.event_file.read_text(), run.metrics.read_text())
    claim(tmp_path)
    with pytest.raises(Superseded):
        run.append_event("saved")
    with pytest.raises(Superseded):
        run.append_metrics([{"step": 2}])
    assert (run.event_file.read_text(), run.metrics.read_text()) == before


HOLD = """
import pathlib, sys, time
from slurm_train.report.fence import claim
with claim(pathlib.Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_holder_is_known_while_it_lives(tmp_path: Path) -> None:
    assert holder(tmp_path) == ""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert holder(tmp_path).startswith(f"process {process.pid} on ")
    finally:
        process.kill()
        process.communicate()
    assert holder(tmp_path) == ""


def test_one_that_has_left_holds_nothing(tmp_path: Path) -> None:
    with claim(tmp_path).held():
        pass
    assert holder(tmp_path) == ""
