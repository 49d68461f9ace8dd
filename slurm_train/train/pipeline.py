"""Pipeline stages in motion: micro-batches through the ranks by torch's 1F1B schedules, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS

from slurm_train.errors import UserError
from slurm_train.train.mesh import Mesh
from slurm_train.train.weights import weighted


class PipelineModel(nn.Module):
    """This rank's stages, as a training function sees them: only `Context.forward_backward` can run them.

    Args:
        stages: modules by their stage number.
    """

    def __init__(self, stages: dict[int, nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})

    def forward(self, *inputs: object) -> Tensor:
        """Refused: a stage alone has no outputs."""
        raise UserError(
            "one rank of a pipeline cannot call the model",
            "parallel.pp",
            "call context.forward_backward(batch) instead",
        )


class _Stage(PipelineStage):
    """A stage on which torch finds out shapes by a real pass; that one is to leave no trace in training."""

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        with _traceless(self.submod):
            return super()._forward_metadata_inference(*args, **kwargs)

    def _backward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        with _traceless(self.submod):
            return super()._backward_metadata_inference(*args, **kwargs)


@contextmanager
def _traceless(module: nn.Module) -> Iterator[None]:
    """Buffers, such as batch-norm statistics, and random states are after it what they were before."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield
    for buffer, value in before:
        buffer.data.copy_(value)  # by .data, for the backward pass to be tried may hold the buffer


class Pipeline:
    """Runs this rank's stages with those of the other ranks. All its calls are collective along the pp axis.

    torch fixes the shapes of a schedule when it first runs, so there is one for each shape of micro-batch.

    Args:
        stages: this rank's stages by their number.
        count: number of stages in all.
        mesh: the device mesh.
        device: this rank's device.
        loss: mean loss of (outputs, targets).
    """

    def __init__(
        self,
        stages: dict[int, nn.Module],
        count: int,
        mesh: Mesh,
        device: torch.device,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self._stages = stages
        self._count = count
        self._group = mesh.group("pp")
        self._first = 0 in stages
        self._last = count - 1 in stages
        self._device = device
        self._loss = loss
        self._schedules: dict[tuple[object, ...], ScheduleGPipe] = {}
        self._weights: dict[int, Tensor | float] = {}

    def forward_backward(self, inputs: Tensor, targets: Tensor, weights: Sequence[Tensor | float]) -> Tensor | None:
        """One forward and backward pass over a batch that is cut into as many micro-batches as there are weights.

        Returns:
            the weighted sum of the micro-batches' mean losses on the last stage, None elsewhere.
        """
        parts = torch.tensor_split(targets, len(weights))
        # A micro-batch is known by where its targets lie, for torch does not tell the loss which one it is.
        self._weights = {part.data_ptr(): weight for part, weight in zip(parts, weights, strict=True)}
        schedule = self._schedule("train", inputs, targets, len(weights))
        losses: list[Tensor] = []
        given = (inputs,) if self._first else ()
        if self._last:
            schedule.step(*given, target=targets, losses=losses, return_outputs=False)
            return torch.stack([loss.detach() for loss in losses]).sum()
        schedule.step(*given)
        return None

    @torch.no_grad()
    def outputs(self, inputs: Tensor) -> Tensor | None:
        """The outputs of a batch on the last stage, None elsewhere."""
        given = (inputs,) if self._first else ()
        return self._schedule("eval", inputs, None, 1).step(*given)  # type: ignore[no-any-return]

    def _weighted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return weighted(self._loss(outputs, targets), self._weights[targets.data_ptr()])

    def _schedule(self, purpose: str, inputs: Tensor, targets: Tensor | None, microbatches: int) -> ScheduleGPipe:
        key = (purpose, tuple(inputs.shape), inputs.dtype, microbatches)
        if key not in self._schedules:
            loss = self._weighted if purpose == "train" else None
            self._schedules[key] = self._new_schedule(microbatches, loss)
        return self._schedules[key]

    def _new_schedule(self, microbatches: int, loss: Callable[[Tensor, Tensor], Tensor] | None) -> ScheduleGPipe:
        stages = [
            _Stage(module, number, self._count, self._device, group=self._group)
            for number, module in self._stages.items()
        ]
        # The losses are weighted already: torch need not divide the gradients by the number of micro-batches.
        if len(stages) > 1:
            kind = ScheduleInterleaved1F1B if loss else ScheduleLoopedBFS
            return kind(stages, microbatches, loss_fn=loss, scale_grads=False)
        kind = Schedule1F1B if loss else ScheduleGPipe
        return kind(stages[0], microbatches, loss_fn=loss, scale_grads=False)
