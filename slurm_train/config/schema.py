"""The typed part of a configuration. Every field's docstring is its entry in the config reference.

The dataclasses stay mutable: Hydra refuses every override of a frozen one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from slurm_train.config.launcher_schema import LauncherConfig


@dataclass
class RunConfig:
    """Where a run keeps what it writes."""

    experiment: str = "run"
    """Name of the experiment; set by the files in conf/experiment. Part of the default run directory."""

    name: str | None = None
    """Run id. Default: made from the date and time, or from the job id when started inside one."""

    dir: str | None = None
    """Run directory. Default: runs/<experiment>/<run id> below the working directory."""


@dataclass
class EarlyStoppingConfig:
    """Stop when a validation metric no longer improves; all ranks decide alike, on reduced metrics."""

    patience: int = 0
    """Number of epochs without improvement after which training stops. 0: never."""

    metric: str = "val_loss"
    """Which metric to watch: val_loss or val_accuracy."""

    min_delta: float = 0.0
    """Smallest change that counts as an improvement."""


@dataclass
class ScheduleConfig:
    """The learning rate over the optimizer steps, as a factor of optim.lr."""

    name: str = "constant"
    """constant, linear (down to `floor` at the last step) or cosine (the same, along half a cosine)."""

    warmup: int = 0
    """Optimizer steps over which the rate rises linearly from 0, before the rest of the schedule."""

    steps: int | None = None
    """Optimizer step at which the floor is reached. Default: the last step of the run."""

    floor: float = 0.0
    """The factor at the end, from 0 to 1."""


@dataclass
class TrainConfig:
    """The training loop."""

    epochs: int = 5
    """Number of passes over the training samples."""

    max_steps: int | None = None
    """Stop after this number of optimizer steps in all, even inside an epoch. Default: no limit."""

    batch_size: int = 64
    """Global batch size: samples per optimizer step over all data ranks together. The number of data
    ranks divides it."""

    micro_batch: int | None = None
    """Samples of one forward pass on a data rank. A rank's share of the batch is taken in such parts, whose gradients
    are added up before the one optimizer step (gradient accumulation); ranks exchange gradients once a step. Default:
    the whole share at once."""

    count: str = "auto"
    """What a mean loss is the mean of, so that uneven parts weigh what they hold: samples, tokens (targets other than
    the loss's ignore_index, counted over all data ranks in each step), or auto: tokens where targets are sequences of
    class indices, else samples."""

    eval_batch_size: int = 1000
    """Samples per forward pass and rank in validation and test; changes speed and memory, not results."""

    validation: float = 0.1
    """Part of the training samples held out for validation, chosen by the seed: a fraction below 1, or a whole number
    of samples."""

    device: str = "auto"
    """Device of each rank: auto (cuda if any is visible, mps for a single rank on a Mac, else cpu), cpu, cuda, mps, or
    cuda:N for a single rank."""

    threads: int | None = None
    """CPU threads per rank. Default: OMP_NUM_THREADS if set, else the CPUs of this host that the rank may use, divided
    among its ranks."""

    workers: int = 0
    """DataLoader worker processes per rank, for map-style datasets; data held in memory needs none."""

    grad_clip: float | None = None
    """Largest gradient norm (2-norm over all parameters, each counted once); larger gradients are scaled down. Default:
    no limit."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over the steps."""

    no_decay: list[str] = field(default_factory=list)
    """Parameters without weight decay: fnmatch patterns of their names; `vectors` stands for all of one dimension, that
    is norms and biases."""

    ema: float | None = None
    """Decay of an exponential moving average of the weights, e.g. 0.999; validation and test then use the average, and
    checkpoints hold both. Default: no average."""

    precision: str = "fp32"
    """fp32, bf16 (autocast: weights and their gradients stay fp32), bf16_pure (weights, activations and gradients of
    the passes in bf16, with an fp32 master copy that the optimizer updates) or fp16 (autocast with loss scaling; cuda
    only)."""

    recompute: Any = None
    """Activation checkpointing, which computes a block again in the backward pass instead of keeping its activations:
    all, a number n (every n-th block), or a list of fnmatch patterns of module names. Default: none."""

    compile: bool = False
    """Compile each block of the model (torch.compile), or the whole model where it has no blocks."""

    offload: bool = False
    """Keep weights, gradients and optimizer state of a GPU run in the host's memory, and update them there; takes a
    layout with sharded or replicated shards (fully_shard), which `single`, `ddp` and `tp` then become too."""

    profile: int = 0
    """Steps to trace with torch.profiler after two that warm up; a trace for each rank in <run directory>/profile, to
    be opened in chrome://tracing or Perfetto. 0: none."""

    log_seconds: float = 0.5
    """About how often the ranks reduce and write their losses, in seconds; every step's loss is written."""

    start_timeout: float = 120.0
    """Seconds that the ranks wait for each other at the start before the missing ones are named."""

    timeout: float = 600.0
    """Seconds after which a collective operation that does not finish ends the run."""

    keep_checkpoints: int = 3
    """How many of the newest checkpoints to keep. 0: all."""

    keep_every: int | None = None
    """Keep every checkpoint whose step is a multiple of this, too."""

    keep_best: int = 0
    """Keep so many of the checkpoints with the best early_stopping.metric, too; those at the ends of epochs have it."""

    export: str | None = None
    """When training has ended, write its weights to model.<format> in the run directory: safetensors or pt. Default:
    not; the verb `export` does it at any time."""

    save_steps: int | None = None
    """Save a checkpoint every so many optimizer steps too. Default: at the ends of epochs only."""

    async_save: bool = False
    """Write checkpoints in the background: training goes on once the state is copied."""

    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    """When to stop before the last epoch."""

    loss: dict[str, Any] = field(default_factory=lambda: {"_target_": "torch.nn.CrossEntropyLoss"})
    """The loss function: a `_target_` that gives a callable (outputs, targets) -> mean loss."""

    loop: dict[str, Any] = field(default_factory=lambda: {"_target_": "slurm_train.train.loop.train"})
    """The training function: a `_target_` that is called with the ready context (slurm_train.train.context.Context)
    first; other keys are further arguments."""

    callbacks: dict[str, Any] = field(default_factory=dict)
    """Callbacks by a name of your choice, each with a `_target_` (see slurm_train.train.callbacks.Callback)."""


@dataclass
class ParallelConfig:
    """The device mesh. The product of the axes is the world size; one axis may be -1, 'the rest'."""

    name: str = "auto"
    """Which layout: auto (single for one rank, ddp for more), single, ddp, fsdp, hsdp, tp, tp_sp, ddp_tp, fsdp_tp,
    hsdp_tp, pp, pp_tp, pp_fsdp. The names are presets in conf/parallel; any axis can be set beside them."""

    pp: int = 1
    """Pipeline-parallel ranks: each holds one stage of the model, or several with the interleaved schedule."""

    dp_replicate: int = 1
    """Data-parallel replicas."""

    dp_shard: int = 1
    """Data-parallel ranks over which one replica's parameters, gradients and optimizer state are sharded (FSDP2)."""

    tp: int = 1
    """Tensor-parallel ranks: each holds a shard of the planned layers."""

    plan: dict[str, str] = field(default_factory=dict)
    """Tensor-parallel plan of a user's own model: module name (or fnmatch pattern) -> colwise, rowwise, replicate,
    sequence, rowwise_scatter, gather, head, sharded (the README says what each does). A module may match one pattern
    only, or several of the same style. Default: what the model declares by a method tp_plan()."""

    sequence: bool = False
    """Sequence parallelism: between the sharded layers the activations are sharded along the sequence over the tp
    ranks. Takes a plan with sequence, rowwise_scatter and gather."""

    loss_parallel: bool = False
    """Leave the scores of a `head` layer sharded over the classes, and compute the cross entropy on the shards."""

    blocks: list[str] = field(default_factory=list)
    """The repeated blocks of a user's own model, as module names or fnmatch patterns: units of sharding, recomputation,
    compilation. Default: what the model declares by a method blocks(), else the members of its outermost module lists.
    """

    cuts: list[str] = field(default_factory=list)
    """Where pipeline stages of a user's own model begin: the names of the modules that start the second stage, the
    third, and so on. The model must do nothing but call its modules one after the other. Default: between
    its blocks, evenly."""

    microbatches: int | None = None
    """Pipeline: micro-batches of one step and data rank. Default: twice the number of stages, or as many as
    train.micro_batch gives."""

    schedule: str = "1f1b"
    """Pipeline: 1f1b, or interleaved (interleaved 1F1B: each rank holds `virtual` stages, with smaller bubbles)."""

    virtual: int = 2
    """Pipeline: stages a rank under the interleaved schedule."""

    find_unused: bool = False
    """DDP: allow parameters that get no gradient in a step. Costs time; without it such parameters are an error."""

    sync_batchnorm: bool = False
    """Batch norm over the batches of all data ranks, on any device. Without it each rank normalises by its own
    share, as DDP does, and losses differ from those of one process."""


@dataclass
class Config:
    """A whole run. `model`, `data` and `optim` are open: their keys are the arguments of their `_target_`."""

    seed: int = 0
    """Seed of initial weights, data order, validation split and dropout."""

    run: RunConfig = field(default_factory=RunConfig)
    """Where a run keeps what it writes."""

    model: dict[str, Any] = MISSING
    """The model: `_target_` is a class or function that returns a torch.nn.Module; the other keys are its arguments.
    `init_from`, on any model, is a file of weights to start from: what `export` wrote (safetensors or torch)."""

    data: dict[str, Any] = MISSING
    """The data set: `_target_` returns a dataset; it is called with split='train' and split='test' if it
    takes `split`."""

    optim: dict[str, Any] = MISSING
    """The optimizer: `_target_` is called with the model's parameters and the other keys."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The device mesh."""

    train: TrainConfig = field(default_factory=TrainConfig)
    """The training loop."""

    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """How the ranks are started."""


@cache
def typed() -> DictConfig:
    """A configuration of defaults with the types of the schema; not to be changed, for it is made once (20 ms)."""
    config: DictConfig = OmegaConf.structured(Config)
    return config
