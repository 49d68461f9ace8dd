"""The story of a run on one rank: become the rank, agree on the directory, build, go on, train, test."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from torch import nn

from slurm_train.config.saved import load
from slurm_train.errors import CheckpointError, UserError
from slurm_train.report.fence import FOLDER, Fence, claim
from slurm_train.report.progress import ProgressView
from slurm_train.report.rundir import RunDirectory
from slurm_train.report.trust import require_trusted
from slurm_train.topology.jobs import job_id, requeue_count
from slurm_train.train.checkpoint import CheckpointStore, remove_staged
from slurm_train.train.context import Context
from slurm_train.train.export import export
from slurm_train.train.generate import generate
from slurm_train.train.log import RunLog
from slurm_train.train.peak import peak_memory
from slurm_train.train.prepare import prepare
from slurm_train.train.process import World, start
from slurm_train.train.profile import profiled
from slurm_train.train.stop import StopFlag, stop_on_signals
from slurm_train.train.targets import find
from slurm_train.train.verify import exact, verify

if TYPE_CHECKING:
    from slurm_train.task import Task


VISIBLE_SECONDS = 60.0
"""How long a network file system may take to show another host's new directory."""


def run(task: Task) -> dict[str, Any]:
    """Do what the task says, as the rank that the environment names.

    Args:
        task: which run directory, and what to do.

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
    if task.verb != "train":
        return work_in(directory, task, config, world, stop)
    fence = claimed(directory, world, config.launcher.restarts)
    with fence.held() if world.is_main else nullcontext():
        return work_in(directory, task, config, world, stop)


def claimed(directory: RunDirectory, world: World, restarts: int) -> Fence:
    """The claim of this attempt, made by rank 0; from now on no earlier attempt can write into the run directory.

    Raises:
        UserError: Slurm has requeued the job more than `restarts` times: something ends it again and again.
    """

    def make() -> str:
        if (count := requeue_count(os.environ)) > restarts > 0:
            key = f"launcher.restarts={restarts}"
            raise UserError(f"Slurm has requeued this job {count} times", key, "see why, and resume the run")
        fence = claim(directory.path, job_id(os.environ))
        remove_staged(directory.checkpoints)
        return str(fence.number)

    directory.fence = Fence(directory.path / FOLDER, int(world.from_main("claim", make)))
    return directory.fence


def work_in(directory: RunDirectory, task: Task, config: DictConfig, world: World, stop: StopFlag) -> dict[str, Any]:
    """The same, in the run directory."""
    view = ProgressView() if task.live and world.is_main else None
    log = RunLog(directory if world.is_main else None, view)
    checkpoint = newest_checkpoint(task.verb, directory, world, log)
    if task.verb == "verify":
        config = exact(config)
    elif checkpoint and "init_from" in config.model:  # its weights are left behind, and may be gone
        config.model.init_from = None
    context = prepare(config, world, directory, log, stop)
    if checkpoint:
        go_on(context, Path(checkpoint), task.verb)
    if task.verb == "train" and world.is_main:
        directory.forget_after(context.position.step, evaluated=context.position.batch == 0)
    log.event("started", **facts(context, checkpoint))
    if task.verb == "verify":
        results = verify(context, **task.options)
        log.event("evaluated", verb="verify", **results)
        return results
    if task.verb == "generate":
        text = generate(context, **task.options)
        log.message(text)
        log.event("evaluated", verb="generate")
        return {"text": text}
    if task.verb == "train":
        train(context)
    results = context.evaluate(context.test, "test")
    if context.seconds:
        results |= {"seconds": context.seconds, "samples_per_s": context.samples_seen / context.seconds}
    peaks = world.gather(peak_memory(world.device))
    name = "done" if task.verb == "train" else "evaluated"
    log.event(name, steps=context.position.step, **results, peak_memory=peaks)
    return results


def agree_on_directory(task: Task, world: World) -> RunDirectory:
    """The run directory, the same on all ranks; made by rank 0 where no launcher has made it."""

    def make() -> str:
        if not task.create or task.settings is None:
            require_trusted(Path(task.run_dir))
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


def newest_checkpoint(verb: str, directory: RunDirectory, world: World, log: RunLog) -> str:
    """The path of the newest whole checkpoint, the same on all ranks; empty where there is none, and for verify.

    Raises:
        CheckpointError: the verb needs one and there is none.
    """

    def find_newest() -> str:
        path, broken = CheckpointStore(directory.checkpoints).newest()
        for line in broken:
            log.message(line)
        return str(path or "")

    if verb == "verify":
        return ""
    path = world.from_main("checkpoint", find_newest)
    if not path and verb != "train":
        raise CheckpointError(f"{directory.path} has no whole checkpoint", remedy="let it end an epoch first")
    return path


def go_on(context: Context, checkpoint: Path, verb: str) -> None:
    """Load a checkpoint: all of it to train, else the weights."""
    if verb != "train":
        context.restore_model(checkpoint)
        return
    context.restore(checkpoint)
    context.log.event("resumed", step=context.position.step, checkpoint=str(checkpoint))


def train(context: Context) -> None:
    """Call the training function of the configuration."""
    node = context.config.train.loop
    function = find(node, "train.loop")
    arguments = {key: value for key, value in node.items() if not key.startswith("_")}
    context.callbacks.call("on_start", context)
    try:
        with profiled(context.config.train.profile, context.directory.path / "profile", context.mesh.rank) as profile:
            context.profile = profile
            function(context, **arguments)
    except RuntimeError as error:
        raise explained(error, context.model) from error
    context.callbacks.call("on_end", context)
    context.checkpoints.wait()
    if context.config.train.export and context.world.is_main:
        output = context.directory.path / f"model.{context.config.train.export}"
        output.unlink(missing_ok=True)  # of an earlier end
        context.log.message(export(context.directory.path, output))


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
    return {
        "attempt": 1 + sum(event["event"] == "started" for event in context.directory.events()),
        "host": socket.gethostname(),
        "job": job_id(os.environ),
        "device": str(world.device),
        "threads": world.threads,
        "world_size": world.info.world_size,
        "grid": context.grid.axes(),
        "batch_size": train.batch_size,
        "steps_per_epoch": context.train.steps_per_epoch,
        "total_steps": context.total_steps,
        "epochs": train.epochs,
        "train_samples": context.train.samples,
        "step": context.position.step,
        "resumed": bool(resumed),
        "parameters": context.parallel.count(),
        "pid": os.getpid(),
        "started": time.time(),
    }
