"""Sequences of a stream of tokens, for the prediction of each next token."""

from __future__ import annotations

from copy import copy

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100
"""The target that a loss does not count."""


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of `length` tokens and the tokens one further, both int64; the stream itself stays as it is.

    Args:
        stream: one-dimensional array of integers, which may be mapped from a file.
        length: tokens of a sequence.
        first, last: first and one past the last sequence of the stream that belong to this data set.
        source: one line for humans on where the data comes from.
        ignore: targets of this value do not count (become IGNORED). None: all count.
        ignore_after: targets that follow a token of this value do not count. None: all count.
    """

    def __init__(
        self,
        stream: np.ndarray,
        length: int,
        first: int,
        last: int,
        *,
        source: str = "",
        ignore: int | None = None,
        ignore_after: int | None = None,
    ) -> None:
        self.length = length
        self.source = source
        self.ignore = ignore
        self.ignore_after = ignore_after
        self._windows = sliding_window_view(np.asarray(stream), length + 1)[::length][first:last]
        self._rows = torch.arange(last - first)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.gather(self._rows.new_tensor([position]))
        return inputs[0], targets[0]

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets [n, length] at `positions` (int64 [n])."""
        tokens = torch.from_numpy(self._windows[self._rows[positions].numpy()].astype(np.int64))
        inputs = tokens[:, :-1].contiguous()
        targets = tokens[:, 1:].clone(memory_format=torch.contiguous_format)  # a single row would share its memory
        if self.ignore_after is not None:
            targets[inputs == self.ignore_after] = IGNORED
        if self.ignore is not None:
            targets[targets == self.ignore] = IGNORED
        return inputs, targets

    def subset(self, positions: Tensor) -> TokenWindows:
        """The sequences at `positions` (int64) as a data set over the same stream."""
        part = copy(self)
        part._rows = self._rows[positions]
        return part
