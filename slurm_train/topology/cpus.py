"""How many CPU threads a rank may use without taking another rank's."""

from __future__ import annotations

from collections.abc import Mapping


def threads_per_rank(env: Mapping[str, str], *, affinity: int, local_world_size: int) -> tuple[int, str]:
    """Threads for this rank, and where the number comes from.

    OMP_NUM_THREADS wins when it is a positive number. SLURM_CPUS_PER_TASK is what a task was given, and usually what
    its affinity mask holds; where the mask is the whole node's, it still bounds the threads. Otherwise the CPUs of the
    mask, or those that the step has on this node if they are fewer (SLURM_CPUS_ON_NODE), are divided among the ranks of
    the host.

    Args:
        env: the environment.
        affinity: number of CPUs that this process may run on.
        local_world_size: ranks on this host.
    """
    asked = _positive(env.get("OMP_NUM_THREADS", ""))
    if asked:
        return asked, f"OMP_NUM_THREADS={asked}"
    per_task = _positive(env.get("SLURM_CPUS_PER_TASK", "")) if "SLURM_STEP_ID" in env else 0
    if per_task and env.get("SUBMITIT_EXECUTOR") != "local" and "LOCAL_RANK" not in env:
        return max(1, min(per_task, affinity)), f"SLURM_CPUS_PER_TASK={per_task}"
    on_node = _positive(env.get("SLURM_CPUS_ON_NODE", "")) if "SLURM_STEP_ID" in env else 0
    cpus = min(affinity, on_node or affinity)
    return max(1, cpus // max(1, local_world_size)), f"{cpus} CPUs / {local_world_size} ranks of the host"


def _positive(text: str) -> int:
    """The number, or 0 if the text is none."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0
