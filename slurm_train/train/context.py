"""What a training function is handed: everything it needs, ready, on one rank or on many."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from slurm_train.data.batches import Batch, EvalBatches, TrainBatches
from slurm_train.errors import Saved
from slurm_train.report.rundir import RunDirectory
from slurm_train.topology.grid import Grid
from slurm_train.train.callbacks import Callbacks
from slurm_train.train.checkpoint import CheckpointStore, load_model, load_optimizer, training_state
from slurm_train.train.evaluate import evaluate
from slurm_train.train.log import RunLog
from slurm_train.train.losses import LossLog
from slurm_train.train.parallel import clip_gradients
from slurm_train.train.process import World
from slurm_train.train.stop import StopFlag


@dataclass
class Position:
    """How far training has come."""

    step: int = 0
    """Optimizer steps done."""

    epoch: int = 0
    """Epochs done."""

    batch: int = 0
    """Steps done in the epoch after those."""


@dataclass
class Context:
    """A run, seen from one rank.

    A training function is called with it, and does at least this:

        for epoch in context.epochs():
            for inputs, targets, weight in context.batches(epoch):
                loss = context.loss(context.model(inputs), targets) * weight
                loss.backward()
                context.optimizer.step()
                context.optimizer.zero_grad()
                context.step_done(loss)
            context.epoch_done()

    `weight` makes the average over the ranks of their mean losses the mean over the global batch.
    """

    config: DictConfig
    """The whole configuration."""

    world: World
    """Rank, local rank, world size, device, and collective helpers."""

    grid: Grid
    """Sizes of the axes of the device mesh."""

    mesh: DeviceMesh | None
    """The device mesh; None for a single rank."""

    directory: RunDirectory
    """The run directory. Only rank 0 writes there; `log` and `checkpoints` see to it."""

    model: nn.Module
    """The model, on the device, parallel already."""

    optimizer: torch.optim.Optimizer
    """The optimizer of its parameters."""

    loss: Callable[[Tensor, Tensor], Tensor]
    """The loss function: (outputs, targets) -> mean loss."""

    train: TrainBatches
    """Training batches of this data rank."""

    validation: EvalBatches | None
    """Held-out batches, if any."""

    test: EvalBatches | None
    """Test batches, if there are any."""

    log: RunLog
    """Where to write events and words for the user."""

    losses: LossLog
    """Collects the loss of each step."""

    checkpoints: CheckpointStore
    """Saves and finds checkpoints."""

    callbacks: Callbacks
    """The callbacks of the configuration."""

    stop: StopFlag
    """Set by a signal; agreed by all ranks in `step_done`."""

    position: Position = field(default_factory=Position)
    """Steps and epochs done."""

    finished: str = ""
    """Why training ends before the last epoch; empty while it goes on."""

    def __post_init__(self) -> None:
        self._clip = self.config.train.grad_clip
        self._limit = self.config.train.max_steps or float("inf")
        self._hears_steps = self.callbacks.has("on_step")
        self._epoch_ended = False
        self._samples = 0.0
        self._since = time.perf_counter()
        self.seconds = 0.0
        self.samples_seen = 0.0

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    def epochs(self) -> Iterator[int]:
        """The epochs still to do, from where the checkpoint left off."""
        while self.position.epoch < self.config.train.epochs and not self._at_end():
            yield self.position.epoch

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The batches still to do in an epoch. Ends early at train.max_steps."""
        self._epoch_ended = False
        self._samples = 0
        self.losses.restart_clock()
        self._since = time.perf_counter()
        # Read once: a look into the configuration costs a few percent of a small model's step.
        size, samples = self.train.batch_size, self.train.samples or float("inf")
        for batch in self.train.epoch(epoch, start=self.position.batch):
            self._samples += min(size, samples - self.position.batch * size)
            yield batch
            if self.position.step >= self._limit:
                break
        self._epoch_ended = self.position.step < self._limit or self.position.batch == self.train.steps_per_epoch

    def clip_gradients(self) -> None:
        """Bound the gradient norm by train.grad_clip, where that is set."""
        if self._clip is not None:
            clip_gradients(self.model, self._clip)

    def step_done(self, loss: Tensor) -> None:
        """Count a step and keep its loss.

        Raises:
            Saved: the ranks agreed to stop; the state has been saved.
        """
        self.position.step += 1
        self.position.batch += 1
        if self._hears_steps:
            self.callbacks.call("on_step", self)
        if self.losses.add(loss, self.position.step, self.position.epoch):
            self._save_and_stop()

    def epoch_done(self) -> None:
        """Validate, tell the callbacks, decide on early stopping, and save a checkpoint."""
        stopping = self.losses.flush(self.position.step, self.position.epoch)
        seconds = time.perf_counter() - self._since
        self.seconds += seconds
        self.samples_seen += self._samples
        epoch = self.position.epoch
        metrics = self.evaluate(self.validation, "val")
        self.log.event(
            "epoch",
            epoch=epoch,
            step=self.position.step,
            seconds=seconds,
            samples_per_s=self._samples / seconds,
            **metrics,
        )
        if self._epoch_ended:
            self.position.epoch += 1
            self.position.batch = 0
        self.callbacks.call("on_epoch", self, metrics)
        self.save()
        if stopping:
            self._leave()

    def finish(self, reason: str) -> None:
        """End training after this epoch; called on all ranks alike, e.g. by a callback."""
        self.finished = reason
        self.log.message(f"training ends: {reason}")

    def evaluate(self, batches: EvalBatches | None, name: str) -> dict[str, float]:
        """Loss and accuracy over `batches`, written to the metrics as <name>_loss and <name>_accuracy."""
        if batches is None:
            return {}
        counts = self.grid.coordinates(self.world.info.rank)["tp"] == 0
        results = evaluate(self.model, batches, self.loss, self.world, counts)
        metrics = {f"{name}_{key}": value for key, value in results.items()}
        epoch = self.position.epoch
        self.log.metrics([{"step": self.position.step, "epoch": epoch, **metrics, "time": time.time()}])
        return metrics

    def save(self) -> None:
        """Save a checkpoint of this moment. Collective."""
        state = training_state(self.model, self.optimizer)
        state["position"] = vars(self.position).copy()
        state["callbacks"] = self.callbacks.state_dict()
        state["random"] = self.world.gather(random_state(self.device))
        path = self.checkpoints.save(self.position.step, state)
        self.log.event("saved", step=self.position.step, path=str(path))

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state. Collective."""
        load_model(self.model, state)
        load_optimizer(self.model, self.optimizer, state)
        self.position = Position(**state["position"])
        self.callbacks.load_state_dict(state["callbacks"])
        if len(state["random"]) == self.world.info.world_size:
            set_random_state(state["random"][self.world.info.rank], self.device)

    def _at_end(self) -> bool:
        return bool(self.finished) or self.position.step >= self._limit

    def _save_and_stop(self) -> None:
        self.save()
        self._leave()

    def _leave(self) -> None:
        self.log.event("stopped", reason=self.stop.reason or "another rank was asked to", step=self.position.step)
        raise Saved(f"stopped by {self.stop.reason or 'a signal to another rank'}, saved at step {self.position.step}")


def random_state(device: torch.device) -> list[Tensor]:
    """The states of the random generators that a rank draws from: the CPU's, and its GPU's."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Go on drawing where `random_state` was taken."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
