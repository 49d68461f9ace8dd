"""A data set held in memory as two tensors, from which whole batches are gathered at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from slurm_train.errors import DataError


class TensorData(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets in memory, the inputs in a compact type that becomes float only when it is used.

    Args:
        inputs: [N, ...], any type.
        targets: [N, ...].
        scale: inputs become float32 `inputs * scale + shift`. None: they are handed out as they are.
        shift: see `scale`.
        source: one line for humans on where the data comes from.
        indices: int64 positions of this data set's samples in `inputs` and `targets`. None: all, in their order.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        scale: float | None = None,
        shift: float = 0.0,
        source: str = "",
        indices: Tensor | None = None,
    ) -> None:
        if len(inputs) != len(targets):
            raise DataError(f"there are {len(inputs):,} inputs but {len(targets):,} targets")
        self.inputs = inputs
        self.targets = targets
        self.scale = scale
        self.shift = shift
        self.source = source
        self.indices = indices
        # index_select copies whole rows fastest when a row is one dimension.
        self._rows = inputs.reshape(len(inputs), inputs.shape[1:].numel())

    def __len__(self) -> int:
        return len(self.inputs if self.indices is None else self.indices)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        row = position if self.indices is None else int(self.indices[position])
        return self.to_float(self.inputs[row]), self.targets[row]

    def subset(self, positions: Tensor) -> TensorData:
        """The samples at `positions` (int64) as a data set over the same memory."""
        return TensorData(
            self.inputs,
            self.targets,
            scale=self.scale,
            shift=self.shift,
            source=self.source,
            indices=positions if self.indices is None else self.indices[positions],
        )

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the inputs (not yet float) and targets at `positions` (int64)."""
        rows = positions if self.indices is None else self.indices.index_select(0, positions)
        inputs = self._rows.index_select(0, rows).view(len(rows), *self.inputs.shape[1:])
        return inputs, self.targets.index_select(0, rows)

    def to_float(self, raw: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Gathered inputs on `device` as the model gets them: `raw * scale + shift`, or unchanged without a scale."""
        moved = raw.to(device, non_blocking=torch.device(device).type == "cuda")
        if self.scale is None:
            return moved
        # A copy even of float32, so that the data set itself is never written to.
        return moved.to(torch.float32, copy=moved is raw).mul_(self.scale).add_(self.shift)
