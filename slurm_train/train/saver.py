"""Saving while training goes on: the state is copied, and a thread writes the copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Staging:
    """Copies of tensors in the host's memory, whose room is used again for the next copies."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the CPU, valid until the next call; sharded ones stay sharded as they are."""
        buffers = {}
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or not _alike(buffer, tensor):
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            _local(buffer).copy_(_local(tensor), non_blocking=True)
            buffers[name] = buffer
        self._buffers = buffers
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return buffers


class Background:
    """One action at a time in a thread. An action that is still going on when the process ends is given up."""

    def __init__(self) -> None:
        self._pending: Future[Path] | None = None

    def start(self, action: Callable[[], Path]) -> None:
        """Start an action, after `wait`."""
        future: Future[Path] = Future()

        def act() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        self._pending = future
        threading.Thread(target=act, name="checkpoint", daemon=True).start()

    @property
    def pending(self) -> bool:
        """Whether an action has not been waited for."""
        return self._pending is not None

    def wait(self) -> Path | None:
        """Wait for the action that is going on and return what it gave; None if there is none. Raises its error."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else None


def _alike(buffer: Tensor, tensor: Tensor) -> bool:
    same = buffer.shape == tensor.shape and buffer.dtype == tensor.dtype and type(buffer) is type(tensor)
    if same and isinstance(tensor, DTensor):
        return (buffer.device_mesh, buffer.placements) == (tensor.device_mesh, tensor.placements)
    return same


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
