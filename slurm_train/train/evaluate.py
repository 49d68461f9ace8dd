"""Loss and accuracy over a dataset, every sample counted exactly once under any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from slurm_train.data.batches import Batch
from slurm_train.train.parallel import ParallelModel
from slurm_train.train.process import World
from slurm_train.train.step import Step, sharded_loss
from slurm_train.train.weights import MicroWeights


@torch.no_grad()
def evaluate(
    model: ParallelModel,
    step: Step,
    batches: Iterable[Batch],
    loss: Callable[[Any, Any], Tensor],
    weigh: MicroWeights,
    world: World,
) -> dict[str, float]:
    """Mean loss, and accuracy where the targets are class indices, or perplexity where they are sequences of them.

    Sums and counts are reduced, never means of means, so uneven shares of the samples do not matter.

    Args:
        model: left in the mode (training or not) in which it was given.
        step: how the layout computes.
        batches: this data rank's share of the samples; the same number of batches on all data ranks.
        loss: mean loss of (outputs, targets).
        weigh: says what a mean is the mean of.
        world: all ranks.

    Returns:
        {"loss": mean} and {"accuracy": fraction in 0..1} or {"perplexity": exp(loss)}.
    """
    model.agree_on_buffers()
    was_training = model.module.training
    model.module.eval()
    sums = torch.zeros(5, dtype=torch.double)  # loss, its weight, correct, classified, tokens
    for inputs, targets, samples in batches:
        outputs = step.outputs(inputs)
        if model.mesh.is_last_stage and samples:
            outputs, targets = tree_map(partial(_first, int(samples)), (outputs, targets))
            with sharded_loss(model.on_shards):
                sums += _sums(outputs, targets, samples, loss, weigh)
    model.module.train(was_training)
    total, weight, correct, classified, tokens = world.sum(
        sums if model.mesh.counts else torch.zeros_like(sums)
    ).tolist()
    if not weight:
        return {}
    results = {"loss": total / weight}
    if classified:
        results["accuracy"] = correct / classified
    if tokens:
        results["perplexity"] = math.exp(min(total / weight, 700.0))
    return results


def _sums(
    outputs: Any, targets: Any, samples: float, loss: Callable[[Any, Any], Tensor], weigh: MicroWeights
) -> Tensor:
    amount = weigh.amount(targets, samples)
    sums = torch.zeros(5, dtype=torch.double)
    sums[0] = loss(outputs, targets).item() * amount if amount else 0.0
    sums[1] = amount
    if is_classification(outputs, targets):
        found = outputs.argmax(dim=1)
        sums[2] = ((found.full_tensor() if isinstance(found, DTensor) else found) == targets).sum().item()
        sums[3] = samples
    elif weigh.counts_tokens(targets):
        sums[4] = amount
    return sums


def _first(count: int, tensor: Any) -> Any:
    """The samples that count: a stand-in may stand after them."""
    return tensor[:count] if isinstance(tensor, Tensor) and tensor.ndim and len(tensor) > count else tensor


def is_classification(outputs: Any, targets: Any) -> bool:
    """True when outputs are scores [batch, classes] and targets are class indices [batch]."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return False
    return outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point()
