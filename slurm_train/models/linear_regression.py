"""Linear regression in plain PyTorch, the smallest whole example: data, model, loss, optimizer and loop in one file.

    python -m slurm_train +experiment=linear_regression

`fit` is a training function of its own (train.loop._target_), as a user would write one: it is handed the ready
context, so it runs on one rank or on many, unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Line(Dataset[tuple[Tensor, Tensor]]):
    """Points (x, slope * x + intercept + noise), with x uniform in [-1, 1].

    Args:
        split: "train" or "test"; the two have different points.
        slope: slope of the line to be found.
        intercept: its value at x = 0.
        samples: number of points.
        noise: standard deviation of the normal noise on y.
        seed: seed of the points.
    """

    def __init__(
        self,
        split: str = "train",
        slope: float = 2.0,
        intercept: float = -1.0,
        samples: int = 1000,
        noise: float = 0.1,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(2 * seed + (split == "test"))
        self.x = torch.rand(samples, 1, generator=generator) * 2 - 1
        self.y = slope * self.x + intercept + noise * torch.randn(samples, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class LinearRegression(nn.Module):
    """y = weight * x + bias.

    Args:
        features: number of inputs.
    """

    def __init__(self, features: int = 1) -> None:
        super().__init__()
        self.line = nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Predictions [batch, 1] of x [batch, features]."""
        return self.line(x)


def fit(context: Any) -> None:
    """The training loop, step by step: predict, measure, differentiate, move.

    Args:
        context: slurm_train.train.context.Context, everything a training function needs.
    """
    for epoch in context.epochs():
        for x, y, weight in context.batches(epoch):
            prediction = context.model(x)
            loss = context.loss(prediction, y) * weight
            context.optimizer.zero_grad()
            loss.backward()
            context.optimizer.step()
            context.step_done(loss)
        context.epoch_done()
    weight, bias = (parameter.item() for parameter in context.model.parameters())
    context.log.message(f"the line found: y = {weight:.3f} x {bias:+.3f}")
