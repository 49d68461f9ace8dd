"""The devices of a node: as many as there should be, each of which computes and copies rightly."""

from __future__ import annotations

import torch
from torch import Tensor

from slurm_train.train.preflight_host import Figure, NodeFault, size

SIDE = 512
"""Of the matrices that are multiplied."""


def devices(expected: int, needed: int) -> Figure:
    """Try the CUDA devices that are visible, or the CPU where none is expected.

    Args:
        expected: how many there should be; 0 for a run on CPUs.
        needed: bytes that must be free on each.
    """
    if not expected:
        _compute(torch.device("cpu"))
        return Figure("cpu")
    found = torch.cuda.device_count()
    figure = Figure(f"{found} x {torch.cuda.get_device_name(0)}" if found else "none", found)
    if found != expected:
        raise NodeFault(f"{found} CUDA devices are visible, {expected} expected", figure)
    for index in range(found):
        device = torch.device("cuda", index)
        _compute(device)
        free, _ = torch.cuda.mem_get_info(device)
        if free < needed:
            raise NodeFault(f"{size(free)} are free on {device}, at least {size(needed)}", figure)
    return figure


def _compute(device: torch.device) -> None:
    """Multiply matrices of small whole numbers, whose product every number format of the passes gives exactly."""
    left, right = _numbers(1), _numbers(2)
    expected = left.long() @ right.long()
    moved = left.to(device)
    if not torch.equal(moved.cpu(), left):
        raise NodeFault(f"a copy to {device} and back is not the same")
    product = (moved @ right.to(device)).cpu()
    if wrong := int((product.long() != expected).sum()):
        raise NodeFault(f"a product of matrices on {device} is wrong in {wrong} of {expected.numel()} numbers")


def _numbers(seed: int) -> Tensor:
    return torch.randint(-4, 5, (SIDE, SIDE), generator=torch.Generator().manual_seed(seed)).float()
