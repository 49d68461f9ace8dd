"""How the ranks of a run find each other: a store at rank 0, found by its token, and a roll call."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from itertools import product

import torch.distributed as dist

from slurm_train.errors import StartError
from slurm_train.topology.ranks import RankInfo
from slurm_train.topology.rendezvous import Rendezvous

CAUSES = (
    "likely causes: a rank died while it started (see its log), a firewall between the nodes, "
    "a node name that resolves to another network (set GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), a slow shared disk"
)
PROBE_SECONDS = 2.0


def open_store(meeting: Rendezvous, info: RankInfo, timeout: float) -> dist.Store:
    """The key-value store that all ranks of this run share.

    Args:
        meeting: where the ranks meet. An external one (torchrun's) is used as torch itself would.
        info: who this process is.
        timeout: seconds to look for rank 0.

    Raises:
        StartError: no port was free on rank 0, or rank 0 was not found in time.
    """
    if meeting.external:
        return _torch_store(info, timeout)
    store = _serve(meeting) if info.rank == 0 else _connect(meeting, info, timeout)
    store.set_timeout(timedelta(seconds=timeout))
    return store


def check_in(store: dist.Store, info: RankInfo, timeout: float) -> None:
    """Wait until every rank is here.

    Only a counter is kept while all is well; who is missing is asked only after the time is up.

    Raises:
        StartError: names the ranks that did not come within `timeout` seconds.
    """
    store.set(f"here/{info.rank}", socket.gethostname())
    if store.add("arrived", 1) == info.world_size:
        store.set("complete", "1")
    try:
        store.wait(["complete"], timedelta(seconds=timeout))
    except RuntimeError:  # DistStoreError; older torch raises RuntimeError itself
        missing = missing_ranks(store, info.world_size)
        names = ", ".join(map(str, missing[:20])) + (" ..." if len(missing) > 20 else "")
        raise StartError(
            f"{len(missing)} of {info.world_size} ranks did not come within {timeout:g} s: {names}",
            remedy=CAUSES,
        ) from None


def missing_ranks(store: dist.Store, world_size: int) -> list[int]:
    """The ranks that have not come; rank 0 alone, if its store has gone."""
    try:
        return [rank for rank in range(world_size) if not store.check([f"here/{rank}"])]
    except RuntimeError:
        return [0]


def _torch_store(info: RankInfo, timeout: float) -> dist.Store:
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
    except (RuntimeError, ValueError) as error:
        raise StartError(f"rank {info.rank} did not reach the store of its launcher: {error}", remedy=CAUSES) from None
    return store


def _serve(meeting: Rendezvous) -> dist.Store:
    """Rank 0's store on the first candidate port that is free."""
    for port in meeting.ports:
        try:
            store = dist.TCPStore(meeting.addresses[0], port, is_master=True, wait_for_workers=False)
        except RuntimeError:  # in use: the next candidate
            continue
        store.set("token", meeting.token)
        return store
    raise StartError(
        f"rank 0 could bind none of the ports {', '.join(map(str, meeting.ports))}", "MASTER_PORT", "set a free one"
    )


def _connect(meeting: Rendezvous, info: RankInfo, timeout: float) -> dist.Store:
    """The store with this run's token, among the candidate ports: another job may hold any of them."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for address, port in product(meeting.addresses, meeting.ports):
            store = _try(address, port, meeting.token)
            if store is not None:
                return store
        time.sleep(0.1)
    raise StartError(
        f"rank {info.rank} did not find rank 0 at {', '.join(meeting.addresses)} "
        f"(ports {', '.join(map(str, meeting.ports))}) within {timeout:g} s",
        remedy=CAUSES,
    )


def _try(address: str, port: int, token: str) -> dist.Store | None:
    """The store at a port if it is this run's; None if nobody is there yet, or a stranger."""
    found: list[dist.Store] = []

    def connect() -> None:
        try:
            socket.create_connection((address, port), timeout=PROBE_SECONDS).close()
            store = dist.TCPStore(
                address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PROBE_SECONDS)
            )
            if store.get("token").decode() == token:
                found.append(store)
        except (OSError, RuntimeError):
            return

    # TCPStore waits without end for a listener that accepts and says nothing, whatever its time-out.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(3 * PROBE_SECONDS)
    return found[0] if found else None
