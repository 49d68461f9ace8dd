"""Loss and accuracy over a dataset, every sample counted exactly once on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.data.batches import Batch
from slurm_train.train.parallel import agree_on_buffers, unwrap
from slurm_train.train.process import World


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], loss: Callable[[Tensor, Tensor], Tensor], world: World, counts: bool
) -> dict[str, float]:
    """Mean loss and, where the targets are class indices, accuracy.

    Sums and counts are reduced, never means of means, so uneven shares of the samples do not matter.

    Args:
        model: left in the mode (training or not) in which it was given.
        batches: this data rank's share of the samples.
        loss: mean loss of (outputs, targets).
        world: all ranks.
        counts: False on a rank whose samples another rank (of its tensor-parallel group) counts already.

    Returns:
        {"loss": mean} and, for a classifier, {"accuracy": fraction in 0..1}.
    """
    agree_on_buffers(model)
    module = unwrap(model)
    was_training = module.training
    module.eval()
    sums = torch.zeros(4, dtype=torch.double)  # loss, correct, classified, samples
    for inputs, targets, size in batches:
        outputs = module(inputs)
        sums[0] += loss(outputs, targets).item() * size
        sums[3] += size
        if is_classification(outputs, targets):
            sums[1] += (outputs.argmax(dim=1) == targets).sum().item()
            sums[2] += size
    module.train(was_training)
    total, correct, classified, samples = world.sum(sums if counts else torch.zeros_like(sums)).tolist()
    results = {"loss": total / samples} if samples else {}
    return results | ({"accuracy": correct / classified} if classified else {})


def is_classification(outputs: Any, targets: Any) -> bool:
    """True when outputs are scores [batch, classes] and targets are class indices [batch]."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return False
    return outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point()
