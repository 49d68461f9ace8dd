"""Where the ranks of a run meet: one rule for the address, one for the port."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_train.errors import RankError
from slurm_train.topology.ranks import RankInfo

PORTS = range(20_000, 30_000)
"""Below 32768, where Linux's ephemeral ports begin by default (net.ipv4.ip_local_port_range)."""

CANDIDATES = 8
LOOPBACK = ("localhost", "127.", "::1")


@dataclass(frozen=True)
class Rendezvous:
    """Where to meet."""

    addresses: tuple[str, ...]
    """Host names or addresses where rank 0 is to be looked for; nearly always one."""

    ports: tuple[int, ...]
    """Candidate ports in the order in which rank 0 tries them, so that a busy one does not cost a queued job."""

    token: str
    """What tells this run's store from another's on the same port."""

    external: bool
    """True when the launcher (torchrun, Kubeflow) has set the meeting point itself: use env:// as torch does."""


def rendezvous(env: Mapping[str, str], info: RankInfo) -> Rendezvous:
    """The meeting point of the ranks.

    The user's MASTER_ADDR and MASTER_PORT win. Otherwise the address is the first host of the step's own list, and
    the ports are hashed from job, array index, step and restart: the same for all ranks, others for the next job.

    Raises:
        RankError: MASTER_PORT is no port, or MASTER_ADDR is this host's loopback on several nodes, or no host is known.
    """
    token = _token(env)
    port = env.get("MASTER_PORT", "")
    if port and not (port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65_536):
        raise RankError(f"{port[:40]!r} is not a port", "MASTER_PORT", "set a number from 1 to 65535, or unset it")
    ports = (int(port),) if port else _candidates(token)
    return Rendezvous(_addresses(env, info), ports, token, info.launcher in ("torchrun", "pytorchjob"))


def _addresses(env: Mapping[str, str], info: RankInfo) -> tuple[str, ...]:
    address = env.get("MASTER_ADDR", "").strip()
    if address and info.nodes > 1 and address.lower().startswith(LOOPBACK):
        raise RankError(
            f"{address} is another host on each of the {info.nodes} nodes",
            "MASTER_ADDR",
            "set the name of the first node, or unset it",
        )
    if address:
        return (address,)
    if info.nodes == 1:
        return ("127.0.0.1",)
    if not info.hosts:
        raise RankError("not set, and the environment names no hosts", "MASTER_ADDR", "set it to the host of rank 0")
    if env.get("SLURM_DISTRIBUTION") == "arbitrary":
        # Rank 0 runs on the first host of SLURM_HOSTFILE, which need not be the first of the list.
        return info.hosts if info.rank else (info.hosts[info.node_rank],)
    return info.hosts[:1]


def _token(env: Mapping[str, str]) -> str:
    """The same for all ranks of one start of one job, and for no other."""
    if env.get("SUBMITIT_EXECUTOR") == "local":
        names = ["SUBMITIT_LOCAL_JOB_ID"]
    else:
        names = ["SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_TRAIN_JOB"]
    return hashlib.sha256("/".join(env.get(name, "") for name in names).encode(errors="replace")).hexdigest()[:32]


def _candidates(token: str) -> tuple[int, ...]:
    """Eight distinct ports, evenly apart from a hashed first one."""
    first, stride = int(token[:8], 16) % len(PORTS), len(PORTS) // CANDIDATES
    return tuple(PORTS[(first + stride * index) % len(PORTS)] for index in range(CANDIDATES))
