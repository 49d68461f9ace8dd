"""How much each micro-batch's mean loss counts, so that their sum over all data ranks is the global mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_train.train.mesh import Mesh


class MicroWeights:
    """Weights of the micro-batches of one step.

    A weight is the part of the global batch's samples or tokens that a micro-batch holds, times the number of data
    ranks: gradients are averaged over those.

    Args:
        count: train.count.
        loss: the loss function; its `ignore_index` marks targets that do not count.
        mesh: the device mesh.
    """

    def __init__(self, count: str, loss: Any, mesh: Mesh) -> None:
        self._count = count
        self._ignored = getattr(loss, "ignore_index", None)
        self._ranks = mesh.grid.data_ranks
        self._group = mesh.data_group

    def __call__(self, parts: Sequence[Any], weight: float) -> Sequence[Tensor | float]:
        """The weights of the parts, to be looked at late: those that need the other ranks are on their way till then.

        Args:
            parts: the targets of each micro-batch.
            weight: the share of the whole, as `Batch.weight` says it; 0 for a stand-in.
        """
        if self.counts_tokens(parts[0]):
            return self._by_tokens(parts, weight)
        if len(parts) == 1:
            return [weight]
        sizes = [len(part) for part in parts]
        return [weight * size / sum(sizes) for size in sizes]

    def amount(self, targets: Any, samples: float) -> float:
        """What a mean over these targets is the mean of: their tokens, or their samples."""
        return float(self._tokens(targets)) if samples and self.counts_tokens(targets) else samples

    def counts_tokens(self, targets: Any) -> bool:
        """Whether tokens are counted, not samples."""
        if self._count != "auto":
            return self._count == "tokens"
        classes = isinstance(targets, Tensor) and not targets.is_floating_point() and targets.ndim > 1
        return classes and self._ignored is not None

    def _by_tokens(self, parts: Sequence[Tensor], weight: float) -> Sequence[Tensor]:
        """One all-reduce of one number; nothing waits for the device."""
        counts = torch.stack([self._tokens(part) for part in parts]).double()
        if not weight:
            counts.zero_()
        total = counts.sum()
        work = dist.all_reduce(total, group=self._group, async_op=True) if self._group is not None else None
        return _TokenWeights(counts * self._ranks, total, work)

    def _tokens(self, targets: Tensor) -> Tensor:
        if self._ignored is None:
            return torch.tensor(targets.numel(), device=targets.device)
        return (targets != self._ignored).sum()


class _TokenWeights(Sequence[Tensor]):
    """Parts of a total that is being summed up: the forward pass need not wait for the other ranks.

    Args:
        counts: tokens of each part, times the number of data ranks.
        total: tokens over all ranks, once `work` is done.
        work: the reduction; None where there is none.
    """

    def __init__(self, counts: Tensor, total: Tensor, work: dist.Work | None) -> None:
        self._counts = counts
        self._total = total
        self._work = work

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, place: Any) -> Any:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return (self._counts[place] / self._total.clamp(min=1)).float()


def weighted(loss: Tensor, weight: Tensor | float) -> Tensor:
    """A mean loss times its weight; 0 where it is the mean over nothing."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, loss, torch.zeros_like(loss)) * weight
    if weight == 0.0:
        return weighted(loss, loss.new_zeros(()))
    return loss if weight == 1.0 else loss * weight


def largest_share(samples: int, weight: float, data_ranks: int) -> int:
    """Samples of the largest share of a global batch on any data rank, told from one share and its `Batch.weight`."""
    return -(-round(samples * data_ranks / weight) // data_ranks) if weight else 1
