"""Talk to the Slurm cluster of the tests: run its commands, follow jobs, call cluster.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_train.launch.queue import ENDED

SCRIPT = Path(__file__).with_name("cluster.sh")
AS_ROOT = [] if os.geteuid() == 0 else ["sudo", "-n"]
REPO = SCRIPT.parents[2].resolve()


def slurm(*words: str, timeout: float = 60, cwd: Path | None = None) -> str:
    """Run a Slurm command and return what it printed, stripped; a failure's message becomes the test's."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(words)} exited {done.returncode}: {done.stderr.strip()}"
    return done.stdout.strip()


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Ask every 0.2 s until it is true; fail with `what` after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout:g} s: {what}"
        time.sleep(0.2)


def job_state(job: str) -> str:
    """The state of a job as slurmctld has it, or accounting's once it has forgotten the job; empty if neither knows it.

    Of several array tasks the first that did not complete counts.
    """
    done = subprocess.run(
        ["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"], capture_output=True, text=True, timeout=60
    )
    return worst(done.stdout.splitlines()) or accounted_state(job)


def accounted_state(job: str) -> str:
    """The state of a job as sacct has it; slurmctld hands new jobs on every 5 s. Empty without any."""
    return worst(slurm("sacct", "-n", "-X", "-P", "-j", job, "-o", "State").splitlines())


def worst(lines: list[str]) -> str:
    """The first state that is not COMPLETED; "CANCELLED by 0" is CANCELLED."""
    states = [line.split()[0] for line in lines if line.strip()]
    return next((state for state in states if state != "COMPLETED"), states[0] if states else "")


def wait_for_job(job: str, timeout: float = 60) -> str:
    """Wait until a job has ended for good and return its final state, as `COMPLETED`.

    A job that goes back into the queue is waited for. Fails after `timeout` seconds with what squeue says. sacct may
    know of the end some seconds later: `wait_for_accounting`.
    """
    return wait_for_end(job, job_state, timeout)


def wait_for_accounting(job: str, timeout: float = 30) -> str:
    """As `wait_for_job`, but until sacct tells the end of the job."""
    return wait_for_end(job, accounted_state, timeout)


def wait_for_end(job: str, ask: Callable[[str], str], timeout: float) -> str:
    """Ask for the job's state until it is final."""
    end = time.monotonic() + timeout
    while (state := ask(job)) not in ENDED:
        if time.monotonic() > end:
            queue = subprocess.run(
                ["squeue", "-t", "all", "-j", job], capture_output=True, text=True, timeout=60
            ).stdout
            pytest.fail(f"job {job} has not ended after {timeout:g} s but is {state or 'unknown'}\n{queue}")
        time.sleep(0.2)
    return state


@dataclass(frozen=True)
class Cluster:
    """The cluster that answers."""

    directory: Path | None
    """Where the project's own cluster lies; None for any other."""

    def call(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run `cluster.sh` as root on this cluster, as `call("cut", "n3")`; the caller checks the exit code."""
        return call_script(*words, timeout=timeout, CLUSTER_DIR=str(self.directory), CLUSTER_NUMBER=self.number)

    @property
    def number(self) -> str:
        """The CLUSTER_NUMBER of the project's own cluster."""
        assert self.directory is not None
        return marker(self.directory).read_text().strip()


def marker(directory: Path) -> Path:
    """The file by which cluster.sh knows a directory as its own."""
    return directory / ".slurm-train-cluster"


def may_be_root() -> bool:
    """Whether cluster.sh can be run from here: as root, or by sudo without a password."""
    if not AS_ROOT:
        return True
    return shutil.which("sudo") is not None and subprocess.run([*AS_ROOT, "true"], capture_output=True).returncode == 0


def call_script(*words: str, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `cluster.sh` as root with just these CLUSTER_* variables; the caller checks the exit code."""
    settings = [
        "env",
        "-u",
        "CLUSTER_DIR",
        "-u",
        "CLUSTER_NUMBER",
        *(f"{name}={value}" for name, value in variables.items()),
    ]
    command = [*AS_ROOT, *settings, "bash", str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)
