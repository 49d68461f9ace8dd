"""The buckets of DistributedDataParallel, settled before the first step.

DDP arranges the gradients in buckets twice: when it is made, and again after the first step, in the order in which
they came. Where more than two ranks sum, an element's place in its bucket decides in which order its parts are added,
and so its last bit. A run that goes on would take its first step with other buckets than one that never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def settle_buckets(replica: DistributedDataParallel) -> None:
    """Take a backward pass that depends on no data, after which DDP has the buckets that it keeps. Collective.

    Not for a replica that looks for unused parameters: that one keeps its first buckets.
    """
    model, broadcasts = replica.module, replica.broadcast_buffers
    replica.broadcast_buffers = False  # what stands in has none
    replica.module = _Touch([parameter for parameter in model.parameters() if parameter.requires_grad])
    try:
        replica(torch.zeros(())).backward()
    finally:
        replica.module, replica.broadcast_buffers = model, broadcasts
    replica.zero_grad()


class _Touch(nn.Module):
    """Gives every parameter a gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._touched = tuple(parameters)  # no parameters of its own

    def forward(self, start: Tensor) -> Tensor:
        for parameter in self._touched:
            start = start + parameter.sum().float()
        return start
