"""Which launcher, how many ranks, and what they find in their environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from slurm_train.errors import RankError, UserError
from slurm_train.launch.children import importable
from slurm_train.topology.cpus import threads_per_rank
from slurm_train.topology.grid import AXES, required_ranks
from slurm_train.topology.jobs import scrub
from slurm_train.topology.ranks import RankInfo, ranks, require_world, started_as_rank


@dataclass(frozen=True)
class PlannedWorld:
    """The ranks of a run, before any is started."""

    launcher: str
    """local, inline or slurm."""

    reason: str
    """Why this launcher."""

    size: int
    """Number of ranks."""

    nodes: int
    tasks_per_node: int
    """Ranks per node; those of this rank's node, or the most of any, where the numbers differ."""

    hosts: tuple[str, ...]
    """Names of the nodes; empty if not known."""

    info: RankInfo | None
    """Which rank this process is; None under the local launcher."""


def plan_world(config: DictConfig, env: Mapping[str, str]) -> PlannedWorld:
    """Choose the launcher and count the ranks.

    Raises:
        RankError: the environment does not say which rank this is, or the launcher does not fit it.
        UserError: more nodes than the local launcher has.
    """
    asked = config.launcher.name
    if asked == "slurm":
        return _slurm(config, env)
    if asked == "inline" or (asked == "auto" and started_as_rank(env)):
        info = ranks(env)
        require_world(info, env)
        reason = "as asked" if asked == "inline" else f"started as one of several ranks, {_origin(info)}"
        return PlannedWorld(
            "inline", reason, info.world_size, info.nodes, info.local_world_size, tuple(info.hosts), info
        )
    if asked == "local" and started_as_rank(env):
        info = ranks(env)
        raise RankError(
            f"this process was started as rank {info.rank} of {info.world_size} ({_origin(info)}), "
            "each of which would start all ranks again",
            "launcher=local",
            "use launcher=inline, or leave it out",
        )
    reason = "as asked" if asked == "local" else "not started as one of several ranks"
    return _local(config, reason)


def _local(config: DictConfig, reason: str) -> PlannedWorld:
    launcher = config.launcher
    if launcher.nodes > 1:
        remedy = "set launcher.tasks_per_node for more ranks, or launcher=slurm to submit a job"
        raise UserError("the local launcher has one node", f"launcher.nodes={launcher.nodes}", remedy)
    if launcher.gpus_per_task:
        key = f"launcher.gpus_per_task={launcher.gpus_per_task}"
        raise UserError("local ranks all see the same GPUs", key, "set launcher.gpus_per_node")
    tasks = launcher.tasks_per_node or launcher.tasks or _required(config)
    return PlannedWorld("local", reason, tasks, 1, tasks, (os.uname().nodename,), None)


def _slurm(config: DictConfig, env: Mapping[str, str]) -> PlannedWorld:
    launcher, nodes = config.launcher, config.launcher.nodes
    if _one_of_several(env):
        remedy = "submit from one process: the shell of the job, or a step of one task"
        raise RankError("each rank of this step would submit a job", "launcher=slurm", remedy)
    if launcher.tasks:
        most = launcher.tasks_per_node or launcher.tasks
        if not nodes <= launcher.tasks <= nodes * most:
            at_most = f" with at most {most} ranks" if launcher.tasks_per_node else ""
            raise UserError(
                f"{nodes} node{'s' * (nodes > 1)}{at_most} cannot hold them, each with one at least",
                f"launcher.tasks={launcher.tasks}",
                f"use {nodes} to {nodes * most}" if launcher.tasks_per_node else f"use at least {nodes}",
            )
        return PlannedWorld("slurm", "as asked", launcher.tasks, nodes, most, (), None)
    tasks = launcher.tasks_per_node or launcher.gpus_per_node or -(-_required(config) // nodes)
    return PlannedWorld("slurm", "as asked", nodes * tasks, nodes, tasks, (), None)


def _required(config: DictConfig) -> int:
    """Ranks that the fixed axes of `parallel` need."""
    return required_ranks(*(config.parallel[axis] for axis in AXES))


def _one_of_several(env: Mapping[str, str]) -> bool:
    try:
        return ranks(env).world_size > 1
    except RankError:  # the batch shell of a job: it may submit another one
        return False


def _origin(info: RankInfo) -> str:
    """Where the rank was read from, such as "RANK=3"."""
    return info.provenance.get("rank", info.launcher)


def threads(config: DictConfig, env: Mapping[str, str], world: PlannedWorld) -> tuple[int, str]:
    """CPU threads of each rank, and where the number comes from.

    Raises:
        UserError: launcher.cpus_per_task is more than this host has.
    """
    if config.train.threads:
        return config.train.threads, "train.threads"
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = config.launcher.cpus_per_task
    if world.launcher == "slurm":
        if asked:
            return asked, "launcher.cpus_per_task"
        typed = {**env, **config.launcher.env}.get("OMP_NUM_THREADS", "")
        if typed.isdecimal() and int(typed):
            return int(typed), f"OMP_NUM_THREADS={typed}"
        return 1, "one CPU a task, unless the partition gives more"
    if asked and world.launcher == "local":
        if asked * world.tasks_per_node > affinity:
            raise UserError(
                f"{world.tasks_per_node} x {asked} CPUs are more than the {affinity} that this host has for the run",
                "launcher.cpus_per_task",
                f"at most {affinity // world.tasks_per_node}" if affinity >= world.tasks_per_node else "leave it out",
            )
        return asked, "launcher.cpus_per_task"
    seen = scrub(env) if world.launcher == "local" else env
    return threads_per_rank(seen, affinity=affinity, local_world_size=world.tasks_per_node)


def rank_environment(config: DictConfig, env: Mapping[str, str], world: PlannedWorld) -> dict[str, str]:
    """The variables that the local and the Slurm launcher set for the ranks; none under inline.

    Raises:
        UserError: more GPUs are asked for than are visible.
    """
    if world.launcher == "inline":
        return {}
    given = dict(config.launcher.env)
    if world.launcher == "slurm":
        path = importable({**env, **given}).get("PYTHONPATH", "")
        found = {**given, "PYTHONPATH": path} if path else given
        if config.launcher.cpus_per_task and not config.train.threads:
            # what the submitting shell says of its own threads is not meant for the ranks
            found.setdefault("OMP_NUM_THREADS", str(config.launcher.cpus_per_task))
        return found
    variables = {"PYTHONUNBUFFERED": "1"}
    loopback = sys.platform == "linux" and Path("/sys/class/net/lo").exists()
    if world.size > 1 and loopback and "GLOO_SOCKET_IFNAME" not in env:
        # All ranks are on this host, whose name need not resolve.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if config.launcher.cpus_per_task and not config.train.threads:
        variables["OMP_NUM_THREADS"] = str(config.launcher.cpus_per_task)
    if config.launcher.gpus_per_node is not None:
        variables["CUDA_VISIBLE_DEVICES"] = _devices(config.launcher.gpus_per_node, env.get("CUDA_VISIBLE_DEVICES"))
    return {**variables, **given}


def _devices(count: int, visible: str | None) -> str:
    """The first `count` of the visible GPUs."""
    if visible is None:
        return ",".join(map(str, range(count)))
    devices = [device for device in visible.split(",") if device.strip()]
    if count > len(devices):
        raise UserError(
            f"{count} are more than the {len(devices)} of CUDA_VISIBLE_DEVICES={visible}", "launcher.gpus_per_node"
        )
    return ",".join(devices[:count])
