"""After a preflight that has failed: the job goes back into the queue without the nodes at fault, once, or it ends.

    exec python -m slurm_train.launch.exclude RUN "$0"

It must be the batch shell's own process: a requeue has Slurm end the shell at once (SIGTERM, and SIGKILL after
KillWait), and with it what the shell has started. The list of excluded nodes can be set only after the requeue, while
the job is pending (manual of scontrol); a requeued job waits in the queue long enough for that.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from slurm_train.errors import EXIT_FAILURE, SlurmTrainError, UserError
from slurm_train.launch import queue
from slurm_train.launch.script import quote
from slurm_train.report.preflight import Report, reports
from slurm_train.report.rundir import RunDirectory
from slurm_train.topology.hostlist import compress, expand
from slurm_train.topology.jobs import job_id

TRIES = 10
"""How often Slurm is asked, half a second apart, to note the nodes: at first the job may not be pending yet."""


def leave_out(run: RunDirectory, job: str, script: str) -> None:
    """Requeue a job without the nodes that its newest preflight has found at fault, or say why it ends.

    Args:
        run: the run.
        job: its job, whose batch shell this process is.
        script: the script of the job.
    """
    known = reports(run, job)
    if not known or not known[-1].fault:
        _end(run, job, "the preflight has left no word on the nodes")
        return
    newest = known[-1]
    try:
        why, listed = _why_not(known), _listed(job, newest)
        why = why or _refusal(job, script, listed)
    except SlurmTrainError as error:
        why = f"the job ends, for Slurm does not tell about it: {error}"
    if why:
        _end(run, job, f"{newest.fault}; {why}")
        return
    replace(newest, excluded=True).save(run)  # first, for this process ends with the requeue
    told = f"{newest.fault}; job {job} goes back into the queue without {compress(newest.failing)}"
    run.append_event("preflight", job=job, fault=told, excluded=list(newest.failing))
    _say(told)
    try:
        _requeue(job, listed)
    except SlurmTrainError as error:
        _end(run, job, f"{newest.fault}; the job cannot be requeued without it: {error}")


def _why_not(known: Sequence[Report]) -> str:
    """Why no node is left out; "" if some are."""
    if before := next((report for report in known if report.excluded), None):
        return f"the job ends, for it was requeued once already, without {compress(before.failing)}"
    return "" if known[-1].failing else "the job ends"


def _listed(job: str, newest: Report) -> str:
    """All nodes that the job is not to run on: the user's own, and those at fault; "" for none."""
    before = queue.excluded(job)
    names = dict.fromkeys([*(expand(before) if before else ()), *newest.failing])
    return compress(names) if names else ""


def _refusal(job: str, script: str, listed: str) -> str:
    """Why the job cannot go on without the nodes; "" if it can."""
    if not queue.standing(job).requeue:
        return f"the job ends, for it may not be requeued; resume the run with launcher.exclude={quote(listed)}"
    try:
        queue.check_startable(script, listed)
    except UserError as error:
        return f"the job ends, for without it there are too few nodes ({error})"
    return ""


def _requeue(job: str, listed: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    queue.requeue(job)
    for left in reversed(range(TRIES)):
        try:
            queue.exclude(job, listed)
            return
        except UserError:
            if not left:
                raise
            time.sleep(0.5)


def _end(run: RunDirectory, job: str, fault: str) -> None:
    run.append_event("preflight", job=job, fault=fault)
    _say(fault)


def _say(text: str) -> None:
    print(f"slurm_train: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """The batch shell's last word; returns the exit code of a job that ends: 1."""
    run, script = RunDirectory(arguments[0]), arguments[1]
    try:
        leave_out(run, job_id(os.environ) or "", script)
    except (SlurmTrainError, OSError) as error:
        _say(f"preflight: {error}")
    return EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
