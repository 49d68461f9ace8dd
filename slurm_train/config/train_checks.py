"""Settings of training and layout that contradict each other, as far as that shows without the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from slurm_train.config.rules import typed
from slurm_train.errors import Fault
from slurm_train.topology.grid import AXES, REST


def train_faults(config: DictConfig) -> Iterator[Fault]:
    """What one setting of `train` or `parallel` asks for and another one rules out."""
    train, parallel = config.train, config.parallel
    stopping, schedule = train.early_stopping, train.schedule
    if stopping.patience > 0 and train.validation == 0:
        key = f"train.early_stopping.patience={stopping.patience}"
        yield Fault(key, "there is no validation metric to watch", "hold out samples: train.validation=0.1")
    if train.keep_best and train.validation == 0:
        key = f"train.keep_best={train.keep_best}"
        yield Fault(key, "there is no validation metric to go by", "hold out samples: train.validation=0.1")
    if schedule.steps is not None and schedule.name != "constant" and schedule.warmup >= schedule.steps:
        key, problem = f"train.schedule.warmup={schedule.warmup}", "leaves no step before train.schedule.steps"
        yield Fault(key, f"{problem}={schedule.steps}", "warm up for fewer")
    if train.device in ("cpu", "mps"):
        if train.precision == "fp16":
            yield Fault("train.precision=fp16", f"fp16 needs cuda, but train.device={train.device}", "use bf16 or fp32")
        if train.offload:
            yield Fault("train.offload=true", f"train.device={train.device} has no GPU to relieve", "leave it out")
    if train.device == "mps" and train.precision == "bf16":
        yield Fault("train.precision=bf16", "an mps device has no bf16 autocast", "use fp32")
    for name in ("sequence", "loss_parallel"):
        if parallel[name] and parallel.tp == 1:
            key = f"parallel.{name}=true"
            yield Fault(key, "there is no tensor parallelism", "use parallel=tp_sp, or parallel.tp=2 or more")
    yield from _pipeline_faults(parallel)


def _pipeline_faults(parallel: DictConfig) -> Iterator[Fault]:
    interleaved = parallel.schedule == "interleaved"
    if interleaved and parallel.virtual == 1:
        yield Fault("parallel.virtual=1", "the interleaved schedule needs 2 or more stages a rank", "or schedule=1f1b")
    if parallel.pp == 1:
        for name in ["schedule"] * interleaved + ["microbatches"] * (parallel.microbatches is not None):
            remedy = "use parallel=pp" + ", or train.micro_batch for gradient accumulation" * (name == "microbatches")
            yield Fault(typed(f"parallel.{name}", parallel[name]), "there is no pipeline", remedy)


def axis_faults(parallel: DictConfig) -> Iterator[Fault]:
    """The axes of the mesh, each by itself: their product is checked against the ranks by the plan."""
    rest = [axis for axis in AXES if parallel[axis] == REST]
    for axis in AXES:
        if parallel[axis] < 1 and parallel[axis] != REST:
            yield Fault(f"parallel.{axis}={parallel[axis]}", "must be at least 1, or -1 for the rest of the ranks")
    if len(rest) > 1:
        keys = " and ".join(f"parallel.{axis}" for axis in rest)
        yield Fault(f"parallel.{rest[-1]}=-1", f"only one axis can be -1, here {keys} are")
