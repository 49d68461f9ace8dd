"""The tensors of a training state under names that know no layout, and their way back into a model and its optimizer.

`model.<name>`, `optimizer.<name>.<key>` and `ema.<name>`, with the names of the whole model. The options of the
optimizer, such as its learning rate, are not among them: they come from the configuration.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from slurm_train.errors import UserError
from slurm_train.train.checkpoint import CheckpointStore

MODEL, OPTIMIZER, EMA = "model.", "optimizer.", "ema."
NUMBER = ".number"  # ends the name of a plain number of an optimizer, which is saved as a tensor
TIED = "tied"
"""Key of a checkpoint's plain values: further name of a tied parameter -> the name under which it is saved."""

_LISTED = 4


def tensors_of(
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    optimizer: Optimizer,
    ema: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The state as flat tensors, which share memory with it.

    Args:
        parameters: this rank's by their names in the whole model, plain or sharded; those that the optimizer updates.
        buffers: persistent ones.
        optimizer: the optimizer of the parameters.
        ema: averaged weights by the names of the parameters; None without an average.

    Raises:
        UserError: the optimizer keeps something that has no place in a checkpoint.
    """
    tensors = {MODEL + name: tensor.detach() for name, tensor in {**parameters, **buffers}.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            saved = f"{OPTIMIZER}{name}.{key}"
            if isinstance(value, Tensor):
                _require_whole(optimizer, key, value, parameter)
                tensors[saved] = value.detach()
            elif isinstance(value, (bool, int, float)):
                tensors[saved + NUMBER] = torch.tensor(float(value), dtype=torch.float64)
            elif value is not None:
                raise _unsaveable(optimizer, f"{key!r}, a {type(value).__name__}")
    tensors.update({EMA + name: tensor.detach() for name, tensor in (ema or {}).items()})
    return tensors


def restore(
    store: CheckpointStore,
    path: Path,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    optimizer: Optimizer | None = None,
    ema: Mapping[str, Tensor] | None = None,
) -> None:
    """Load a checkpoint in place. Collective.

    A parameter that had no optimizer state has none afterwards; an average that the checkpoint lacks starts from its
    weights. Check with `require_fit` first that the checkpoint is of this model.

    Args:
        store: where the checkpoint lies.
        path: the checkpoint.
        parameters: as for `tensors_of`, like `buffers` and `ema`.
        buffers: persistent ones.
        optimizer: None leaves its state out.
        ema: None leaves the average out.

    Raises:
        UserError: the checkpoint is of another kind of optimizer.
        CheckpointError: it cannot be loaded.
    """
    outline = store.outline(path)
    averages = {name: tensor.detach() for name, tensor in (ema or {}).items()}
    state = optimizer_state(outline, parameters, optimizer) if optimizer is not None else {}
    tensors = {MODEL + name: tensor.detach() for name, tensor in {**parameters, **buffers}.items()}
    tensors.update({EMA + name: tensor for name, tensor in averages.items() if EMA + name in outline})
    tensors.update({f"{OPTIMIZER}{name}.{key}": value for name in state for key, value in state[name].items()})
    store.load(path, tensors)
    for name, average in averages.items():
        if EMA + name not in outline:
            average.copy_(tensors[MODEL + name])
    if optimizer is None:
        return
    for name, parameter in parameters.items():
        optimizer.state.pop(parameter, None)
        if name in state:
            optimizer.state[parameter] = dict(_with_number(key, value) for key, value in state[name].items())


def optimizer_state(
    outline: Mapping[str, Tensor], parameters: Mapping[str, Tensor], optimizer: Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Parameter name -> key -> a tensor to load into, for the state that a checkpoint has of this rank's parameters.

    What this optimizer would not keep is left out.

    Args:
        outline: names, sizes and dtypes in the checkpoint.
        parameters: this rank's.
        optimizer: the one that gets the state.

    Raises:
        UserError: the checkpoint is of another kind of optimizer, or its state cannot be sharded as a parameter is.
    """
    saved = _saved_state(outline)
    names = {parameter: name for name, parameter in parameters.items()}
    state: dict[str, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        kept = {ndim: _kept_keys(optimizer, group, ndim) for ndim in {p.ndim for p in group["params"]}}
        for parameter in group["params"]:
            name = names[parameter]
            likes = saved.get(name, {})
            keys = kept[parameter.ndim]
            if likes and keys is not None:
                _require_kept(optimizer, keys, {key.removesuffix(NUMBER) for key in likes})
            for key, like in likes.items():
                if keys is None or key.removesuffix(NUMBER) in keys:
                    _require_shardable(optimizer, key, like, parameter)
                    follows = like.dtype == outline[MODEL + name].dtype
                    state.setdefault(name, {})[key] = _empty(group, parameter, key, like, follows)
    return state


def fit_faults(sizes: Mapping[str, torch.Size], shapes: Mapping[str, torch.Size]) -> str:
    """How the model in a checkpoint differs from this one, in one line; empty when it fits.

    Args:
        sizes: names and whole sizes in the checkpoint.
        shapes: names and whole shapes of the parameters and persistent buffers of the whole model.
    """
    saved = {name.removeprefix(MODEL): size for name, size in sizes.items() if name.startswith(MODEL)}
    found = differences(saved, shapes)
    return f"the checkpoint is of another model: {found}" if found else ""


def require_fit(sizes: Mapping[str, torch.Size], shapes: Mapping[str, torch.Size]) -> None:
    """Refuse a checkpoint of another model; not collective. Arguments as for `fit_faults`.

    Raises:
        UserError: what differs.
    """
    if fault := fit_faults(sizes, shapes):
        raise UserError(fault, "model", "set the model that the checkpoint was trained with, or start a new run")


def differences(found: Mapping[str, torch.Size], wanted: Mapping[str, torch.Size]) -> str:
    """What differs between the tensors found and those of the model, long lists cut; empty when nothing does."""
    missing = [name for name in wanted if name not in found]
    surplus = [name for name in found if name not in wanted]
    other = [
        f"{name} is {list(found[name])} in it and {list(shape)} here"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    parts = (("missing ", missing), ("not in this model: ", surplus), ("other shapes: ", other))
    return "; ".join(head + _listed(names) for head, names in parts if names)


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _with_number(key: str, value: Tensor) -> tuple[str, Any]:
    if not key.endswith(NUMBER):
        return key, value
    number = float(value)
    return key.removesuffix(NUMBER), int(number) if number.is_integer() else number


def _saved_state(outline: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Parameter name -> key -> size and dtype of the optimizer state in a checkpoint."""
    saved: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for entry, like in outline.items():
        if entry.startswith(OPTIMIZER):
            name, _, key = entry.removesuffix(NUMBER).removeprefix(OPTIMIZER).rpartition(".")
            saved[name][key + NUMBER if entry.endswith(NUMBER) else key] = like
    return saved


def _empty(group: Mapping[str, Any], parameter: Tensor, key: str, like: Tensor, follows: bool) -> Tensor:
    """Room for one tensor of a parameter's state; in the parameter's dtype if it `follows` that, else as it was."""
    if key.endswith(NUMBER):
        return torch.empty_like(like, device="cpu")
    if key == "step":
        on_device = group.get("fused") or group.get("capturable")
        return torch.empty_like(like, device=parameter.device if on_device else "cpu")
    if like.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=parameter.dtype if follows else like.dtype)
    return torch.empty_like(like, device=parameter.device)


def _kept_keys(optimizer: Optimizer, group: Mapping[str, Any], ndim: int) -> set[str] | None:
    """What an optimizer keeps for a parameter of so many dimensions; None if that cannot be told.

    A copy of the optimizer shows it by a step on a parameter of its own, of one value.
    """
    parameter = torch.zeros([1] * ndim, device=group["params"][0].device, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    try:
        twin = copy.copy(optimizer)
        twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": [parameter]}]
        twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        twin.step()
    except Exception:  # an optimizer of the user's, which may want anything
        return None
    return {key for key, value in twin.state[parameter].items() if value is not None}


def _require_kept(optimizer: Optimizer, kept: set[str], saved: set[str]) -> None:
    """Refuse state that lacks something which the optimizer relies on."""
    if lacking := kept - saved:
        raise UserError(
            f"the checkpoint is of another optimizer: {type(optimizer).__name__} keeps {_listed(sorted(lacking))}, "
            f"where it has {_listed(sorted(saved))}",
            "optim",
            "set the optimizer that the checkpoint was trained with",
        )


def _require_whole(optimizer: Optimizer, key: str, value: Tensor, parameter: Tensor) -> None:
    """Refuse plain state of a sharded parameter: it would be another tensor on each rank, under one name."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
        raise _unsaveable(optimizer, f"{key!r}, which is not sharded as its parameter is")


def _require_shardable(optimizer: Optimizer, key: str, like: Tensor, parameter: Tensor) -> None:
    """Refuse state of a sharded parameter that has another size: nothing says how to shard it."""
    if isinstance(parameter, DTensor) and like.shape != parameter.shape and like.numel() > 1:
        raise UserError(
            f"{type(optimizer).__name__} keeps {key!r} in another size than its sharded parameter",
            "optim",
            "go on in a layout without shards, such as ddp, or set another optimizer",
        )


def _unsaveable(optimizer: Optimizer, what: str) -> UserError:
    return UserError(
        f"{type(optimizer).__name__} keeps {what}, which has no place in a checkpoint", "optim", "use another one"
    )
