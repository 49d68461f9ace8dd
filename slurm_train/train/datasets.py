"""The data sets of a run, opened once a host, and this rank's batches of them."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from torch.utils.data import Dataset

from slurm_train.data.batches import EvalBatches, TrainBatches, split_validation
from slurm_train.data.resident import TensorData
from slurm_train.data.share import attach, publish, release
from slurm_train.topology.grid import Grid
from slurm_train.train.log import RunLog
from slurm_train.train.process import World
from slurm_train.train.targets import build, find, takes


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
