"""Which job this process belongs to, how often that was restarted, and what a job started from it must not inherit."""

from __future__ import annotations

from collections.abc import Mapping

INHERITED_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_", "TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_")
INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
KEPT = ("SLURM_CONF", "SLURM_TRAIN_TRACEBACK")


def run_identity(env: Mapping[str, str]) -> str | None:
    """A name for the run that is the same after a requeue or restart; None when no launcher gives one.

    job-123, job-120_4 for the fourth task of an array, or elastic-<id> for torchrun's run id, if it is not the job's.
    """
    elastic = env.get("TORCHELASTIC_RUN_ID", "")
    if elastic and elastic not in ("none", env.get("SLURM_JOB_ID")):
        return _safe(f"elastic-{elastic}")
    if "SLURM_PROCID" in env and (job := job_id(env)):  # a batch shell or a step, not a shell beside the job
        return _safe(f"job-{job}")
    return None


def job_id(env: Mapping[str, str]) -> str | None:
    """The id of the Slurm job around this process, as Slurm's commands take it: 123, or 120_4 in an array."""
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID") or None


def restart_count(env: Mapping[str, str]) -> int:
    """How often this job was restarted: by Slurm's requeue, or inside it by torchrun. 0 at first."""
    return sum(_count(env.get(name, "")) for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


def requeue_count(env: Mapping[str, str]) -> int:
    """How often Slurm has put this job back into the queue. 0 at first."""
    return _count(env.get("SLURM_RESTART_COUNT", ""))


def scrub(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without the ranks and job options of this process; SLURM_CONF, which names the cluster, stays."""
    return {
        name: value
        for name, value in env.items()
        if name in KEPT or not (name in INHERITED or name.startswith(INHERITED_PREFIXES))
    }


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _safe(name: str) -> str:
    """Usable as a directory name."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)[:100]
