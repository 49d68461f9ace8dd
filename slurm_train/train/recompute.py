"""Activation checkpointing: what chosen modules compute is computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slurm_train.config.names import near_or_all
from slurm_train.errors import ConfigError, Fault

KEY = "train.recompute"


def recompute(blocks: Mapping[str, nn.Module], model: nn.Module, what: str | int | Sequence[str]) -> list[str]:
    """Checkpoint the activations of modules, which keep their names and classes.

    To be called on the whole model: before a pipeline stage is cut out, where a pattern might match nothing.

    Args:
        blocks: the repeated blocks of the model, by name, in order.
        model: the model.
        what: `all` blocks; a number n: every n-th block, from the first; or fnmatch patterns of module names.

    Returns:
        The names of the modules chosen.

    Raises:
        ConfigError: there are no blocks, or a pattern matches no module.
    """
    modules = _every(blocks, model, what) if what == "all" or isinstance(what, int) else _matching(model, what)
    for module in modules.values():
        module.forward = partial(_checkpointed, module.forward)
    return list(modules)


def _every(blocks: Mapping[str, nn.Module], model: nn.Module, what: str | int) -> dict[str, nn.Module]:
    if not blocks:
        kind = type(model).__name__
        problem, remedy = f"{kind} has no blocks", "set parallel.blocks, or give patterns of module names"
        raise ConfigError([Fault(f"{KEY}={what}", problem, remedy)])
    step = 1 if what == "all" else int(what)
    if step < 1:
        raise ConfigError([Fault(f"{KEY}={what}", "not a number of blocks", "use 1 or more, or all")])
    return dict(list(blocks.items())[::step])


def _matching(model: nn.Module, what: str | Sequence[str]) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: dict[str, nn.Module] = {}
    faults: list[Fault] = []
    for pattern in [what] if isinstance(what, str) else what:
        found = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
        chosen.update(found)
        if not found:
            remedy = near_or_all(pattern, modules, "its modules are")
            faults.append(Fault(f"{KEY}={pattern}", "matches no module of the model", remedy))
    if faults:
        raise ConfigError(faults)
    return {name: module for name, module in chosen.items() if not any(name.startswith(f"{n}.") for n in chosen)}


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
