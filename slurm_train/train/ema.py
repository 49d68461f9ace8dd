"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Ema:
    """Averages of parameters, sharded and typed as the parameters are; nothing is exchanged between ranks.

    Args:
        parameters: the parameters by name, in the form in which the optimizer updates them; the averages start as
            copies of them.
        decay: weight of the old average in each update, from 0 to 1.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters = dict(parameters)
        self._averages = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self._decay = decay

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are now: after each step of the optimizer."""
        if self._averages:
            torch._foreach_lerp_(_local(self._averages), _local(self._parameters), 1 - self._decay)

    @contextmanager
    def swapped(self, model: nn.Module | None = None) -> Iterator[None]:
        """The parameters hold the averages inside, and are back, bit by bit, after it, whatever happens inside.

        Args:
            model: the module of the parameters, if it is sharded by fully_shard: weights that are left gathered from
                an earlier forward pass are given up, since they would be used instead of the new ones.
        """
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    def tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name, to save, or to load into in place; not inside `swapped`."""
        return dict(self._averages)

    @torch.no_grad()
    def _swap(self, model: nn.Module | None) -> None:
        for module in model.modules() if model is not None else ():
            if isinstance(module, FSDPModule):
                module.reshard()
        for parameter, average in zip(_local(self._parameters), _local(self._averages), strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)


def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """This rank's shards, sharing memory with the tensors."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
