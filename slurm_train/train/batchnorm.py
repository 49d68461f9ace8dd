"""Batch norm over the batches of all ranks of a group, on any device, with shares of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from slurm_train.errors import UserError

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def sync_batchnorm(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """The model, whose batch norms take the statistics of their batches over all ranks in training.

    Outputs, gradients and running statistics are those of one process with the whole batch. Modules keep their names
    and classes. In eval mode nothing is exchanged.

    Args:
        model: changed in place: every BatchNorm1d, 2d and 3d in it.
        group: the ranks that share a batch; each must call the model equally often, with samples or without.
    """
    if dist.get_world_size(group) > 1:
        for module in model.modules():
            if isinstance(module, NORMS):
                module.forward = partial(_forward, module.forward, module, group)
    return model


def require_whole_batches(model: nn.Module, samples: int | None, batch_size: int) -> None:
    """Refuse a pipeline in which batch norms would see a partial last batch: it is filled up with stand-ins there.

    Args:
        model: the whole model.
        samples: of an epoch; None where they are not known.
        batch_size: of the global batch.

    Raises:
        UserError: names train.batch_size.
    """
    left = batch_size if samples is None else samples % batch_size
    if left and any(isinstance(module, NORMS) for module in model.modules()):
        amount = "an unknown number of" if samples is None else f"{left}"
        raise UserError(
            f"the last batch of an epoch has {amount} samples, which batch norms in a pipeline cannot take",
            f"train.batch_size={batch_size}",
            "take a divisor of the training samples, or a norm of each sample, such as LayerNorm or GroupNorm",
        )


_counted = True  # of the process, not of a thread: autograd may compute activations again in one of its own


@contextmanager
def uncounted() -> Iterator[None]:
    """Inside, this rank's samples stand in for none: they take part in the exchange, and count nothing."""
    global _counted
    before, _counted = _counted, False
    try:
        yield
    finally:
        _counted = before


def _forward(local: Callable[[Tensor], Tensor], norm: Any, group: dist.ProcessGroup, inputs: Tensor) -> Tensor:
    if not norm.training:
        return local(inputs)
    norm._check_input_dim(inputs)
    count, mean, variance = _statistics(inputs.detach(), group)
    if norm.track_running_stats:
        norm.num_batches_tracked.add_(1)
        momentum = norm.momentum
        if momentum is None:  # a plain average over all batches so far
            momentum = norm.running_mean.new_ones(()) / norm.num_batches_tracked
        unbiased = variance * (count / (count - 1).clamp(min=1))
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)
    return _Normalise.apply(inputs, norm.weight, norm.bias, count, mean, variance, norm.eps, group)


def _statistics(inputs: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Values per channel, and their mean and biased variance, over all ranks.

    Every rank's squares are taken about its own mean, and combined about the global one: sums of plain squares would
    lose the digits of a variance that is small beside the mean.
    """
    values = _channels_last(inputs)[: None if _counted else 0]
    count = values.new_tensor([len(values)])
    mean = values.sum(0) / count.clamp(min=1)
    mine = torch.cat([count, mean, (values - mean).square().sum(0)])
    shares = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shares, mine, group=group)
    counts, means, squares = torch.stack(shares).split([1, len(mean), len(mean)], dim=1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    return count, mean, (squares + counts * (means - mean).square()).sum(0) / count


def _channels_last(inputs: Tensor) -> Tensor:
    """[batch, channels, ...] as [values, channels], in at least single precision."""
    values = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    return values.movedim(1, -1).reshape(-1, inputs.shape[1])


class _Normalise(torch.autograd.Function):
    """Batch norm with global statistics; its backward pass sums over the ranks what the statistics pass on."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        count: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, count, mean, (variance + eps).rsqrt())
        ctx.group, ctx.counted = group, _counted
        return F.batch_norm(inputs, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, count, mean, inverse = ctx.saved_tensors
        normalised = (_channels_last(inputs) - mean) * inverse
        outer = _channels_last(gradient)
        by_bias, by_weight = outer.sum(0), (outer * normalised).sum(0)
        sums = torch.stack([by_bias, by_weight])
        dist.all_reduce(sums, group=ctx.group)
        inner = (outer - (sums[0] + normalised * sums[1]) / count) * inverse
        if not ctx.counted:  # no statistics came from these samples
            inner = torch.zeros_like(inner)
        if weight is not None:
            inner = inner * weight
            by_weight, by_bias = by_weight.to(weight.dtype), by_bias.to(weight.dtype)
        whole = inner.reshape(*inputs.shape[:1], *inputs.shape[2:], inputs.shape[1]).movedim(-1, 1).to(inputs.dtype)
        by_parameters = (by_weight, by_bias) if weight is not None else (None, None)
        return (whole, *by_parameters, None, None, None, None, None)
