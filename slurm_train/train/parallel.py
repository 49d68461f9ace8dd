"""A plain module made parallel: the device mesh, tensor parallelism by a plan, data parallelism by DDP."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from slurm_train.errors import ConfigError, Fault, GridError, UserError
from slurm_train.topology.grid import Grid

STYLES: Mapping[str, tuple[type[ParallelStyle], str]] = {
    "colwise": (ColwiseParallel, "out_features"),
    "rowwise": (RowwiseParallel, "in_features"),
}


def make_mesh(grid: Grid, device: torch.device) -> DeviceMesh | None:
    """The device mesh of the grid's axes that are larger than one; None for a single rank.

    tp is the innermost axis, so that a tensor-parallel group stays on one host where it fits.
    """
    axes = {name: size for name, size in grid.axes().items() if size > 1}
    if not axes:
        return None
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def parallelize(model: nn.Module, mesh: DeviceMesh | None, grid: Grid, parallel: DictConfig) -> nn.Module:
    """The model as this rank's part of the layout.

    Args:
        model: the whole model with its initial weights, the same on every rank, on this rank's device.
        mesh: what `make_mesh` gave.
        grid: the sizes of the axes.
        parallel: the `parallel` group of the configuration.

    Raises:
        ConfigError: the tensor-parallel plan names no module, or a module that cannot be sharded.
        GridError: a planned size is not divisible by tp.
    """
    if mesh is None:
        return model
    if grid.tp > 1:
        plan = resolve_plan(model, dict(parallel.plan) or declared_plan(model), grid.tp)
        model = parallelize_module(model, mesh["tp"], {name: STYLES[style][0]() for name, style in plan.items()})
    if grid.dp_replicate > 1:
        devices = [mesh.device_type + f":{torch.cuda.current_device()}"] if mesh.device_type == "cuda" else None
        return DistributedDataParallel(
            model,
            device_ids=devices,
            process_group=mesh["dp_replicate"].get_group(),
            find_unused_parameters=parallel.find_unused,
            gradient_as_bucket_view=True,
        )
    return model


def declared_plan(model: nn.Module) -> dict[str, str]:
    """The tensor-parallel plan that the model declares by a method `tp_plan()`."""
    plan = model.tp_plan() if callable(getattr(model, "tp_plan", None)) else {}
    if not plan:
        raise UserError(
            f"{type(model).__name__} declares no tensor-parallel plan",
            "parallel.tp",
            "give it a method tp_plan(), or set parallel.plan, e.g. 'parallel.plan={fc1: colwise, fc2: rowwise}'",
        )
    return dict(plan)


def resolve_plan(model: nn.Module, plan: Mapping[str, str], tp: int) -> dict[str, str]:
    """Module name -> style for each module that a pattern of the plan matches, checked before anything is sharded."""
    modules = {name: module for name, module in model.named_modules() if name}
    resolved: dict[str, str] = {}
    faults: list[Fault] = []
    for pattern, style in plan.items():
        key = f"parallel.plan.{pattern}"
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
            faults.append(Fault(key, "matches no module of the model", f"its linear layers are {', '.join(linear)}"))
        if style not in STYLES:
            faults.append(Fault(key, f"unknown style {style!r}", f"use {' or '.join(STYLES)}"))
            continue
        for name in names:
            if not isinstance(modules[name], nn.Linear):
                kind = type(modules[name]).__name__
                faults.append(Fault(key, f"{name} is a {kind}", "only torch.nn.Linear modules can be sharded"))
            resolved[name] = style
    if faults:
        raise ConfigError(faults)
    for name, style in resolved.items():
        _check_divides(name, style, modules[name], tp)
    return resolved


def _check_divides(name: str, style: str, module: nn.Module, tp: int) -> None:
    size = getattr(module, STYLES[style][1])
    if size % tp:
        raise GridError(
            f"tp={tp} does not divide the {size} {STYLES[style][1]} of {name} ({style})",
            "parallel.tp",
            f"choose a divisor of {size}",
        )


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside DDP; evaluated directly it needs no collective, so ranks may have uneven batches."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def agree_on_buffers(model: nn.Module) -> None:
    """Give all replicas the buffers of rank 0, such as batch-norm statistics, as DDP does at each training step."""
    if isinstance(model, DistributedDataParallel):
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0, group=model.process_group)


def parameter_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """The trainable parameters for an optimizer: sharded and plain ones apart.

    Fused optimizers update one group in one call and cannot mix DTensors with plain tensors.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    plain = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    return [{"params": group} for group in (sharded, plain) if group]


def clip_gradients(model: nn.Module, limit: float) -> torch.Tensor:
    """Scale the gradients down to a 2-norm of at most `limit`; returns the norm before.

    A sharded parameter's norm is reduced over its shards; a replicated one counts once, however many ranks hold it.
    """
    norms = []
    for group in parameter_groups(model):
        gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in parameter_groups(model):
        torch.nn.utils.clip_grads_with_norm_(group["params"], limit, total)
    return total
