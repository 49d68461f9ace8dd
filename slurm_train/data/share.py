"""One copy of a data set for all ranks of a host: one rank publishes it, the others map the same memory.

rank 0 of the host: handle = publish(data); the handle goes to the others; all: data = attach(handle)
then, when all have attached: release(handle). The memory lives until the last process lets it go.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from slurm_train.data.resident import TensorData
from slurm_train.errors import DataError

_MAGIC = b"slurm_train data 1\n"
_ALIGNMENT = 64
_TENSORS = ("inputs", "targets", "indices")


def publish(data: TensorData) -> str:
    """Write the data set to a file that only this user can read, in memory (/dev/shm) if it fits, else on disk.

    Returns:
        the handle (the file's path) for `attach` and `release`.

    Raises:
        DataError: there is no room for it.
    """
    header, tensors = _describe(data)
    needed = len(header) + sum(_padded(tensor.nbytes) for tensor in tensors)
    failure = ""
    for directory in _directories(needed):
        descriptor, handle = tempfile.mkstemp(prefix="slurm_train-", suffix=".data", dir=directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(header)
                for tensor in tensors:
                    _write(file, tensor)
            return handle
        except OSError as error:
            release(handle)
            failure = f"{directory}: {error.strerror}"
        except BaseException:
            release(handle)
            raise
    raise DataError(f"no room to share {needed:,} bytes of data among the ranks of this host ({failure})")


def attach(handle: str) -> TensorData:
    """The published data set, mapped: what a process writes to it stays its own.

    Raises:
        DataError: the file is gone or is not a published data set.
    """
    try:
        # "c": copy on write; pages that nobody writes to are shared.
        memory = torch.from_numpy(np.memmap(handle, dtype=np.uint8, mode="c"))
        header, start = _read_header(handle)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot attach to the shared data {handle}: {error}") from None
    tensors: dict[str, Tensor] = {}
    for name, dtype_name, shape in header["tensors"]:
        dtype = getattr(torch, dtype_name)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        tensors[name] = memory[start : start + size].view(dtype).view(shape)
        start += _padded(size)
    return TensorData(**tensors, scale=header["scale"], shift=header["shift"], source=header["source"])


def release(handle: str) -> None:
    """Remove the published file's name; processes that have attached keep the data."""
    Path(handle).unlink(missing_ok=True)


def _describe(data: TensorData) -> tuple[bytes, list[Tensor]]:
    """The file's header and the tensors that follow it."""
    named = {name: getattr(data, name) for name in _TENSORS if getattr(data, name) is not None}
    text = json.dumps(
        {
            "tensors": [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in named.items()],
            "scale": data.scale,
            "shift": data.shift,
            "source": data.source,
        }
    ).encode()
    head = _MAGIC + len(text).to_bytes(8, "little") + text
    return head.ljust(_padded(len(head)), b"\0"), list(named.values())


def _read_header(handle: str) -> tuple[dict[str, Any], int]:
    """The header and the position of the first tensor."""
    with open(handle, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it is not a published data set")
        text = file.read(int.from_bytes(file.read(8), "little"))
        return json.loads(text), _padded(file.tell())


def _write(file: BinaryIO, tensor: Tensor) -> None:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    file.write(flat.numpy().data)
    file.write(b"\0" * (_padded(tensor.nbytes) - tensor.nbytes))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _directories(needed: int) -> list[str]:
    """Where to try: memory if it has room, then the temporary directory."""
    candidates = []
    if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK):
        room = os.statvfs("/dev/shm")
        if room.f_bavail * room.f_frsize > needed:
            candidates.append("/dev/shm")
    return [*candidates, tempfile.gettempdir()]
