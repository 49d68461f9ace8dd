"""The parameters of an optimizer, in groups that it can update together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from slurm_train.config.names import near
from slurm_train.errors import ConfigError, Fault

VECTORS = "vectors"


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], no_decay: Sequence[str], names: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """The trainable parameters in groups for an optimizer: apart by kind, and by whether weight decay applies.

    Args:
        parameters: names and parameters, as `named_parameters()` gives them.
        no_decay: parameters whose groups get `weight_decay=0.0`: fnmatch patterns of names, and the word `vectors`
            for all of at most one dimension.
        names: the names that each pattern has to match one of, where `parameters` are only a part of a model, such as
            a pipeline stage. Default: the names of `parameters`.

    Raises:
        ConfigError: patterns that match no name.
    """
    parameters = list(parameters)
    patterns = [pattern for pattern in no_decay if pattern != VECTORS]
    _check(patterns, [name for name, _ in parameters] if names is None else list(names))
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for name, parameter in parameters:
        if parameter.requires_grad:
            spare = (VECTORS in no_decay and parameter.ndim <= 1) or any(fnmatchcase(name, p) for p in patterns)
            (spared if spare else decayed).append(parameter)
    return [
        *({"params": kind} for kind in by_kind(decayed)),
        *({"params": kind, "weight_decay": 0.0} for kind in by_kind(spared)),
    ]


def by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters apart by kind: plain tensors, and DTensors by their device mesh, in the order of their first members.

    One call of a fused or foreach operation cannot mix kinds.
    """
    kinds: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        kinds.setdefault(mesh, []).append(parameter)
    return list(kinds.values())


def _check(patterns: Sequence[str], names: Sequence[str]) -> None:
    faults = [
        Fault(
            f"train.no_decay={pattern}",
            "matches no parameter of the model",
            near(pattern, names) or f"they have names such as {', '.join([*names[:3], VECTORS])}",
        )
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if faults:
        raise ConfigError(faults)
