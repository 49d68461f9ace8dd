"""From a process's environment to its rank: one pure, total function.

It is decided once which launcher's variables count, never one variable at a time: under torchrun inside Slurm every
worker also has a SLURM_PROCID, that of its agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from slurm_train.errors import RankError
from slurm_train.topology.hostlist import expand, expand_counts

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
LARGEST_WORLD = 10_000_000

_T = TypeVar("_T")


@dataclass(frozen=True)
class RankInfo:
    """Who this process is among the ranks of a run."""

    rank: int
    """Global rank, from 0."""

    local_rank: int
    """Rank among those on this node, from 0."""

    world_size: int
    """Number of ranks."""

    local_world_size: int
    """Number of ranks on this node; nodes may differ."""

    node_rank: int
    """Which node this is, from 0."""

    nodes: int
    """Number of nodes."""

    hosts: tuple[str, ...]
    """Names of the nodes in the order of their node ranks; empty if unknown."""

    launcher: str
    """Whose variables counted: torchrun, pytorchjob, local, slurm, kubernetes, or single."""

    provenance: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Field -> the variable and value that it was read from; no part of what the rank is."""


SINGLE = RankInfo(0, 0, 1, 1, 0, 1, (), "single", {"world_size": "no launcher's variables are set"})


def ranks(env: Mapping[str, str]) -> RankInfo:
    """The rank that an environment names.

    In this order: torchrun's full set; a Kubeflow PyTorchJob's RANK and WORLD_SIZE; submitit's local executor, since
    it may run inside a Slurm step; a Slurm step; a Kubernetes indexed Job; one process.

    Raises:
        RankError: the variables of the launcher that counts are incomplete, malformed, or contradict each other.
    """
    return _checked(_read(env))


def started_as_rank(env: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one rank of several (torchrun: also as the only one).

    A Slurm step of one task counts as a shell on the node (`srun --pty bash`), from which ranks may be started.

    Raises:
        RankError: see `ranks`.
    """
    info = ranks(env)
    return info.launcher in ("torchrun", "pytorchjob", "local") or info.world_size > 1


def require_world(info: RankInfo, env: Mapping[str, str]) -> None:
    """Refuse to be a world of one where a Slurm step started this process together with others.

    An elastic torchrun that lost all other nodes goes on alone: it has restarted. A submitit executor on this host is
    a world of its own on purpose.

    Raises:
        RankError: each of the step's tasks would train the whole model by itself.
    """
    tasks = _whole(env.get("SLURM_STEP_NUM_TASKS", "")) if _in_step(env) else 0
    left_alone = info.launcher == "torchrun" and _whole(env.get("TORCHELASTIC_RESTART_COUNT", "")) > 0
    if info.world_size == 1 and tasks > 1 and info.launcher != "local" and not left_alone:
        by_torchrun = info.launcher == "torchrun"
        join = "give torchrun --nnodes and --rdzv-endpoint" if by_torchrun else "let srun give the ranks"
        raise RankError(
            f"this is one of {tasks} tasks of a Slurm step, but would be a run of its own "
            f"({info.provenance.get('world_size', 'world size 1')})",
            "SLURM_STEP_NUM_TASKS",
            f"{join}, or start a single task",
        )


def _read(env: Mapping[str, str]) -> RankInfo:
    if env.get("JOB_COMPLETION_INDEX") and env.get("SLURM_TRAIN_WORLD_SIZE") and "RANK" not in env:
        return _kubernetes(env)
    if any(name in env for name in TORCHRUN):
        return _torchrun(env)
    if env.get("SUBMITIT_EXECUTOR") == "local":
        return _local(env)
    if _in_step(env):
        return _step(env)
    if "SLURM_PROCID" in env:
        _refuse_batch_shell(env)
    return SINGLE


def _in_step(env: Mapping[str, str]) -> bool:
    """Whether this is a task of a Slurm step.

    A job submitted from inside a step inherits that step's variables in its batch shell, but runs on nodes of its own;
    SLURMD_NODENAME always names the node that this process is on.
    """
    if "SLURM_STEP_NUM_TASKS" not in env or "SLURM_STEP_NODELIST" not in env:
        return False
    hosts = _Reader(env).expanded("hosts", "SLURM_STEP_NODELIST", expand)
    node = _whole(env.get("SLURM_NODEID", ""))
    return node >= len(hosts) or env.get("SLURMD_NODENAME", hosts[node]) == hosts[node]


def _torchrun(env: Mapping[str, str]) -> RankInfo:
    missing = [name for name in (*TORCHRUN, *ADDRESS) if name not in env]
    if missing and not ("RANK" in env and "WORLD_SIZE" in env and set(missing) == {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}):
        present = ", ".join(name for name in TORCHRUN if name in env)
        raise RankError(
            f"{present} set, but {', '.join(missing)} not",
            missing[0],
            "start with torchrun, which sets them all, or unset them",
        )
    read = _Reader(env)
    world, rank = read.count("world_size", "WORLD_SIZE", least=1), read.count("rank", "RANK")
    if missing:  # one process a pod
        return RankInfo(rank, 0, world, 1, rank, world, (), "pytorchjob", read.provenance)
    local_world = read.count("local_world_size", "LOCAL_WORLD_SIZE", least=1)
    local = read.count("local_rank", "LOCAL_RANK")
    if "GROUP_RANK" in env and "GROUP_WORLD_SIZE" in env:
        node, nodes = read.count("node_rank", "GROUP_RANK"), read.count("nodes", "GROUP_WORLD_SIZE", least=1)
    else:
        node, nodes = rank // local_world, -(-world // local_world)
    return RankInfo(rank, local, world, local_world, node, nodes, (), "torchrun", read.provenance)


def _local(env: Mapping[str, str]) -> RankInfo:
    read = _Reader(env)
    world = read.count("world_size", "SUBMITIT_LOCAL_NTASKS", least=1)
    rank = read.count("rank", "SUBMITIT_LOCAL_GLOBALID")
    local = read.count("local_rank", "SUBMITIT_LOCAL_LOCALID")
    return RankInfo(rank, local, world, world, 0, 1, ("127.0.0.1",), "local", read.provenance)


def _step(env: Mapping[str, str]) -> RankInfo:
    read = _Reader(env)
    world = read.count("world_size", "SLURM_STEP_NUM_TASKS", least=1)
    rank, local = read.count("rank", "SLURM_PROCID"), read.count("local_rank", "SLURM_LOCALID")
    node = read.count("node_rank", "SLURM_NODEID")
    hosts = tuple(read.expanded("hosts", "SLURM_STEP_NODELIST", expand))
    tasks = read.expanded("local_world_size", "SLURM_STEP_TASKS_PER_NODE", expand_counts)
    if len(tasks) != len(hosts):
        raise RankError(
            f"{len(tasks)} task counts for {len(hosts)} nodes", "SLURM_STEP_TASKS_PER_NODE", "start the step with srun"
        )
    if sum(tasks) != world:
        raise RankError(
            f"its counts sum to {sum(tasks)}, but SLURM_STEP_NUM_TASKS={world}",
            "SLURM_STEP_TASKS_PER_NODE",
            "start the step with srun",
        )
    if node >= len(hosts):
        raise RankError(f"SLURM_NODEID={node}, but the step has {len(hosts)} nodes", "SLURM_NODEID")
    return RankInfo(rank, local, world, tasks[node], node, len(hosts), hosts, "slurm", read.provenance)


def _kubernetes(env: Mapping[str, str]) -> RankInfo:
    read = _Reader(env)
    world = read.count("world_size", "SLURM_TRAIN_WORLD_SIZE", least=1)
    rank = read.count("rank", "JOB_COMPLETION_INDEX")
    hosts = tuple(read.expanded("hosts", "SLURM_TRAIN_HOSTS", expand)) if env.get("SLURM_TRAIN_HOSTS") else ()
    if hosts and len(hosts) != world:
        raise RankError(f"names {len(hosts)} hosts, but SLURM_TRAIN_WORLD_SIZE={world}", "SLURM_TRAIN_HOSTS")
    return RankInfo(rank, 0, world, 1, rank, world, hosts, "kubernetes", read.provenance)


def _refuse_batch_shell(env: Mapping[str, str]) -> None:
    """The batch shell looks like rank 0 of all tasks; only a step's tasks are ranks.

    A shell that merely lies inside an allocation (ssh, an IDE, salloc) has no SLURM_PROCID and is one process.
    """
    groups = [_whole(text) for name, text in env.items() if name.startswith("SLURM_NTASKS_HET_GROUP_")]
    tasks = sum(groups) or _whole(env.get("SLURM_NTASKS", ""))
    # Without --ntasks, SLURM_TASKS_PER_NODE only says what would fit; srun starts at least one task a node.
    per_node = max(1, _whole(env.get("SLURM_NTASKS_PER_NODE", "")))
    tasks = tasks or per_node * _whole(env.get("SLURM_JOB_NUM_NODES", ""))
    if tasks > 1:
        raise RankError(
            f"this is the batch shell of a job of {tasks} tasks, not one of its ranks",
            "SLURM_NTASKS",
            "start it with srun: srun python -m slurm_train ...",
        )


def _whole(text: str) -> int:
    """The small whole number in a text; 0 if there is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 8 else 0


def _checked(info: RankInfo) -> RankInfo:
    """The pairs that must agree, whoever set them."""
    if info.world_size > LARGEST_WORLD:
        raise RankError(f"a world of {info.world_size} ranks", _source(info, "world_size"))
    for name, value, bound, of in (
        ("rank", info.rank, info.world_size, "world size"),
        ("local_rank", info.local_rank, info.local_world_size, "local world size"),
        ("node_rank", info.node_rank, info.nodes, "number of nodes"),
    ):
        if value >= bound:
            raise RankError(f"{value} is not below the {of} of {bound}", _source(info, name))
    if info.local_world_size > info.world_size:
        raise RankError(
            f"{info.local_world_size} ranks on this node, but {info.world_size} in all",
            _source(info, "local_world_size"),
        )
    return info


def _source(info: RankInfo, name: str) -> str:
    return info.provenance.get(name, name).partition("=")[0]


class _Reader:
    """Reads variables and remembers which field came from which."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.provenance: dict[str, str] = {}

    def count(self, name: str, variable: str, least: int = 0) -> int:
        """A whole number, not below `least`."""
        text = self._text(name, variable)
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= least):
            raise RankError(f"{text[:40]!r} is not a number of at least {least}", variable)
        return int(text)

    def expanded(self, name: str, variable: str, expander: Callable[[str], list[_T]]) -> list[_T]:
        """A compressed list, expanded."""
        try:
            return expander(self._text(name, variable))
        except RankError as error:
            raise RankError(error.faults[0].message, variable) from None

    def _text(self, name: str, variable: str) -> str:
        if variable not in self._env:
            raise RankError(
                "is not set, though others of its launcher are", variable, "start the ranks by their launcher"
            )
        text = self._env[variable].strip()
        self.provenance[name] = f"{variable}={text[:80]}"
        return text
