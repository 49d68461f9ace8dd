"""The repeated blocks of a model: units of sharding, recomputation, compilation, and of pipeline stages."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from slurm_train.errors import ConfigError, Fault

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def block_names(model: nn.Module, patterns: list[str]) -> list[str]:
    """Names of the blocks, in the model's order.

    Args:
        model: the whole model, on any device.
        patterns: parallel.blocks; empty for what the model declares by a method blocks(), else the members of its
            outermost module lists that hold at least two modules with parameters.

    Raises:
        ConfigError: a pattern matches no module.
    """
    if patterns:
        return _matching(model, patterns)
    if callable(getattr(model, "blocks", None)):
        return list(model.blocks())
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, _LISTS) and name and not any(name.startswith(f"{block}.") for block in found):
            members = [
                f"{name}.{key}" for key, child in module.named_children() if any(True for _ in child.parameters())
            ]
            found += members if len(members) > 1 else []
    return found


def _matching(model: nn.Module, patterns: list[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    faults = [
        Fault(f"parallel.blocks={pattern}", "matches no module of the model", f"it has {', '.join(names[:12])}")
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if faults:
        raise ConfigError(faults)
    chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]
