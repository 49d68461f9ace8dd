"""The norm of the gradients of a whole model, wherever its parts are, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Groups = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[nn.Parameter], pp_group: dist.ProcessGroup | None = None, scale: float = 1.0
) -> Tensor:
    """The 2-norm over the gradients of the whole model, the same on all ranks that hold a part of it.

    Shards are summed over the ranks that hold them, by one all-reduce for each axis of the mesh; what is replicated
    counts once, and so does a plain tensor, whose gradient must be the same on all ranks but those of a pipeline.
    A gradient that is still a sum over ranks to be done (DTensor's Partial) is replaced by the sum. Collective.

    Args:
        parameters: this rank's parameters, in the same order on all ranks of a stage.
        pp_group: the ranks that hold the other stages of a pipeline.
        scale: what the loss was multiplied by; the norm is that of the gradients divided by it.

    Returns:
        A scalar of at least single precision, on the device on which ranks reduce.
    """
    parameters = list(parameters)
    squares: dict[Groups, Tensor] = {}
    for groups, gradients in _shards(parameters).items():
        norms = [norm for same in _by_dtype(gradients) for norm in torch._foreach_norm(same, 2, dtype=_wide(same[0]))]
        squares[groups] = torch.stack(norms).square().sum().to(_device(parameters))
    for group in dict.fromkeys(group for groups in squares for group in groups):
        held = [groups for groups in squares if group in groups]
        summed = torch.stack([squares[groups] for groups in held])
        dist.all_reduce(summed, group=group)
        squares.update(zip(held, summed, strict=True))
    total = sum(squares.values(), torch.zeros((), device=_device(parameters)))
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    return total.sqrt() / scale


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    limit: float | None,
    pp_group: dist.ProcessGroup | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Divide the gradients by `scale`, and scale them down to a 2-norm of at most `limit`, in one multiplication.

    Args:
        parameters, pp_group, scale: as for `gradient_norm`.
        limit: the largest norm; None for no limit.

    Returns:
        The norm before, that of the gradients divided by `scale`. If it is not finite, neither are the gradients now.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, pp_group, scale)
    if limit is None and scale == 1.0:
        return norm
    shrink = torch.ones_like(norm) if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradients in _shards(parameters).values():
        torch._foreach_mul_(gradients, (shrink / scale).to(gradients[0].device))
    return norm


def _shards(parameters: list[nn.Parameter]) -> dict[Groups, list[Tensor]]:
    """This rank's parts of the gradients, by the groups of ranks over which they are sharded."""
    shards: dict[Groups, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
            parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            sharded = [
                mesh.get_group(axis)
                for axis, placement in enumerate(gradient.placements)
                if not placement.is_replicate() and mesh.size(axis) > 1
            ]
            shards.setdefault(tuple(sharded), []).append(gradient.to_local())
        elif gradient is not None:
            shards.setdefault((), []).append(gradient)
    return shards


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [[t for t in tensors if t.dtype == dtype] for dtype in dict.fromkeys(t.dtype for t in tensors)]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _device(parameters: list[nn.Parameter]) -> torch.device:
    """Where ranks reduce: with weights kept in the host's memory that is still the GPU, as their mesh says."""
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type:
            return torch.device(parameter.device_mesh.device_type)
    return parameters[0].device if parameters else torch.device("cpu")
