"""Tensor parallelism by a plan: patterns of module names -> styles, checked, then applied to a plain module."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from slurm_train.errors import ConfigError, Fault, GridError, UserError
from slurm_train.train.draw_apart import draw_apart

SHARDING = {"colwise": 0, "rowwise": 1, "rowwise_scatter": 1, "head": 0}
"""The styles that shard a module's weight -> which dimension of a linear layer's weight [out, in]."""

STYLES = (*SHARDING, "sequence", "gather", "sharded", "replicate")
SIZES = ("out_features", "in_features")


def declared_plan(model: nn.Module) -> dict[str, str]:
    """The tensor-parallel plan that the model declares by a method `tp_plan()`.

    Raises:
        UserError: it declares none.
    """
    plan = model.tp_plan() if callable(getattr(model, "tp_plan", None)) else {}
    if not plan:
        raise UserError(
            f"{type(model).__name__} declares no tensor-parallel plan",
            "parallel.tp",
            "give it a method tp_plan(), or set parallel.plan, e.g. 'parallel.plan={fc1: colwise, fc2: rowwise}'",
        )
    return dict(plan)


def resolve_plan(model: nn.Module, plan: Mapping[str, str], tp: int) -> dict[str, str]:
    """Module name -> style for each module that a pattern of the plan matches, checked before anything is sharded.

    Raises:
        ConfigError: a pattern matches nothing, a style is unknown or cannot shard its module, or two patterns or tied
            modules want different things of the same parameters.
        GridError: tp does not divide a sharded size.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    resolved: dict[str, str] = {}
    by: dict[str, str] = {}
    faults: list[Fault] = []
    for pattern, style in plan.items():
        key = f"parallel.plan.{pattern}"
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
            faults.append(Fault(key, "matches no module of the model", f"its linear layers are {_few(linear)}"))
        if style not in STYLES:
            faults.append(Fault(key, f"unknown style {style!r}", f"use {', '.join(STYLES)}"))
            continue
        for name in names:
            if problem := _problem(name, modules, style):
                faults.append(Fault(key, *problem))
            elif resolved.get(name, style) != style:
                faults.append(Fault(key, f"{name} is {resolved[name]} by {by[name]} already", "let one pattern match"))
            resolved[name], by[name] = style, pattern
    if not faults:
        faults += _tied_faults(modules, resolved)
    if faults:
        raise ConfigError(faults)
    for name, style in resolved.items():
        _check_divides(name, style, modules[name], tp)
    return resolved


def _problem(name: str, modules: Mapping[str, nn.Module], style: str) -> tuple[str, str] | None:
    """Why a module cannot have a style, and what to do."""
    if style == "replicate":
        return None
    module = modules[name]
    kind = type(module).__name__
    around = accumulate(name.split("."), "{}.{}".format)
    if attention := [owner for owner in around if isinstance(modules[owner], nn.MultiheadAttention)]:
        return (
            f"{attention[0]} is a MultiheadAttention, which keeps queries, keys and values in one parameter and "
            "splits the heads itself",
            "write the attention with nn.Linear layers (see slurm_train/models/transformer.py)",
        )
    if style in SHARDING and not isinstance(module, nn.Linear | nn.Embedding):
        return f"{name} is a {kind}", "only torch.nn.Linear and torch.nn.Embedding modules can be sharded"
    if style == "sequence" and not hasattr(module, "weight") and any(True for _ in module.parameters()):
        return f"{name} is a {kind}, no norm or dropout", "sequence is for modules that treat each token by itself"
    return None


def _tied_faults(modules: Mapping[str, nn.Module], resolved: Mapping[str, str]) -> list[Fault]:
    """Modules that share a parameter must be sharded alike."""
    faults, owners = [], dict[int, str]()
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            first = owners.setdefault(id(parameter), name)
            ours, theirs = (_shards(modules[n], resolved.get(n, "")) for n in (name, first))
            if ours != theirs:
                styles = f"{resolved.get(first, 'replicate')} and {resolved.get(name, 'replicate')}"
                remedy = "shard both along the same dimension: rowwise for an embedding, head for a linear layer"
                faults.append(Fault("parallel.plan", f"{first} and {name} share a parameter but are {styles}", remedy))
    return faults


def _shards(module: nn.Module, style: str) -> int | None:
    """The dimension of a module's weight that a style shards."""
    if style not in SHARDING:
        return None
    # An embedding's weight is [vocabulary, features]: its output features are dimension 1.
    return 1 - SHARDING[style] if isinstance(module, nn.Embedding) else SHARDING[style]


def _check_divides(name: str, style: str, module: Any, tp: int) -> None:
    dimension = _shards(module, style)
    if dimension is None:
        return
    sizes = ("num_embeddings", "embedding_dim") if isinstance(module, nn.Embedding) else SIZES
    size = getattr(module, sizes[dimension])
    if size % tp:
        raise GridError(
            f"tp={tp} does not divide the {size} {sizes[dimension]} of {name} ({style})",
            "parallel.tp",
            f"choose a divisor of {size}",
        )


def shard_layers(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str], sequence: bool, loss_parallel: bool
) -> None:
    """Make the planned modules tensor parallel, in place. No communication; works on the meta device too.

    Args:
        model: the whole model, or a stage of it.
        mesh: the tp axis.
        plan: module name -> style, as `resolve_plan` gave it.
        sequence: shard activations along dimension 1 between the sharded layers.
        loss_parallel: leave the scores of a `head` layer sharded.
    """
    tied = tied_names(model)
    styles = {
        name: style
        for name, kind in plan.items()
        if (style := _style(kind, model.get_submodule(name), mesh, sequence, loss_parallel)) is not None
    }
    parallelize_module(model, mesh, styles, src_data_rank=None)
    tie(model, tied)


def _style(kind: str, module: nn.Module, mesh: DeviceMesh, sequence: bool, loss_parallel: bool) -> ParallelStyle | None:
    """torch's style for one of ours; None where there is nothing to shard."""
    between = Shard(1) if sequence else Replicate()
    if kind == "colwise":
        return ColwiseParallel()
    if kind in ("rowwise", "rowwise_scatter"):
        output = between if kind == "rowwise_scatter" else Replicate()
        if isinstance(module, nn.Embedding):
            return _Rowwise(input_layouts=Replicate(), output_layouts=output)
        return _Rowwise(output_layouts=output)
    if kind == "head":
        output = Shard(-1) if loss_parallel else Replicate()
        return ColwiseParallel(input_layouts=between, output_layouts=output, use_local_output=not loss_parallel)
    if kind == "gather":
        return _Gather(between)
    if kind == "sequence" and sequence:
        if any(True for _ in module.parameters()):
            return SequenceParallel(use_local_output=True)
        draw_apart(module, mesh.get_local_rank())
    if kind == "sharded":
        draw_apart(module, mesh.get_local_rank())
    return None


class _Rowwise(RowwiseParallel):
    """Waits for the sum, which what comes next needs at once: a compiled block cannot take one that is on its way."""

    @staticmethod
    def _prepare_output_fn(layouts: Any, use_local: bool, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        outputs = outputs.redistribute(placements=layouts)
        return outputs.to_local() if use_local else outputs


class _Gather(ParallelStyle):
    """The first input becomes a replicated DTensor, so that the layers which share it reduce its gradient once."""

    def __init__(self, layout: Replicate | Shard) -> None:
        self._layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_gather, device_mesh, self._layout))
        return module


def _gather(
    mesh: DeviceMesh, layout: Replicate | Shard, module: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    first, *rest = inputs
    if not isinstance(first, DTensor):
        first = DTensor.from_local(first, mesh, [layout], run_check=False)
    return first.redistribute(mesh, [Replicate()]), *rest


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of names of one and the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(model: nn.Module, groups: list[list[str]]) -> None:
    """Let each group's names mean the parameter of its first name again; sharding makes a new one for each."""
    for first, *others in groups:
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


def _few(names: list[str], most: int = 12) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
