"""The sbatch templates on a real cluster: as typed by hand, stopped, refused, and put back into the queue."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import slurm_train.data
from slurm_train.launch.script import Script, pattern
from tests.cluster.jobs import REPO, job_state, slurm, wait_for_job, wait_until
from tests.conftest import speaks_of_ranks

RUN = (
    "+experiment=fmnist",
    "parallel=ddp",
    f"data.root={Path(slurm_train.data.__file__).parent / 'sample'}",
    "train.batch_size=512",
    "train.log_seconds=0.2",
)
SHORT, ENDLESS = (*RUN, "train.max_steps=4"), (*RUN, "train.epochs=1000000")
SECONDS = 240
"""How long a job may take on a busy host; on an idle one it is below ten seconds."""


def submit(name: str, cwd: Path, *options: str, words: tuple[str, ...] = SHORT, **variables: str) -> str:
    """Submit a template as a user would in `cwd`; returns the job id."""
    environment = {name: value for name, value in os.environ.items() if not speaks_of_ranks(name)}
    environment |= {"PYTHON": sys.executable, "PYTHONPATH": str(REPO), **variables}
    typed = ["sbatch", "--parsable", "--time=10", *options, str(REPO / "sbatch_templates" / name), *words]
    done = subprocess.run(typed, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def log(job: str, cwd: Path) -> str:
    path = cwd / f"slurm-{job}.out"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def exit_code(job: str) -> str:
    """As slurmctld has it, `code:signal`; accounting hears of it some seconds later."""
    (found,) = re.findall(r"\bExitCode=(\S+)", slurm("scontrol", "show", "job", job))
    return str(found)


def run_directory(job: str, cwd: Path) -> Path:
    """The one run directory of a job, below the directory of its submission."""
    found = list((cwd / "runs").glob(f"*/*-{job}*"))
    assert len(found) == 1, f"{found}\n{log(job, cwd)}"
    return found[0]


def events(directory: Path) -> list[dict[str, Any]]:
    path = directory / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def names(directory: Path) -> list[str]:
    return [event["event"] for event in events(directory)]


def wait_for_event(job: str, cwd: Path, name: str, times: int = 1) -> Path:
    """Wait until a run has told of something so many times; returns its directory."""

    def told() -> bool:
        return any(names(path).count(name) >= times for path in (cwd / "runs").glob(f"*/*-{job}*"))

    wait_until(told, SECONDS, f"{times} times {name!r} by job {job}; it says:\n{log(job, cwd)}")
    return run_directory(job, cwd)


@pytest.fixture(scope="module")
def submitted(shared_root: Path) -> Mapping[str, tuple[str, Path]]:
    """Jobs that go on side by side while their tests wait for them: name -> id and directory of the submission."""
    odd = f"run.dir='{shared_root}/odd/$HOME, \"it\" = #1 50% grün'"
    jobs = {
        "uneven": ("srun.sbatch", ("-N4", "-n8"), SHORT, {}),
        "odd": ("srun.sbatch", ("-N2", "--ntasks-per-node=2"), (*SHORT, odd), {}),
        "torchrun": ("torchrun.sbatch", ("-N2", "--ntasks-per-node=2", "-c2"), SHORT, {}),
        "refused": ("torchrun.sbatch", ("-N2", "-n3"), SHORT, {}),
        "no python": ("srun.sbatch", (), SHORT, {"PYTHON": "/no/such/python"}),
        "wrong key": ("srun.sbatch", (), (*SHORT, "train.nonsense=1"), {}),
    }
    found = {}
    for name, (template, options, words, variables) in jobs.items():
        cwd = shared_root / name.replace(" ", "_")
        cwd.mkdir()
        found[name] = submit(template, cwd, *options, words=words, **variables), cwd
    return found


def test_uneven_tasks_train(submitted: Mapping[str, tuple[str, Path]]) -> None:
    job, cwd = submitted["uneven"]
    assert wait_for_job(job, SECONDS) == "COMPLETED", log(job, cwd)
    directory = run_directory(job, cwd)
    assert directory.name == f"job-{job}"
    plan = json.loads((directory / "plan.json").read_text())
    assert (plan["launcher"], plan["nodes"], plan["world_size"]) == ("inline", 4, 8)
    assert plan["tasks_per_node"] != 2
    assert "0: test accuracy" in log(job, cwd)


def test_typed_words_arrive(submitted: Mapping[str, tuple[str, Path]], shared_root: Path) -> None:
    job, cwd = submitted["odd"]
    assert wait_for_job(job, SECONDS) == "COMPLETED", log(job, cwd)
    directory = shared_root / "odd" / '$HOME, "it" = #1 50% grün'
    assert names(directory)[-1] == "done"
    (started,) = [event for event in events(directory) if event["event"] == "started"]
    assert (started["world_size"], started["job"]) == (4, job)
    printed = log(job, cwd)
    assert "\x1b" not in printed, "no terminal, no bar"
    assert f"0: {directory}\n" in printed


def test_torchrun_trains(submitted: Mapping[str, tuple[str, Path]]) -> None:
    job, cwd = submitted["torchrun"]
    assert wait_for_job(job, SECONDS) == "COMPLETED", log(job, cwd)
    directory = run_directory(job, cwd)
    (started,) = [event for event in events(directory) if event["event"] == "started"]
    assert (started["world_size"], started["threads"], started["job"]) == (4, 2, job)
    plan = json.loads((directory / "plan.json").read_text())
    assert (plan["nodes"], plan["tasks_per_node"]) == (2, 2)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("refused", "torchrun needs as many ranks on each node, not 2,1; use --ntasks-per-node instead of -n\n"),
        ("no python", "there is no /no/such/python on "),
        ("wrong key", "0: error: train.nonsense=1: unknown key"),
    ],
)
def test_a_mistake_ends_with_2(name: str, told: str, submitted: Mapping[str, tuple[str, Path]]) -> None:
    job, cwd = submitted[name]
    assert wait_for_job(job, SECONDS) == "FAILED", log(job, cwd)
    wait_until(lambda: exit_code(job) == "2:0", 15, f"exit code 2, but {exit_code(job)}\n{log(job, cwd)}")
    assert told in log(job, cwd)


@pytest.mark.parametrize("template", ["srun.sbatch", "torchrun.sbatch"])
def test_a_warned_job_saves_and_goes_back_into_the_queue(template: str, shared_tmp: Path) -> None:
    job = submit(template, shared_tmp, words=ENDLESS)
    wait_for_event(job, shared_tmp, "started")
    slurm("scancel", "--signal=USR2", job)  # to all steps, as --signal does before the time limit
    directory = wait_for_event(job, shared_tmp, "requeued")
    saved, stopped, requeued = events(directory)[-3:]
    assert (saved["event"], stopped["event"], stopped["reason"]) == ("saved", "stopped", "SIGUSR2")
    assert (Path(saved["path"]) / "manifest.json").exists()
    assert (requeued["why"], requeued["step"]) == ("near its time limit", stopped["step"])
    wait_until(lambda: job_state(job) == "PENDING", 60, f"the requeue\n{log(job, shared_tmp)}")
    assert f"stopped by SIGUSR2, saved at step {stopped['step']}" in log(job, shared_tmp)


@pytest.mark.parametrize("gpus", ["--gpus-per-node=2", "--gpus-per-task=1", "--gres=gpu:2"])
def test_torchrun_has_all_gpus_of_its_node(gpus: str, shared_tmp: Path) -> None:
    python = shared_tmp / "python"
    python.write_text('#!/bin/sh\necho "sees $CUDA_VISIBLE_DEVICES"\n')
    python.chmod(0o755)
    try:
        job = submit("torchrun.sbatch", shared_tmp, "-N2", "--ntasks-per-node=2", gpus, PYTHON=str(python))
    except AssertionError as refused:
        pytest.skip(f"no two nodes with two GPUs here: {refused}")
    assert wait_for_job(job, SECONDS) == "COMPLETED", log(job, shared_tmp)
    assert sorted(log(job, shared_tmp).splitlines()) == ["0: sees 0,1", "1: sees 0,1"]


def test_a_requeued_job_goes_on_in_its_directory(shared_tmp: Path) -> None:
    job = submit("srun.sbatch", shared_tmp, words=ENDLESS)
    directory = wait_for_event(job, shared_tmp, "saved")
    again = [sys.executable, "-m", "slurm_train", "resume", str(directory)]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    second = subprocess.run(again, cwd=shared_tmp, env=environment, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2 and f"job {job} of this run is RUNNING" in second.stderr
    slurm("scontrol", "requeue", job)

    def restarted() -> bool:  # a requeued job waits two minutes if nobody says otherwise
        subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], capture_output=True, timeout=60)
        return names(directory).count("started") == 2

    wait_until(restarted, SECONDS, f"a second start; job {job} says:\n{log(job, shared_tmp)}")
    assert run_directory(job, shared_tmp) == directory
    first, second = [event for event in events(directory) if event["event"] == "started"]
    assert (first["resumed"], second["resumed"], second["job"]) == (False, True, job)
    assert second["step"] > first["step"] == 0
    printed = log(job, shared_tmp)
    assert printed.count("2 ranks on cpu") == 2, "the log of the first start is still there"
    assert f"going on from step {second['step']:,}" in printed


def test_sbatch_reads_the_options_of_a_script(shared_tmp: Path) -> None:
    odd = shared_tmp / 'it\'s "50%" a=b,c #1 $HOME grün'
    odd.mkdir()
    comment = 'it\'s "so" #1 \\ 50% = $5 `y`'
    options = {"time": "1", "chdir": str(odd), "output": f"{pattern(str(odd))}/%j.log", "comment": comment}
    command = 'pwd; echo "$SLURM_JOB_NAME"; squeue -h -j "$SLURM_JOB_ID" -o %k'
    script = Script(command, options={"job-name": "my #1 'job'", **options})
    done = subprocess.run(["sbatch", "--parsable"], input=script.text, capture_output=True, text=True, timeout=60)
    job = done.stdout.strip()
    assert job, done.stderr
    assert wait_for_job(job) == "COMPLETED"
    assert (odd / f"{job}.log").read_text(encoding="utf-8").splitlines() == [str(odd), "my #1 'job'", comment]
