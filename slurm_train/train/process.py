"""This process as a rank: its threads, its device and its process group, in that order."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from slurm_train.errors import UserError
from slurm_train.topology.cpus import threads_per_rank
from slurm_train.topology.device import backend, choose_device
from slurm_train.topology.ranks import RankInfo, ranks, require_world
from slurm_train.topology.rendezvous import rendezvous
from slurm_train.train.meet import check_in, open_store


@dataclass(frozen=True)
class World:
    """One rank among all: who it is, what it computes on, and the few words it exchanges outside of training."""

    info: RankInfo
    """Rank, local rank, world size, and where they come from."""

    device: torch.device
    """The device of this rank."""

    threads: int
    """CPU threads of this rank."""

    store: dist.Store | None
    """Key-value store shared by all ranks; None for a single rank."""

    @property
    def is_main(self) -> bool:
        """True on global rank 0, the only one that writes into the run directory."""
        return self.info.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.store is not None:
            dist.barrier()

    def host_barrier(self, name: str) -> None:
        """Wait for the ranks of this host; other hosts may have another number of them. `name` is unique in the run."""
        if self.store is None:
            return
        key = f"{name}/{self.info.node_rank}"
        if self.store.add(f"{key}/count", 1) == self.info.local_world_size:
            self.store.set(f"{key}/all", "1")
        self.store.wait([f"{key}/all"])

    def leave(self) -> None:
        """End the process group, after a clean end only: with dead peers it could wait for them."""
        self.barrier()
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a CPU tensor over all ranks."""
        if self.store is not None:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order, on rank 0; an empty list elsewhere."""
        if self.store is None:
            return [value]
        values: list[Any] = [None] * self.info.world_size
        dist.gather_object(value, values if self.is_main else None)
        return values if self.is_main else []

    def from_main(self, name: str, make: Callable[[], str]) -> str:
        """What rank 0 makes, on every rank. `name` is unique in the run; a UserError of rank 0 is raised on all."""
        return self._shared(name, self.is_main, make)

    def from_host(self, name: str, make: Callable[[], str]) -> str:
        """What the first rank of each host makes, on every rank of that host."""
        return self._shared(f"{name}/{self.info.node_rank}", self.info.local_rank == 0, make)

    def _shared(self, name: str, maker: bool, make: Callable[[], str]) -> str:
        if self.store is None:
            return make()
        if maker:
            try:
                text = make()
            except UserError as error:
                self.store.set(name, f"!{error}")
                raise
            self.store.set(name, f"={text}")
            return text
        answer = self.store.get(name).decode()
        if answer.startswith("!"):
            raise UserError(answer[1:])
        return answer[1:]


def start(train: DictConfig, environment: Mapping[str, str]) -> World:
    """Become the rank that the environment names; `World.leave` ends it.

    The device is chosen before the process group starts, so that NCCL binds to the right one and no rank opens a
    context on a device that is not its own.

    Args:
        train: the `train` group of the configuration.
        environment: the process's environment variables.

    Raises:
        RankError: the environment names no rank, or several worlds of one would be started.
        DeviceError: the device asked for is not there.
        StartError: the ranks did not meet in time.
    """
    info = ranks(environment)
    require_world(info, environment)
    threads = set_threads(train.threads, info, environment)
    device = set_device(train.device, info)
    if info.world_size == 1:
        return World(info, device, threads, None)
    store = open_store(rendezvous(environment, info), info, train.start_timeout)
    check_in(store, info, train.start_timeout)
    dist.init_process_group(
        backend(device.type),
        store=dist.PrefixStore("process group", store),
        rank=info.rank,
        world_size=info.world_size,
        timeout=timedelta(seconds=train.timeout),
        device_id=device if device.type == "cuda" else None,
    )
    store.set_timeout(timedelta(seconds=train.timeout))
    return World(info, device, threads, store)


def set_threads(asked: int | None, info: RankInfo, environment: Mapping[str, str]) -> int:
    """Set torch's threads to `asked`, else to this rank's part of the CPUs that it may run on."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = asked or threads_per_rank(environment, affinity=available, local_world_size=info.local_world_size)[0]
    torch.set_num_threads(count)
    return count


def set_device(requested: str, info: RankInfo) -> torch.device:
    """Choose this rank's device and make it the current one."""
    device = torch.device(
        choose_device(
            requested,
            cuda_devices=torch.cuda.device_count(),
            mps=torch.backends.mps.is_available(),
            local_rank=info.local_rank,
            local_world_size=info.local_world_size,
            shared=info.launcher in ("local", "torchrun"),
        )
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
