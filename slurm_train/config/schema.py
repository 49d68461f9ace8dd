"""The typed part of a configuration. Every field's docstring is its entry in the config reference.

The dataclasses stay mutable: Hydra refuses every override of a frozen one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf


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
class TrainConfig:
    """The training loop."""

    epochs: int = 5
    """Number of passes over the training samples."""

    max_steps: int | None = None
    """Stop after this number of optimizer steps in all, even inside an epoch. Default: no limit."""

    batch_size: int = 64
    """Global batch size: samples per optimizer step over all data ranks together. The number of data
    ranks divides it."""

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

    log_seconds: float = 0.5
    """About how often the ranks reduce and write their losses, in seconds; every step's loss is written."""

    start_timeout: float = 120.0
    """Seconds that the ranks wait for each other at the start before the missing ones are named."""

    timeout: float = 600.0
    """Seconds after which a collective operation that does not finish ends the run."""

    keep_checkpoints: int = 3
    """How many of the newest checkpoints to keep. 0: all."""

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
    """Which layout: auto (single for one rank, ddp for more), single, ddp, tp."""

    pp: int = 1
    """Pipeline-parallel stages. Only 1 in this version."""

    dp_replicate: int = 1
    """Data-parallel replicas."""

    dp_shard: int = 1
    """Ranks over which one replica's parameters are sharded. Only 1 in this version."""

    tp: int = 1
    """Tensor-parallel ranks: each holds a shard of the planned layers."""

    plan: dict[str, str] = field(default_factory=dict)
    """Tensor-parallel plan of a user's own model: module name (or fnmatch pattern) -> colwise, rowwise."""

    find_unused: bool = False
    """DDP: allow parameters that get no gradient in a step. Costs time; without it such parameters are an error."""


@dataclass
class LauncherConfig:
    """How the ranks of a run are started, and what a Slurm job of them asks for (Slurm manual, sbatch)."""

    name: str = "auto"
    """auto (be this rank when started as one of several, else local), local (start the ranks on this host), inline (be
    this rank), slurm (submit a job)."""

    nodes: int = 1
    """Number of nodes (hosts). The local launcher has one."""

    tasks_per_node: int | None = None
    """Ranks per node. Default: what the fixed axes of `parallel` need, else 1; under Slurm one a GPU where
    gpus_per_node is given."""

    tasks: int | None = None
    """Slurm: ranks in all, where Slurm may give the nodes different numbers of them; tasks_per_node is then the most
    that one node takes."""

    cpus_per_task: int | None = None
    """CPUs per rank. Default: the CPUs of the host divided among its ranks; under Slurm what the partition gives,
    usually 1."""

    gpus_per_node: int | None = None
    """GPUs per node, visible to all ranks of the node. Default under the local launcher: all that are visible; under
    Slurm: none."""

    gpus_per_task: int | None = None
    """Slurm: GPUs per rank; each rank sees its own alone, as device 0."""

    gpu_type: str | None = None
    """Slurm: type of the GPUs as the cluster names it, such as a100 or 1g.10gb. Default: any."""

    mem: str | None = None
    """Slurm: memory per node: a number with K, M, G or T (2.5GB is fine); without a unit it is megabytes; 0 for all of
    the node. Default: the cluster's. Give one of mem, mem_per_cpu and mem_per_gpu."""

    mem_per_cpu: str | None = None
    """Slurm: memory per CPU, in the same form."""

    mem_per_gpu: str | None = None
    """Slurm: memory per GPU, in the same form."""

    time: str | None = None
    """Time limit: minutes, or Slurm's MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS. Default: none under the local
    launcher, the partition's under Slurm."""

    signal_seconds: int = 90
    """Slurm: how many seconds before the time limit the ranks are told to save (SIGUSR2). Slurm may send it up to a
    minute earlier."""

    partition: str | None = None
    """Slurm: partition, or several with commas between. Default: the cluster's."""

    account: str | None = None
    """Slurm: account that is charged. Default: the user's."""

    qos: str | None = None
    """Slurm: quality of service. Default: the account's."""

    constraint: str | None = None
    """Slurm: features that the nodes must have, such as 'a100&ib'."""

    exclude: str | None = None
    """Slurm: nodes not to use, such as n[3-4]."""

    reservation: str | None = None
    """Slurm: reservation to run in."""

    sbatch: dict[str, Any] = field(default_factory=dict)
    """Slurm: any other option of sbatch by its long name: {gpu-bind: closest, exclusive: true}. true for an option
    without a value; false leaves it out."""

    setup: list[str] = field(default_factory=list)
    """Slurm: shell lines before the ranks start, on the first node, such as 'module load cuda'. A line that fails ends
    the job."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the ranks, under local and Slurm. Where node names resolve to another network than the
    ranks should use: {NCCL_SOCKET_IFNAME: ib0, GLOO_SOCKET_IFNAME: ib0}."""


@dataclass
class Config:
    """A whole run. `model`, `data` and `optim` are open: their keys are the arguments of their `_target_`."""

    seed: int = 0
    """Seed of initial weights, data order, validation split and dropout."""

    run: RunConfig = field(default_factory=RunConfig)
    """Where a run keeps what it writes."""

    model: dict[str, Any] = MISSING
    """The model: `_target_` is a class or function that returns a torch.nn.Module; the other keys are its arguments."""

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
