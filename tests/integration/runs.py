"""Whole runs as the tests start them: on the ranks of a shared world, or in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import slurm_train.data
from slurm_train.config.compose import compose
from slurm_train.config.saved import dump
from slurm_train.task import Settings, Task
from slurm_train.topology.ranks import SINGLE, RankInfo
from slurm_train.train.checkpoint import CheckpointStore
from slurm_train.train.process import World
from slurm_train.train.run import work
from slurm_train.train.stop import StopFlag

SAMPLE = f"data.root={Path(slurm_train.data.__file__).parent / 'sample'}"
"""The embedded sample, whatever else is on this host."""


def this_world(name: str) -> World:
    """The world of the default process group, its store's keys apart by `name`; a single rank without a group."""
    if not dist.is_initialized():
        return World(SINGLE, torch.device("cpu"), 1, None)
    rank, size = dist.get_rank(), dist.get_world_size()
    info = RankInfo(rank, rank, size, size, 0, 1, ("127.0.0.1",), "torchrun")
    return World(info, torch.device("cpu"), 1, dist.PrefixStore(name, dist.distributed_c10d._get_default_store()))


def run_on_rank(
    overrides: Sequence[str],
    directory: str,
    verb: str = "train",
    attempt: int = 1,
    stop_on: int | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Do what a verb says as one rank; returns the final metrics.

    Args:
        overrides: as typed.
        directory: the run directory; made in the first attempt, gone on with in later ones.
        verb: train, evaluate, generate or verify.
        attempt: counted from 1.
        stop_on: this rank is asked to stop before the first step.
        options: arguments of generate or verify.
    """
    config = compose(overrides).config
    world = this_world(f"{directory} {verb} {attempt}")
    plan = json.dumps({"cwd": "", "config_dirs": []})
    new = attempt == 1 and verb in ("train", "verify")
    task = Task(directory, verb, Settings(dump(config), plan) if new else None, create=new, options=options or {})
    stop = StopFlag()
    if world.info.rank == stop_on:
        stop.reason = "SIGTERM"
    try:
        return work(task, config, world, stop)
    finally:
        if world.store is None and dist.is_initialized():  # a group of this one rank
            dist.destroy_process_group()


def run(world: Any, ranks: int, overrides: Sequence[str], directory: Path, **options: Any) -> dict[str, Any]:
    """The metrics of rank 0, from a run on `ranks` ranks; all of them have the same scores.

    Args:
        world: the fixture.
        ranks: how many; 1 is this process.
        overrides: as typed.
        directory: the run directory.
        options: further arguments of `run_on_rank`.
    """
    if ranks == 1:
        return run_on_rank(overrides, str(directory), **options)
    results = world(ranks).run(_with, overrides, str(directory), options, timeout=200.0)
    scores = [{key: value for key, value in result.items() if key.startswith("test")} for result in results]
    assert all(score == scores[0] for score in scores)
    return dict(results[0])


def _with(overrides: Sequence[str], directory: str, options: dict[str, Any]) -> dict[str, Any]:
    return run_on_rank(overrides, directory, **options)


def losses(directory: Path) -> dict[int, float]:
    """Step -> loss, from a run's metrics."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [(record["step"], record["loss"]) for record in records if "loss" in record]
    assert len(dict(steps)) == len(steps), "a step was written twice"
    return dict(steps)


def state(directory: Path) -> dict[str, Any]:
    """The plain values in a run's newest checkpoint: position, callbacks, random states."""
    return CheckpointStore(directory / "checkpoints").extra(newest(directory))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """The weights in a run's newest checkpoint."""
    store, path = CheckpointStore(directory / "checkpoints"), newest(directory)
    outline = store.outline(path)
    saved = {
        name: torch.empty(like.shape, dtype=like.dtype) for name, like in outline.items() if name.startswith("model.")
    }
    store.load(path, saved)
    return {name.removeprefix("model."): tensor for name, tensor in saved.items()}


def newest(directory: Path) -> Path:
    """The newest checkpoint of a run."""
    return max((directory / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
