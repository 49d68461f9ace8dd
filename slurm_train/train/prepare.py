"""A run made ready on one rank: the model, the data, the optimizer and all else that the configuration names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import default_collate

from slurm_train.data.batches import TrainBatches
from slurm_train.errors import UserError
from slurm_train.report.rundir import RunDirectory
from slurm_train.topology.grid import AXES, solve
from slurm_train.topology.jobs import job_id
from slurm_train.topology.microbatches import microbatches
from slurm_train.train.batchnorm import require_whole_batches
from slurm_train.train.callbacks import Callbacks, EarlyStopping
from slurm_train.train.checkpoint import CheckpointStore
from slurm_train.train.context import Context
from slurm_train.train.datasets import make_batches
from slurm_train.train.ema import Ema
from slurm_train.train.groups import parameter_groups
from slurm_train.train.keep import Keep
from slurm_train.train.log import RunLog
from slurm_train.train.loss_scale import LossScale
from slurm_train.train.losses import LossLog
from slurm_train.train.materialise import build_model
from slurm_train.train.mesh import make_mesh
from slurm_train.train.parallel import ParallelModel, describe, is_sharded, parallelize
from slurm_train.train.pipeline import Pipeline
from slurm_train.train.precision import check_precision, plain_loss
from slurm_train.train.process import World
from slurm_train.train.saves import Saves
from slurm_train.train.schedule import follow
from slurm_train.train.step import Loss, PipelineStep, Step, WholeStep
from slurm_train.train.stop import StopFlag
from slurm_train.train.targets import build
from slurm_train.train.weights import MicroWeights
from slurm_train.train.weights_file import WeightsFile, check_weights, read_weights


def prepare(config: DictConfig, world: World, directory: RunDirectory, log: RunLog, stop: StopFlag) -> Context:
    """Build the model, the data and all else that the configuration names."""
    sizes = {axis: config.parallel[axis] for axis in AXES}
    grid, rank, device = solve(world.info.world_size, **sizes), world.info.rank, world.device
    check_precision(config.train.precision, device)
    whole = build_model(config.model, config.seed)
    weights = initial_weights(config.model, whole)
    mesh = make_mesh(grid, rank, device, is_sharded(grid, config.train))
    train, validation, test = make_batches(config, world, grid, log)
    if grid.pp > 1:
        require_whole_batches(whole, train.samples, config.train.batch_size)
    parallel = parallelize(config, whole, mesh, device, example_of(train) if grid.pp > 1 else None, weights)
    del whole  # without a pipeline it is part of `parallel`; with one it is memory
    groups = parameter_groups(parallel.named_parameters(), config.train.no_decay, parallel.whole.shapes)
    optimizer = build(config.optim, "optim", params=groups)
    by_user = build(config.train.loss, "train.loss")
    loss, weigh = plain_loss(by_user), MicroWeights(config.train.count, by_user, mesh)
    # Dropout: alike within a tensor-parallel group, different across data ranks and pipeline stages.
    torch.manual_seed(config.seed * 1_000_003 + 1 + mesh.data_rank + grid.data_ranks * mesh.place["pp"])
    checkpoints = CheckpointStore(
        directory.checkpoints, world, keep(config.train), config.train.async_save, directory.fence
    )
    context = Context(
        config=config,
        world=world,
        mesh=mesh,
        directory=directory,
        parallel=parallel,
        compute=make_step(config, parallel, loss, weigh, device),
        weigh=weigh,
        optimizer=optimizer,
        loss=loss,
        train=train,
        validation=validation,
        test=test,
        log=log,
        losses=LossLog(world, log, stop, config.train.log_seconds),
        checkpoints=checkpoints,
        saves=Saves(checkpoints, log, config.launcher.signal_seconds if job_id(os.environ) else None),
        callbacks=make_callbacks(config.train, validation is not None),
        stop=stop,
        scale=LossScale() if config.train.precision == "fp16" else None,
        ema=Ema(dict(parallel.named_parameters()), config.train.ema) if config.train.ema is not None else None,
    )
    follow(optimizer, config.train.schedule, context.total_steps, lambda: context.position.step)
    if context.ema is not None:
        ema = context.ema
        optimizer.register_step_post_hook(lambda *_: ema.update())
    return context


def keep(train: DictConfig) -> Keep:
    """Which checkpoints to keep."""
    return Keep(train.keep_checkpoints, train.keep_every, train.keep_best, train.early_stopping.metric)


def initial_weights(model: DictConfig, whole: nn.Module) -> WeightsFile | None:
    """The file of model.init_from, which has been found to fit the model."""
    path = model.get("init_from")
    if not path:
        return None
    known = describe(whole)
    weights = read_weights(Path(path).expanduser())
    check_weights(weights, known.shapes, aliases=known.aliases)
    return weights


def make_step(
    config: DictConfig, parallel: ParallelModel, loss: Loss, weigh: MicroWeights, device: torch.device
) -> Step:
    """How the layout computes."""
    train, mesh = config.train, parallel.mesh
    if mesh.grid.pp == 1:
        inner = parallel.parts[0]
        ranks = mesh.grid.data_ranks
        return WholeStep(parallel.module, inner, loss, weigh, train.micro_batch, ranks, parallel.on_shards)
    pipeline = Pipeline(dict(parallel.parts), parallel.stages, mesh, device, loss)
    share = train.batch_size // mesh.grid.data_ranks
    wanted = microbatches(
        share,
        mesh.grid.pp,
        config.parallel.microbatches,
        train.micro_batch,
        config.parallel.schedule == "interleaved",
        mesh.grid.data_ranks,
    )
    return PipelineStep(pipeline, mesh, weigh, share, wanted, parallel.stages > mesh.grid.pp, parallel.on_shards)


def example_of(train: TrainBatches) -> Any:
    """Two input samples."""
    return default_collate([next(iter(train.dataset)) if train.samples is None else train.dataset[0]] * 2)[0]


def make_callbacks(train: DictConfig, validates: bool) -> Callbacks:
    """The callbacks of the configuration, early stopping first."""
    members = {name: build(node, f"train.callbacks.{name}") for name, node in train.callbacks.items()}
    early = train.early_stopping
    if early.patience:
        if not validates:
            raise UserError("nothing is held out for validation", "train.early_stopping", "set train.validation")
        members = {"early_stopping": EarlyStopping(early.metric, early.patience, early.min_delta), **members}
    return Callbacks(members)
