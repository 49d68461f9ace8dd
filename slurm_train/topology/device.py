"""Which device a rank computes on, decided before any process group starts."""

from __future__ import annotations

import re

from slurm_train.errors import DeviceError

KEY = "train.device"


def backend(kind: str) -> str:
    """The backend of torch.distributed for ranks on devices of a kind (cpu, cuda, mps).

    NCCL moves what lies on GPUs; gloo moves what does not, such as losses and stop flags.
    """
    return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"


def choose_device(
    requested: str, *, cuda_devices: int, mps: bool, local_rank: int, local_world_size: int, shared: bool = False
) -> str:
    """The device of a rank: cpu, mps, or cuda:N with N an index into the devices that this process sees.

    With one visible device a rank (`--gpus-per-task=1`) the index is 0 whatever the local rank.

    Args:
        requested: auto, cpu, cuda, mps or cuda:N.
        cuda_devices: number of CUDA devices that this process sees.
        mps: whether Apple's MPS is there.
        local_rank: this rank's place on its host.
        local_world_size: ranks on this host.
        shared: whether all ranks of the host see the same devices, as under torchrun; else each may see its own.

    Raises:
        DeviceError: it is not there, or there are more ranks than devices.
    """
    if requested == "auto":
        requested = "cuda" if cuda_devices else "mps" if mps and local_world_size == 1 else "cpu"
    if requested == "cpu":
        return "cpu"
    if requested == "mps":
        return _mps(mps, local_world_size)
    found = re.fullmatch(r"cuda(?::(\d+))?", requested)
    if not found:
        raise DeviceError(f"unknown device {requested!r}", KEY, "use auto, cpu, cuda, mps or cuda:N")
    if not cuda_devices:
        raise DeviceError(
            "no CUDA device is visible to this rank", KEY, "ask the launcher for GPUs, or set train.device=cpu"
        )
    if found[1] is not None:
        return _numbered(int(found[1]), cuda_devices, local_world_size)
    if cuda_devices == 1 and not shared:
        # Several ranks of one host can each see one device of their own, so the local rank says nothing here.
        return "cuda:0"
    if local_world_size > cuda_devices:
        raise DeviceError(
            f"{local_world_size} ranks on this host, but {cuda_devices} CUDA device{'s' * (cuda_devices > 1)} visible",
            "launcher.tasks_per_node",
            "start at most one rank a device, or set train.device=cpu",
        )
    return f"cuda:{local_rank}"


def _mps(mps: bool, local_world_size: int) -> str:
    if not mps:
        raise DeviceError("there is no MPS device here", KEY, "set train.device=cpu")
    if local_world_size > 1:
        raise DeviceError("MPS serves a single rank", KEY, "set train.device=cpu, or start one rank")
    return "mps"


def _numbered(index: int, cuda_devices: int, local_world_size: int) -> str:
    if local_world_size > 1:
        raise DeviceError(
            f"{local_world_size} ranks on this host cannot all use cuda:{index}", KEY, "set train.device=cuda"
        )
    if index >= cuda_devices:
        raise DeviceError(f"cuda:{index} is not visible, only {cuda_devices} CUDA devices are", KEY, "count from 0")
    return f"cuda:{index}"
