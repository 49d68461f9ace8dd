"""The typed `launcher` part of a configuration; see slurm_train.config.schema for the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LauncherConfig:
    """How the ranks of a run are started, and what a Slurm job of them asks for (Slurm manual, sbatch)."""

    name: str = "auto"
    """auto (be this rank when started as one of several, else local), local (start the ranks on this host), inline (be
    this rank), slurm (submit a job)."""

    nodes: int = 1
    """Number of nodes (hosts). The local launcher has one."""

    tasks_per_node: int | None = None
    """Ranks per node. Default: what the fixed axes of `parallel` need, else 1; under Slurm one a GPU where
    gpus_per_node is given."""

    tasks: int | None = None
    """Slurm: ranks in all, where Slurm may give the nodes different numbers of them; tasks_per_node is then the most
    that one node takes."""

    cpus_per_task: int | None = None
    """CPUs per rank. Default: the CPUs of the host divided among its ranks; under Slurm what the partition gives,
    usually 1."""

    gpus_per_node: int | None = None
    """GPUs per node, visible to all ranks of the node. Default under the local launcher: all that are visible; under
    Slurm: none."""

    gpus_per_task: int | None = None
    """Slurm: GPUs per rank; each rank sees its own alone, as device 0."""

    gpu_type: str | None = None
    """Slurm: type of the GPUs as the cluster names it, such as a100 or 1g.10gb. Default: any."""

    mem: str | None = None
    """Slurm: memory per node: a number with K, M, G or T (2.5GB is fine); without a unit it is megabytes; 0 for all of
    the node. Default: the cluster's. Give one of mem, mem_per_cpu and mem_per_gpu."""

    mem_per_cpu: str | None = None
    """Slurm: memory per CPU, in the same form."""

    mem_per_gpu: str | None = None
    """Slurm: memory per GPU, in the same form."""

    time: str | None = None
    """Time limit: minutes, or Slurm's MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS. Default: none under the local
    launcher, the partition's under Slurm."""

    signal_seconds: int = 90
    """Slurm: how many seconds before the time limit the ranks are told to save (SIGUSR2). Slurm may send it up to a
    minute earlier."""

    restarts: int = 100
    """Slurm: how often a run starts again by itself until the user starts it anew: near its time limit, after a
    preemption, or after a failure, unless it fails a second time from the same checkpoint. 0: never."""

    preflight: bool = False
    """Slurm: try every node before the ranks start on it: torch, devices, memory, the run directory, clock and network.
    A node that fails is named, and the job goes back into the queue without it, once; after that it ends."""

    partition: str | None = None
    """Slurm: partition, or several with commas between. Default: the cluster's."""

    account: str | None = None
    """Slurm: account that is charged. Default: the user's."""

    qos: str | None = None
    """Slurm: quality of service. Default: the account's."""

    constraint: str | None = None
    """Slurm: features that the nodes must have, such as 'a100&ib'."""

    exclude: str | None = None
    """Slurm: nodes not to use, such as n[3-4]."""

    reservation: str | None = None
    """Slurm: reservation to run in."""

    sbatch: dict[str, Any] = field(default_factory=dict)
    """Slurm: any other option of sbatch by its long name: {gpu-bind: closest, exclusive: true}. true for an option
    without a value; false leaves it out."""

    setup: list[str] = field(default_factory=list)
    """Slurm: shell lines before the ranks start, on the first node, such as 'module load cuda'. A line that fails ends
    the job."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the ranks, under local and Slurm. Where node names resolve to another network than the
    ranks should use: {NCCL_SOCKET_IFNAME: ib0, GLOO_SOCKET_IFNAME: ib0}."""
