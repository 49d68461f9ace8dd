"""Slurm's refusal of a job, told in its own words with the key that caused it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurm_train.errors import StartError, UserError

# What Slurm says (slurm_errno and the option parser of sbatch, Slurm 22.05 to 24.05) and the options that may cause it.
_CAUSES = (
    (r"invalid partition", ("partition",)),
    (r"account or account/partition|invalid account", ("account", "partition")),
    (r"invalid qos|qos .*(permission|not permitted)", ("qos",)),
    (r"invalid feature|Invalid job constraint", ("constraint",)),
    (r"reservation", ("reservation",)),
    (r"time limit|invalid time", ("time",)),
    (r"node name", ("exclude", "nodelist")),
    (r"memory", ("mem", "mem-per-cpu", "mem-per-gpu")),
    (r"gres|TRES", ("gpus-per-node", "gpus-per-task", "gres", "gpus")),
    (r"node count|minimum required nodes", ("nodes",)),
    (r"more processors|cpu count|CPU", ("cpus-per-task", "ntasks-per-node", "ntasks")),
    (
        r"node configuration is not available",
        ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "gpus-per-task", "mem", "mem-per-cpu",
         "mem-per-gpu", "constraint"),
    ),
    (r"association|policy|limit", ("account", "qos", "partition", "time", "nodes")),
)  # fmt: skip

_LEAST = ("launcher.nodes=1", "launcher.tasks_per_node=1", "launcher.cpus_per_task=1")
_UNREACHABLE = r"unable to contact slurm controller|connection refused|could not establish"

UNCLEAR = re.compile(r"timed out|zero bytes", re.IGNORECASE)
"""What sbatch says when it does not know itself whether the job was accepted."""


def refusal(words: str, keys: Mapping[str, str]) -> UserError:
    """The error for what sbatch said.

    Args:
        words: its standard error.
        keys: option of the job -> the configuration's key and value that set it.
    """
    said = _said(words)
    if re.search(_UNREACHABLE, said, re.IGNORECASE):
        return UserError(said, "launcher=slurm", "is the cluster up? sinfo tells; nothing was submitted")
    unknown = re.search(r"option '--([\w-]+)|[Ii]nvalid .*--([\w-]+)", said)
    named = unknown and keys.get(unknown[1] or unknown[2])
    if named:
        return UserError(said, named)
    for pattern, options in _CAUSES:
        causes = [keys[option] for option in options if option in keys]
        if causes and re.search(pattern, said, re.IGNORECASE):
            # one node or one task is not what was too much, if anything else was asked for
            causes = [cause for cause in causes if cause not in _LEAST] or causes
            *others, last = causes
            return UserError(said, f"{', '.join(others)} or {last}" if others else last)
    return UserError(said, "launcher=slurm", "Slurm refuses the job")


def unclear(words: str, run_dir: str) -> StartError:
    """The error for a submission that may have come through: nothing of the run may be thrown away."""
    remedy = f"the job may be in the queue all the same: squeue --me tells; the run directory stays: {run_dir}"
    return StartError(_said(words), "launcher=slurm", remedy)


def _said(words: str) -> str:
    """Slurm's words in one line, without the name of the program in front of each."""
    lines = [re.sub(r"^sbatch: (error: )?", "", line).strip() for line in words.splitlines()]
    lines = [line for line in lines if line and not line.startswith("Try ")]
    return "; ".join(dict.fromkeys(lines)) or "sbatch failed and said nothing"
