"""A language model spread over the tasks of real Slurm jobs: shards and pipelines between nodes, tensors within one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cluster.test_launcher import FOUR, command, ended, events, submit
from tests.integration.runs import losses

SMALL = (
    *("+experiment=lm", "model.width=32", "model.heads=4", "model.depth=2", "data.length=32", "data.test=0.2"),
    *("data.path=text.txt", "train.batch_size=8", "train.validation=0", "train.schedule.warmup=5", "optim.lr=0.01"),
    *("train.epochs=20", "train.max_steps=60"),
)
LAYOUTS = {
    "fsdp_tp": ("parallel=fsdp_tp", "parallel.tp=2"),
    "pp_tp": ("parallel=pp_tp", "parallel.pp=2", "parallel.tp=2"),
}


@pytest.fixture(scope="module")
def place(shared_root: Path) -> Path:
    """Where the text lies; beside it the run of one process on this host."""
    work = shared_root / "lm"
    work.mkdir()
    (work / "text.txt").write_text("the cat sat on the mat and " * 400)
    done = command(*SMALL, "launcher=local", "run.dir=one", cwd=work)
    assert done.returncode == 0, done.stderr
    return work


def go_on(run: Path, place: Path) -> str:
    """What a run's model makes of a beginning, by its likeliest tokens."""
    options = ("--prompt", "the cat ", "--tokens", "12", "--temperature", "0")
    done = command("generate", str(run), "launcher=local", *options, cwd=place)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("the cat "))


def test_a_model_in_parts_over_nodes_is_that_of_one_process(place: Path) -> None:
    alone = losses(place / "one")
    jobs = {
        name: submit(*SMALL, *words, *FOUR, "launcher=slurm", f"run.dir={name}", cwd=place)
        for name, words in LAYOUTS.items()
    }
    for name, (job, run) in jobs.items():
        ended(job, run, timeout=150)
        found = losses(run)
        assert found.keys() == alone.keys() and len(found) == 60, name
        assert max(abs(found[step] / alone[step] - 1) for step in found) < 1e-4, name
        assert len(events(run, "done")[-1]["peak_memory"]) == 4, name
        logs = [(run / "logs" / f"{job}_{rank}_log.out").read_text() for rank in range(4)]
        first, second, third, fourth = (re.search(r"hostname=(\w+)", log).group(1) for log in logs)
        assert first == second != third == fourth, name
        assert go_on(run, place) == go_on(place / "one", place), name
        plan = json.loads((run / "plan.json").read_text())
        assert plan["grid"]["tp"] == 2, name
