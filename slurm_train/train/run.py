"""The story of a run on one rank: become the rank, agree on the directory, build, go on, train, test."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.data import Dataset

from slurm_train.config.saved import load
from slurm_train.data.batches import EvalBatches, TrainBatches, split_validation
from slurm_train.data.resident import TensorData
from slurm_train.data.share import attach, publish, release
from slurm_train.errors import CheckpointError, UserError
from slurm_train.report.progress import ProgressView
from slurm_train.report.rundir import RunDirectory
from slurm_train.topology.grid import Grid, solve
from slurm_train.topology.jobs import job_id
from slurm_train.train.callbacks import Callbacks, EarlyStopping
from slurm_train.train.checkpoint import CheckpointStore, load_model
from slurm_train.train.context import Context
from slurm_train.train.log import RunLog
from slurm_train.train.losses import LossLog
from slurm_train.train.parallel import make_mesh, parallelize, parameter_groups
from slurm_train.train.process import World, start
from slurm_train.train.stop import StopFlag, stop_on_signals
from slurm_train.train.targets import build, find, takes

if TYPE_CHECKING:
    from slurm_train.task import Task


VISIBLE_SECONDS = 60.0
"""How long a network file system may take to show another host's new directory."""


def run(task: Task) -> dict[str, Any]:
    """Do what the task says, as the rank that the environment names.

    Args:
        task: which run directory, and whether to train or to evaluate.

    Returns:
        the final metrics, the same on every rank: test_loss, test_accuracy, seconds, samples_per_s, steps.

    Raises:
        SlurmTrainError: see slurm_train.errors; all with one line for the user.
    """
    settings = task.settings
    config = OmegaConf.create(settings.config_yaml) if settings else load(Path(task.run_dir) / "config.yaml")
    world = start(config.train, os.environ)
    with stop_on_signals() as stop:
        results = work(task, config, world, stop)
        world.leave()
    return results


def work(task: Task, config: DictConfig, world: World, stop: StopFlag) -> dict[str, Any]:
    """The same, as a rank that has met the others."""
    directory = agree_on_directory(task, world)
    view = ProgressView() if task.live and world.is_main else None
    log = RunLog(directory if world.is_main else None, view)
    context = prepare(config, world, directory, log, stop)
    resumed = go_on(context, needed=task.verb == "evaluate")
    log.event("started", **facts(context, resumed))
    if task.verb == "train":
        train(context)
    results = context.evaluate(context.test, "test")
    if context.seconds:
        results |= {"seconds": context.seconds, "samples_per_s": context.samples_seen / context.seconds}
    log.event("done" if task.verb == "train" else "evaluated", steps=context.position.step, **results)
    return results


def agree_on_directory(task: Task, world: World) -> RunDirectory:
    """The run directory, the same on all ranks; made by rank 0 where no launcher has made it."""

    def make() -> str:
        if not task.create or task.settings is None:
            return task.run_dir
        return str(RunDirectory.create(task.run_dir, task.settings.config_yaml, task.settings.plan_json).path)

    path = world.from_main("run directory", make)
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not (Path(path) / "config.yaml").is_file():
        if time.monotonic() > deadline:
            raise UserError(
                f"{path} is not visible on {socket.gethostname()}", "run.dir", "use a directory that all nodes share"
            )
        time.sleep(0.2)
    return RunDirectory.open(path)


def prepare(config: DictConfig, world: World, directory: RunDirectory, log: RunLog, stop: StopFlag) -> Context:
    """Build the model, the data and all else that the configuration names.

    The whole model is built under one seed on every rank and sharded afterwards: so its initial weights are those of
    a single process, whatever the layout.
    """
    sizes = {axis: config.parallel[axis] for axis in ("pp", "dp_replicate", "dp_shard", "tp")}
    grid = solve(world.info.world_size, **sizes)
    mesh = make_mesh(grid, world.device)
    torch.manual_seed(config.seed)
    whole = build(config.model, "model")
    if not isinstance(whole, nn.Module):
        raise UserError(f"{config.model._target_} gave a {type(whole).__name__}, not a torch.nn.Module", "model")
    model = parallelize(whole.to(world.device), mesh, grid, config.parallel)
    optimizer = build(config.optim, "optim", params=parameter_groups(model))
    train, validation, test = make_batches(config, world, grid, log)
    # Dropout: alike within a tensor-parallel group, different across data ranks.
    torch.manual_seed(config.seed * 1_000_003 + 1 + grid.data_rank(world.info.rank))
    return Context(
        config=config,
        world=world,
        grid=grid,
        mesh=mesh,
        directory=directory,
        model=model,
        optimizer=optimizer,
        loss=build(config.train.loss, "train.loss"),
        train=train,
        validation=validation,
        test=test,
        log=log,
        losses=LossLog(world, log, stop, config.train.log_seconds),
        checkpoints=CheckpointStore(directory.checkpoints, world, config.train.keep_checkpoints),
        callbacks=make_callbacks(config.train, validation is not None),
        stop=stop,
    )


def make_callbacks(train: DictConfig, validates: bool) -> Callbacks:
    """The callbacks of the configuration, early stopping first."""
    members = {name: build(node, f"train.callbacks.{name}") for name, node in train.callbacks.items()}
    early = train.early_stopping
    if early.patience:
        if not validates:
            raise UserError("nothing is held out for validation", "train.early_stopping", "set train.validation")
        members = {"early_stopping": EarlyStopping(early.metric, early.patience, early.min_delta), **members}
    return Callbacks(members)


def make_batches(
    config: DictConfig, world: World, grid: Grid, log: RunLog
) -> tuple[TrainBatches, EvalBatches | None, EvalBatches | None]:
    """Training, validation and test batches of this rank."""
    share = {
        "data_rank": grid.data_rank(world.info.rank),
        "data_ranks": grid.data_ranks,
        "device": world.device,
        "workers": config.train.workers,
    }
    has_splits = takes(find(config.data, "data"), "split")
    whole = load_dataset(config.data, "train", has_splits, world)
    if getattr(whole, "source", ""):
        log.message(f"data: {whole.source}")  # type: ignore[attr-defined]
    training, held_out = split_validation(whole, config.train.validation, config.seed)
    testing = load_dataset(config.data, "test", True, world) if has_splits else None
    batch_size, eval_size = config.train.batch_size, config.train.eval_batch_size
    return (
        TrainBatches(training, batch_size=batch_size, seed=config.seed, **share),
        EvalBatches(held_out, batch_size=eval_size, **share) if held_out is not None else None,
        EvalBatches(testing, batch_size=eval_size, **share) if testing is not None else None,
    )


def load_dataset(data: DictConfig, split: str, has_splits: bool, world: World) -> Dataset[Any]:
    """One split. What is held in memory is loaded once per host and mapped by its ranks; others each rank opens.

    The first rank of a host always goes first, so that a download happens once.
    """
    arguments = {"split": split} if has_splits else {}
    opened: list[Dataset[Any]] = []

    def open_first() -> str:
        opened.append(build(data, "data", **arguments))
        shared = type(opened[0]) is TensorData and world.info.local_world_size > 1  # a subclass has ways of its own
        return publish(opened[0]) if shared else ""

    handle = world.from_host(f"data {split}", open_first)
    if handle:
        try:
            dataset: Dataset[Any] = attach(handle)
            world.host_barrier(f"attached {split}")
        finally:
            if world.info.local_rank == 0:
                release(handle)
        return dataset
    return opened[0] if opened else build(data, "data", **arguments)


def go_on(context: Context, needed: bool) -> str:
    """Load the newest whole checkpoint, if there is one. Returns its path.

    Raises:
        CheckpointError: one is needed and there is none.
    """

    def find_newest() -> str:
        path, broken = context.checkpoints.newest()
        for line in broken:
            context.log.message(line)
        return str(path or "")

    path = context.world.from_main("checkpoint", find_newest)
    if path:
        state = context.checkpoints.load(Path(path))
        if needed:
            load_model(context.model, state)
            context.position.step, context.position.epoch = state["position"]["step"], state["position"]["epoch"]
        else:
            context.restore(state)
            context.log.event("resumed", step=context.position.step, checkpoint=path)
    elif needed:
        raise CheckpointError(f"{context.directory.path} has no whole checkpoint", remedy="let it end an epoch first")
    return path


def train(context: Context) -> None:
    """Call the training function of the configuration."""
    node = context.config.train.loop
    function = find(node, "train.loop")
    arguments = {key: value for key, value in node.items() if not key.startswith("_")}
    context.callbacks.call("on_start", context)
    try:
        function(context, **arguments)
    except RuntimeError as error:
        raise explained(error, context.model) from error
    context.callbacks.call("on_end", context)


def explained(error: RuntimeError, model: nn.Module) -> Exception:
    """DDP's complaint about parameters without a gradient, with their names; any other error as it is."""
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    if not found:
        return error
    names = [name.removeprefix("module.") for name, parameter in model.named_parameters() if parameter.requires_grad]
    unused = ", ".join(names[int(index)] for index in found[1].split())
    return UserError(
        f"these parameters get no gradient: {unused}",
        "parallel.find_unused",
        "use them, freeze them (requires_grad=False), or set parallel.find_unused=true",
    )


def facts(context: Context, resumed: str) -> dict[str, Any]:
    """What the start event tells: the figures that progress and summary need."""
    world, train = context.world, context.config.train
    per_epoch = context.train.steps_per_epoch
    total = min(per_epoch * train.epochs, train.max_steps or per_epoch * train.epochs) if per_epoch else train.max_steps
    return {
        "attempt": 1 + sum(event["event"] == "started" for event in context.directory.events()),
        "host": socket.gethostname(),
        "job": job_id(os.environ),
        "device": str(world.device),
        "threads": world.threads,
        "world_size": world.info.world_size,
        "grid": context.grid.axes(),
        "batch_size": train.batch_size,
        "steps_per_epoch": per_epoch,
        "total_steps": total,
        "epochs": train.epochs,
        "train_samples": context.train.samples,
        "step": context.position.step,
        "resumed": bool(resumed),
        "parameters": sum(p.numel() for p in context.model.parameters()),
        "pid": os.getpid(),
        "started": time.time(),
    }
