"""Whether the layout fits the model and the data: what can be told before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from omegaconf import DictConfig

from slurm_train.data.facts import DataFacts
from slurm_train.errors import Fault
from slurm_train.models.facts import Layer, ModelFacts
from slurm_train.topology.grid import Grid


def layout_faults(parallel: DictConfig, grid: Grid) -> Iterator[Fault]:
    """The named layout against the sizes of its axes."""
    size = grid.world_size
    if parallel.name == "ddp" and grid.tp > 1:
        yield Fault(f"parallel.tp={grid.tp}", "the layout ddp has no tensor parallelism", "use parallel=tp")
    elif grid.tp > 1 and grid.dp_replicate > 1:
        yield Fault(
            f"parallel.tp={grid.tp}",
            f"together with dp_replicate={grid.dp_replicate} it is not in this version",
            f"use parallel=tp parallel.tp={size}, or parallel=ddp",
        )


def batch_faults(train: DictConfig, grid: Grid) -> Iterator[Fault]:
    """The global batch against the data ranks."""
    ranks, size = grid.data_ranks, train.batch_size
    if size % ranks:
        below, above = size // ranks * ranks, -(-size // ranks) * ranks
        near = f"{below} or {above}" if below else f"{above}"
        yield Fault(
            f"train.batch_size={size}", f"the global batch is not divisible by the {ranks} data ranks", f"use {near}"
        )


def sample_faults(train: DictConfig, data: DataFacts) -> Iterator[Fault]:
    """The number of samples against validation and batch."""
    left = _training_samples(train, data)
    if left <= 0:
        key, problem = f"train.validation={train.validation:g}", f"leaves none of the {data.train_samples:,} samples"
        yield Fault(key, f"{problem} to train on", "take fewer")
    elif left < train.batch_size:
        yield Fault(
            f"train.batch_size={train.batch_size}",
            f"there are only {left:,} samples to train on, fewer than one global batch",
            f"use at most {left}",
        )


def steps_per_epoch(train: DictConfig, data: DataFacts) -> int:
    """Optimizer steps per epoch; the last batch may be smaller."""
    return -(-_training_samples(train, data) // int(train.batch_size))


def _training_samples(train: DictConfig, data: DataFacts) -> int:
    """Samples left after train.validation, counted as slurm_train.data.batches.split_validation does."""
    samples, part = data.train_samples, train.validation
    if part == 0:
        return samples
    return samples - (max(1, round(samples * part)) if part < 1 else int(part))


def tp_plan(parallel: DictConfig, model: ModelFacts) -> dict[str, str]:
    """Layer name -> style: what `parallel.plan` says, else what the model declares."""
    if not parallel.plan:
        return model.tp_plan
    return {
        layer.name: style
        for pattern, style in parallel.plan.items()
        for layer in model.layers
        if fnmatchcase(layer.name, pattern)
    }


def tp_faults(parallel: DictConfig, model: ModelFacts, tp: int) -> Iterator[Fault]:
    """The tensor-parallel plan against the model's layers."""
    if tp == 1:
        return
    names = ", ".join(layer.name for layer in model.layers)
    for pattern in parallel.plan:
        if not any(fnmatchcase(layer.name, pattern) for layer in model.layers):
            yield Fault(f"parallel.plan.{pattern}", "matches no linear layer of the model", f"they are {names}")
    plan = tp_plan(parallel, model)
    if not plan and not parallel.plan:
        yield Fault(f"parallel.tp={tp}", "the model has no layer to shard", "use parallel=ddp")
    uneven = [(layer, *layer.sharded_size) for layer in planned(model, plan) if layer.sharded_size]
    uneven = [(layer, name, size) for layer, name, size in uneven if size % tp]
    if uneven:
        parts = " and ".join(f"the {size} {name} of {layer.name} ({layer.style})" for layer, name, size in uneven)
        sizes = " and ".join(dict.fromkeys(str(size) for *_, size in uneven))
        near = f"use a tp that divides {sizes}, or sizes that {tp} divides"
        yield Fault(f"parallel.tp={tp}", f"does not divide {parts}", near)


def planned(model: ModelFacts, plan: dict[str, str]) -> list[Layer]:
    """The layers in a plan, each with the style that the plan gives it."""
    return [
        Layer(layer.name, layer.in_features, layer.out_features, plan[layer.name])
        for layer in model.layers
        if layer.name in plan
    ]
