"""The gradients of one global batch, under any layout: micro-batches, weights, and one exchange of gradients a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from slurm_train.data.batches import Batch, bounds
from slurm_train.train.batchnorm import uncounted
from slurm_train.train.mesh import Mesh
from slurm_train.train.pipeline import Pipeline
from slurm_train.train.weights import MicroWeights, largest_share, weighted

Loss = Callable[[Any, Any], Tensor]


class Step(Protocol):
    """How a layout computes."""

    def forward_backward(self, batch: Batch, factor: float = 1.0) -> Tensor:
        """Add the gradients of this rank's share of a global batch, times `factor`.

        Returns:
            a detached scalar whose mean over all ranks is the mean loss of the global batch.
        """

    def outputs(self, inputs: Any) -> Any:
        """The model's outputs without gradients; None on a rank that does not hold them."""


class WholeStep:
    """Every rank runs the whole depth of the model, or its shards of it.

    Args:
        model: as a training function calls it.
        inner: the user's module inside, which is evaluated directly under DDP.
        loss: mean loss of (outputs, targets).
        weigh: weights of micro-batches.
        micro_batch: samples of one pass; None for the whole share.
        data_ranks: number of ranks that share a global batch.
        on_shards: whether the loss is computed on scores that are sharded over the classes.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        loss: Loss,
        weigh: MicroWeights,
        micro_batch: int | None,
        data_ranks: int,
        on_shards: bool,
    ) -> None:
        self._model = model
        self._inner = inner
        self._loss = loss
        self._weigh = weigh
        self._micro_batch = micro_batch
        self._data_ranks = data_ranks
        self._on_shards = on_shards

    def forward_backward(self, batch: Batch, factor: float = 1.0) -> Tensor:
        """See Step."""
        parts, weights = self._parts(batch)
        total: Tensor | None = None
        for number, (inputs, targets) in enumerate(parts):
            last = number == len(parts) - 1
            stands_in = not batch.weight or number >= len(weights)
            counting = uncounted() if stands_in else nullcontext()
            with self._exchanging(last, len(parts)), sharded_loss(self._on_shards), counting:
                loss = self._loss(self._model(inputs), targets)
                loss = weighted(loss, weights[number] if number < len(weights) else 0.0)
                (loss if factor == 1.0 else loss * factor).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    @torch.no_grad()
    def outputs(self, inputs: Any) -> Any:
        """See Step."""
        return self._inner(inputs)

    def _parts(self, batch: Batch) -> tuple[list[tuple[Any, Any]], Sequence[Tensor | float]]:
        """Inputs and targets of each micro-batch, and their weights.

        There are as many on all data ranks, for shards meet in each: a share too short for so many has stand-ins
        at the end, which have no weight.
        """
        size = self._micro_batch
        if size is None:
            return [(batch.inputs, batch.targets)], self._weigh([batch.targets], batch.weight)
        samples = _samples(batch.targets)
        count = -(-largest_share(samples, batch.weight, self._data_ranks) // size)
        real = min(samples, count)
        edges = [bounds(samples, part, real) for part in range(real)]
        parts = [tree_map(lambda t, low=low, high=high: t[low:high], batch[:2]) for low, high in edges]
        weights = self._weigh([targets for _, targets in parts], batch.weight)
        stand_ins = [tree_map(lambda t: t[:1], batch[:2])] * (count - real)
        return [*parts, *stand_ins], weights

    def _exchanging(self, last: bool, parts: int) -> AbstractContextManager[Any]:
        """Gradients are exchanged with the last micro-batch only."""
        if parts == 1:
            return nullcontext()
        if isinstance(self._model, DistributedDataParallel):
            return nullcontext() if last else self._model.no_sync()
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(last)
        return nullcontext()


class PipelineStep:
    """Every rank runs its stages.

    Args:
        pipeline: this rank's stages.
        mesh: the device mesh.
        weigh: weights of micro-batches.
        share: samples of a whole global batch on each data rank.
        count: micro-batches of such a share.
        interleaved: whether the schedule is the interleaved one.
        on_shards: as for WholeStep.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        mesh: Mesh,
        weigh: MicroWeights,
        share: int,
        count: int,
        interleaved: bool,
        on_shards: bool,
    ) -> None:
        self._pipeline = pipeline
        self._mesh = mesh
        self._weigh = weigh
        self._share = share
        self._count = count
        self._multiple = mesh.grid.pp if interleaved else 1
        self._on_shards = on_shards

    def forward_backward(self, batch: Batch, factor: float = 1.0) -> Tensor:
        """See Step."""
        inputs, targets, weights = self._whole(batch) if self._is_whole(batch) else self._padded(batch)
        with sharded_loss(self._on_shards):
            loss = self._pipeline.forward_backward(inputs, targets, [weight * factor for weight in weights])
        if loss is None:
            return torch.zeros((), device=targets.device)
        return loss * (self._mesh.grid.pp / factor)  # the other stages report nothing

    def outputs(self, inputs: Any) -> Any:
        """See Step."""
        return self._pipeline.outputs(inputs)

    def _is_whole(self, batch: Batch) -> bool:
        return batch.weight == 1.0 and len(batch.targets) == self._share

    def _whole(self, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Tensor | float]]:
        parts = torch.tensor_split(batch.targets, self._count)
        return batch.inputs, batch.targets, self._weigh(parts, batch.weight)

    def _padded(self, batch: Batch) -> tuple[Tensor, Tensor, list[Tensor | float]]:
        """A partial last batch: micro-batches of one sample, the same number on all data ranks.

        Stages exchange micro-batches of one shape, and sharded ones meet for each: so a share that is shorter than
        others is filled up with copies of its first sample, of weight 0.
        """
        size = len(batch.targets)
        largest = largest_share(size, batch.weight, self._mesh.grid.data_ranks)
        wanted = -(-max(largest, self._mesh.grid.pp) // self._multiple) * self._multiple
        rows = torch.arange(wanted, device=batch.targets.device)
        rows = torch.where(rows < size, rows, 0)
        real = self._weigh(torch.tensor_split(batch.targets, size), batch.weight)
        return batch.inputs[rows], batch.targets[rows], [*real, *[0.0] * (wanted - size)]


def sharded_loss(on_shards: bool) -> AbstractContextManager[Any]:
    """The context in which a cross entropy of sharded scores is computed on the shards; good for one pass."""
    return loss_parallel() if on_shards else nullcontext()


def _samples(targets: Any) -> int:
    leaves: Iterable[Any] = [targets] if isinstance(targets, Tensor) else torch.utils._pytree.tree_leaves(targets)
    return len(next(iter(leaves)))
