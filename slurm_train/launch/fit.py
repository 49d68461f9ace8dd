"""Whether the layout fits the model and the data: what can be told before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from math import gcd

from omegaconf import DictConfig

from slurm_train.config.rules import typed
from slurm_train.data.facts import DataFacts
from slurm_train.errors import Fault
from slurm_train.models.layers import SHARDED_SIZE, Layer, ModelFacts, pattern
from slurm_train.topology.grid import Grid
from slurm_train.topology.microbatches import nearest

_SHOWN = 4
"""How many sizes one fault names."""


def layout_faults(parallel: DictConfig, grid: Grid) -> Iterator[Fault]:
    """The named layout against the sizes of its axes.

    Any axis can be set beside a preset; only ddp says by its name that every rank has the whole model.
    """
    if parallel.name != "ddp":
        return
    replicas = grid.dp_replicate > 1
    better = {
        "pp": ("pipeline", "pp"),
        "dp_shard": ("sharding", "hsdp" if replicas else "fsdp"),
        "tp": ("tensor parallelism", "ddp_tp" if replicas else "tp"),
    }
    for axis, (what, name) in better.items():
        if (size := grid.axes()[axis]) > 1:
            yield Fault(f"parallel.{axis}={size}", f"the layout ddp has no {what}", f"use parallel={name}")


def batch_faults(train: DictConfig, grid: Grid) -> Iterator[Fault]:
    """The global batch against the data ranks, and its parts against a rank's share."""
    ranks, size = grid.data_ranks, train.batch_size
    if size % ranks:
        below, above = size // ranks * ranks, -(-size // ranks) * ranks
        near = f"{below} or {above}" if below else f"{above}"
        yield Fault(
            f"train.batch_size={size}", f"the global batch is not divisible by the {ranks} data ranks", f"use {near}"
        )
    elif grid.pp == 1 and train.micro_batch is not None and train.micro_batch > size // ranks:
        share = f"{size} / {ranks} data ranks = {size // ranks}"
        yield Fault(
            f"train.micro_batch={train.micro_batch}",
            f"is more than a data rank's share of the global batch, {share}",
            f"use at most {size // ranks}",
        )


def sample_faults(train: DictConfig, data: DataFacts) -> Iterator[Fault]:
    """The number of samples against validation and batch."""
    left = _training_samples(train, data)
    if left <= 0:
        problem = f"leaves none of the {data.train_samples:,} samples to train on"
        yield Fault(typed("train.validation", train.validation), problem, "take fewer")
    elif left < train.batch_size:
        yield Fault(
            f"train.batch_size={train.batch_size}",
            f"there are only {left:,} samples to train on, fewer than one global batch",
            f"use at most {left}",
        )


def steps_per_epoch(train: DictConfig, data: DataFacts) -> int:
    """Optimizer steps per epoch; the last batch may be smaller."""
    return -(-_training_samples(train, data) // int(train.batch_size))


def total_steps(train: DictConfig, data: DataFacts | None) -> int | None:
    """Optimizer steps of a run that is not stopped early; None if it is not known."""
    limits = [steps_per_epoch(train, data) * train.epochs] if data else []
    limits += [train.max_steps] if train.max_steps else []
    return min(limits, default=None)


def schedule_warnings(train: DictConfig, steps: int | None) -> Iterator[str]:
    """A warm-up that lasts as long as the run.

    Args:
        train: the training settings.
        steps: optimizer steps of the run, as `total_steps` gives them.
    """
    warmup = train.schedule.warmup
    if steps is not None and warmup >= steps:
        yield f"train.schedule.warmup={warmup}: the run has {steps} steps, so its learning rate only ever rises"


def _training_samples(train: DictConfig, data: DataFacts) -> int:
    """Samples left after train.validation, counted as slurm_train.data.batches.split_validation does."""
    samples, part = data.train_samples, train.validation
    if part == 0:
        return samples
    return samples - (max(1, round(samples * part)) if part < 1 else int(part))


def sequence_length(model: ModelFacts, data: DataFacts | None) -> int | None:
    """Tokens of a training sequence: the data's, where they are known, else the longest that the model takes."""
    if model.length is None or data is None or len(data.sample_shape) != 1:
        return model.length
    return data.sample_shape[0]


def data_faults(target: str, model: ModelFacts, data: DataFacts) -> Iterator[Fault]:
    """The data against what the model takes and gives: sequences of tokens are for a language model, and only they.

    Args:
        target: data._target_.
        model: the model.
        data: the data.
    """
    if (len(data.sample_shape) == 1) == (model.length is not None):
        yield from _length_faults(model, data)
        yield from _class_faults(model, data)
    elif model.length is None:
        problem = "its samples are sequences of tokens, which the model does not take"
        yield Fault(f"data._target_={target}", problem, "use a language model, such as model=lm_tiny")
    else:
        shape = " x ".join(map(str, data.sample_shape))
        problem = f"its samples are of shape {shape}, but the model takes sequences of tokens"
        yield Fault(f"data._target_={target}", problem, "use data=bytes or data=tokens")


def _length_faults(model: ModelFacts, data: DataFacts) -> Iterator[Fault]:
    """The data's sequences against the longest that the model takes."""
    length = sequence_length(model, data)
    if model.length is not None and length is not None and length > model.length:
        yield Fault(f"model.length={model.length}", f"the data's sequences have {length} tokens", f"use {length}")


def _class_faults(model: ModelFacts, data: DataFacts) -> Iterator[Fault]:
    """The data's classes, or kinds of tokens, against the scores that the model gives."""
    scores = model.layers[-1].out_features
    if data.classes is not None and 1 < scores < data.classes:  # one output is a regression
        key, kinds = ("vocabulary", "kinds of tokens") if model.length else ("classes", "classes")
        yield Fault(f"model.{key}={scores}", f"the data has {data.classes} {kinds}", f"use {data.classes}")


def tp_plan(parallel: DictConfig, model: ModelFacts) -> dict[str, str]:
    """Layer name -> style: what `parallel.plan` says, else what the model declares."""
    return {
        layer.name: style
        for wanted, style in (parallel.plan or model.tp_plan).items()
        for layer in model.layers
        if fnmatchcase(layer.name, wanted)
    }


def _twice_planned(parallel: DictConfig, model: ModelFacts) -> Iterator[Fault]:
    """Patterns that want different things of one layer, each told once."""
    told = set[str]()
    for layer in model.layers:
        patterns = [wanted for wanted in parallel.plan if fnmatchcase(layer.name, wanted)]
        for wanted in patterns[1:]:
            first = patterns[0]
            if parallel.plan[wanted] != parallel.plan[first] and wanted not in told:
                told.add(wanted)
                problem = f"{layer.name} is {parallel.plan[first]} by {first} already"
                key = f"parallel.plan.{wanted}={parallel.plan[wanted]}"
                yield Fault(key, problem, "let one pattern match")


def planned(model: ModelFacts, plan: dict[str, str]) -> list[Layer]:
    """The layers that a plan shards, each with the style that the plan gives it."""
    return [
        replace(layer, style=plan[layer.name]) for layer in model.layers if plan.get(layer.name, "") in SHARDED_SIZE
    ]


def tp_faults(parallel: DictConfig, model: ModelFacts, tp: int, length: int | None) -> Iterator[Fault]:
    """The tensor-parallel plan against the model's layers.

    Args:
        parallel: the layout.
        model: the model.
        tp: tensor-parallel ranks.
        length: tokens of a sequence, as `sequence_length` gives it.
    """
    if tp == 1:
        return
    names = ", ".join(dict.fromkeys(map(_shown_name, model.layers)))
    for wanted, style in parallel.plan.items():
        if style in SHARDED_SIZE and not any(fnmatchcase(layer.name, wanted) for layer in model.layers):
            key = f"parallel.plan.{wanted}={style}"
            yield Fault(key, "matches no linear layer of the model", f"they are {names}")
    yield from _twice_planned(parallel, model)
    layers = planned(model, tp_plan(parallel, model))
    if not layers and not parallel.plan:
        yield Fault(f"parallel.tp={tp}", "the model has no layer to shard", "use parallel=ddp")
    yield from _style_faults(parallel, model)
    sizes = _sizes(parallel, model, layers, length)
    uneven = {text: size for text, size in sizes.items() if size % tp}
    if uneven:
        texts = list(uneven)
        more = [f"{len(texts) - _SHOWN} more sizes"] if len(texts) > _SHOWN else []
        common = gcd(*sizes.values())
        near = nearest(tp, [n for n in range(1, common + 1) if common % n == 0])
        yield Fault(
            f"parallel.tp={tp}",
            f"does not divide {_listed(texts[:_SHOWN] + more)}",
            f"use a tp of {near}, or sizes that {tp} divides",
        )


def _listed(texts: list[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]


def _sizes(parallel: DictConfig, model: ModelFacts, layers: list[Layer], length: int | None) -> dict[str, int]:
    """What the tensor-parallel ranks must divide: in words -> size."""
    sizes: dict[str, int] = {}
    if not parallel.plan:  # another plan may leave the heads whole
        sizes |= {f"the {size} {what}": size for what, size in model.divides.items()}
    if parallel.sequence and length is not None:
        sizes[f"the {length} tokens of a sequence"] = length
    for layer in layers:
        side = SHARDED_SIZE[layer.style]
        sizes[f"the {getattr(layer, side)} {side} of {_shown_name(layer)} ({layer.style})"] = getattr(layer, side)
    return sizes


def _shown_name(layer: Layer) -> str:
    """One name for the layers that are alike in each block."""
    return layer.name if layer.block is None else pattern(layer.name)


def _style_faults(parallel: DictConfig, model: ModelFacts) -> Iterator[Fault]:
    """What takes a plan with certain styles; tp_sp sets it where nobody has typed it."""
    plan = parallel.plan or model.tp_plan
    remedy = "use parallel=tp" if parallel.name == "tp_sp" else "leave it out"
    for name, styles in {"sequence": ("sequence", "rowwise_scatter", "gather"), "loss_parallel": ("head",)}.items():
        if parallel[name] and plan and not {*styles} & {*plan.values()}:
            key, which = f"parallel.{name}=true", " or ".join(styles)
            yield Fault(key, f"the model's tensor-parallel plan has no module of style {which}", remedy)
