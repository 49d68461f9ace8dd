"""The device mesh of a layout, and this rank's place on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slurm_train.topology.device import backend
from slurm_train.topology.grid import Grid


@dataclass(frozen=True)
class Mesh:
    """The axes of a layout, and the process groups along them, as seen from one rank."""

    grid: Grid
    """Sizes of the axes."""

    rank: int
    """Global rank."""

    devices: DeviceMesh | None = None
    """The device mesh of the axes that are in use; None for a single rank."""

    data_group: dist.ProcessGroup | None = None
    """The ranks that hold the same part of the model and see different samples; None where there is one."""

    @property
    def place(self) -> dict[str, int]:
        """Axis -> this rank's place on it."""
        return self.grid.coordinates(self.rank)

    @property
    def data_rank(self) -> int:
        """Which share of each global batch this rank sees."""
        return self.grid.data_rank(self.rank)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, and so the outputs."""
        return self.place["pp"] == self.grid.pp - 1

    @property
    def counts(self) -> bool:
        """Whether this rank counts its samples: one of each tensor-parallel group, on the last pipeline stage."""
        return self.is_last_stage and self.place["tp"] == 0

    def axis(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh along an axis that is in use."""
        if self.devices is None:
            raise ValueError(f"a single rank has no axis {name}")
        return self.devices[name]

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The process group along an axis; None where it has one rank."""
        return self.axis(name).get_group() if getattr(self.grid, name) > 1 else None

    @property
    def shards(self) -> DeviceMesh:
        """What fully_shard takes: (dp_replicate, dp_shard), or dp_shard alone."""
        if self.devices is None:
            raise ValueError("a single rank has no shards")
        return self.devices["dp_replicate", "dp_shard"] if self.grid.dp_replicate > 1 else self.devices["dp_shard"]


def make_mesh(grid: Grid, rank: int, device: torch.device, sharded: bool) -> Mesh:
    """The mesh of a layout. Collective. Starts a process group of one rank where fully_shard needs one.

    Args:
        grid: sizes of the axes; tp is the innermost, so that its ranks are neighbours on one host.
        rank: global rank.
        device: this rank's device.
        sharded: whether the model will be wrapped by fully_shard, which needs its axis even where that has one rank.
    """
    axes = {name: size for name, size in grid.axes().items() if size > 1 or (sharded and name == "dp_shard")}
    if not axes:
        return Mesh(grid, rank)
    if not dist.is_initialized():  # a single rank whose weights fully_shard keeps
        dist.init_process_group(backend(device.type), store=dist.HashStore(), rank=rank, world_size=1)
    # An axis that holds all ranks would take the group of the world. Under gloo tensor parallelism is some 3% faster
    # with one of its own; under NCCL that would take more of the GPU's memory.
    own = {"tp": "gloo"} if tuple(axes) == ("tp",) and device.type == "cpu" else None
    devices = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes), backend_override=own)
    return Mesh(grid, rank, devices, _data_group(grid, devices))


def _data_group(grid: Grid, devices: DeviceMesh) -> dist.ProcessGroup | None:
    axes = [name for name in ("dp_replicate", "dp_shard") if getattr(grid, name) > 1]
    if len(axes) == 2:
        return devices[tuple(axes)]._flatten("data").get_group()
    return devices[axes[0]].get_group() if axes else None
