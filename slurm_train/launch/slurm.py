"""The Slurm launcher: a run as one job, submitted by submitit with the script of the plan. Returns at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from slurm_train.errors import UserError
from slurm_train.launch.plan import LaunchPlan
from slurm_train.launch.refusal import UNCLEAR, refusal, unclear
from slurm_train.report.rundir import RunDirectory
from slurm_train.report.trust import private
from slurm_train.task import Task
from slurm_train.topology.jobs import scrub

SBATCH_SECONDS = 120
"""How long sbatch may take; it repeats its request for some time when the controller does not answer."""


class Executor(SlurmExecutor):
    """submitit's Slurm executor with the script that the plan has made.

    Args:
        plan: the run.
        logs: the log folder, already made.
        environment: what sbatch sees, and the job after it.

    Raises:
        UserError: this is no host of a cluster.
    """

    def __init__(self, plan: LaunchPlan, logs: Path, environment: Mapping[str, str]) -> None:
        for name in ("sbatch", "srun"):
            if shutil.which(name, path=environment.get("PATH")) is None:
                remedy = "submit on a login node of the cluster; the verb plan works without Slurm"
                raise UserError(f"there is no {name} on PATH", "launcher=slurm", remedy)
        super().__init__(logs)
        self._plan = plan
        self._environment = environment

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._plan.script

    def _num_tasks(self) -> int:
        return self._plan.world_size

    def _submit_command(self, command: str) -> SlurmJob[Any]:
        # Not submitit's own: the job must not see this process's ranks, and a refusal is told in Slurm's words.
        words = ["sbatch", "--parsable", *self._plan.sbatch_words]
        try:
            done = subprocess.run(
                words,
                input=self._plan.script,
                env=dict(self._environment),
                capture_output=True,
                text=True,
                timeout=SBATCH_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise unclear(f"sbatch did not answer within {SBATCH_SECONDS} s", self._plan.run_dir) from None
        if done.returncode and UNCLEAR.search(done.stderr):
            raise unclear(done.stderr, self._plan.run_dir)
        if done.returncode:
            raise refusal(done.stderr, self._plan.sbatch_keys)
        for line in filter(None, done.stderr.splitlines()):
            print(f"note: {line}", file=sys.stderr)
        job = done.stdout.strip().rpartition("\n")[2].partition(";")[0]
        if not job:
            raise unclear("sbatch named no job", self._plan.run_dir)
        return SlurmJob(folder=self.folder, job_id=job, tasks=list(range(self._plan.world_size)))


def submit(plan: LaunchPlan, directory: RunDirectory, task: Task, after: str = "") -> str:
    """Submit the job of a run and return its id.

    Args:
        plan: the run.
        directory: its run directory, already made.
        task: what each rank does.
        after: the job whose place it takes, if the run goes on by itself.

    Raises:
        UserError: Slurm refuses it, in its own words.
        StartError: it may have been accepted.
    """
    executor = Executor(plan, directory.logs, submission_environment(plan, os.environ))
    with private(directory.path):
        job = executor.submit(task)
    told = {"launcher": "slurm", "job": str(job.job_id), "world_size": plan.world_size, "verb": plan.verb}
    directory.append_event("submitted", **told, **({"after": after} if after else {}))
    return str(job.job_id)


def submission_environment(plan: LaunchPlan, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of sbatch: without the ranks of this process, and what would change the job unseen."""
    return {**scrub(env), **plan.sbatch_defaults}
