"""Random numbers for shards: each tensor-parallel rank draws its own, and all ranks' generators stay alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def draw_apart(module: nn.Module, rank: int) -> None:
    """Make what `module` draws in its forward pass, such as dropout masks, this rank's own; eval mode changes nothing.

    Each forward pass takes one number from the default CPU generator, which must be in the same state on all ranks of
    the group; that number and `rank` are the seed of what is drawn inside, on the CPU or the current GPU. So it can
    be reproduced, also by activation checkpointing, which sets the CPU generator back.

    Args:
        module: a module that works on plain tensors, this rank's shards.
        rank: this rank's place in the group, from 0.
    """
    module.forward = partial(_apart, module.forward, module, rank)


def _apart(forward: Callable[..., Any], module: nn.Module, rank: int, *args: Any, **kwargs: Any) -> Any:
    return _drawing(forward, rank, *args, **kwargs) if module.training else forward(*args, **kwargs)


@torch.compiler.disable  # it cannot trace the states of generators, and would warn
def _drawing(forward: Callable[..., Any], rank: int, *args: Any, **kwargs: Any) -> Any:
    seed = int(torch.randint(2**62, ())) + rank
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in (*args, *kwargs.values()))
    with torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        return forward(*args, **kwargs)
