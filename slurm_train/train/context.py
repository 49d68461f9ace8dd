"""What a training function is handed: everything it needs, ready, on one rank or on many."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from slurm_train.data.batches import Batch, EvalBatches, TrainBatches
from slurm_train.errors import Saved
from slurm_train.report.rundir import RunDirectory
from slurm_train.topology.grid import Grid
from slurm_train.train.callbacks import Callbacks
from slurm_train.train.checkpoint import CheckpointStore
from slurm_train.train.ema import Ema
from slurm_train.train.evaluate import evaluate
from slurm_train.train.gradients import clip_gradients
from slurm_train.train.log import RunLog
from slurm_train.train.loss_scale import LossScale
from slurm_train.train.losses import LossLog
from slurm_train.train.mesh import Mesh
from slurm_train.train.parallel import ParallelModel
from slurm_train.train.process import World
from slurm_train.train.profile import Steps
from slurm_train.train.saves import Saves
from slurm_train.train.state import TIED, require_fit, restore, tensors_of
from slurm_train.train.step import Step
from slurm_train.train.stop import StopFlag
from slurm_train.train.weights import MicroWeights


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
            for batch in context.batches(epoch):
                loss = context.forward_backward(batch)
                context.update()
                context.step_done(loss)
            context.epoch_done()

    `forward_backward` knows micro-batches, pipelines, sharded losses and the scale that fp16 needs. Where a run has
    none of these a function may also do that part by itself:

        inputs, targets, weight = batch
        loss = context.loss(context.model(inputs), targets) * weight
        loss.backward()

    where `weight` makes the average over the ranks of their mean losses the mean over the global batch.
    """

    config: DictConfig
    """The whole configuration."""

    world: World
    """Rank, local rank, world size, device, and collective helpers."""

    mesh: Mesh
    """The device mesh: sizes of its axes, and this rank's place."""

    directory: RunDirectory
    """The run directory. Only rank 0 writes there; `log` and `checkpoints` see to it."""

    parallel: ParallelModel
    """The model, on the device, parallel already."""

    compute: Step
    """How the layout computes gradients and outputs."""

    weigh: MicroWeights
    """How much each micro-batch counts."""

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
    """Writes and reads checkpoints."""

    saves: Saves
    """Has them written when they are due."""

    callbacks: Callbacks
    """The callbacks of the configuration."""

    stop: StopFlag
    """Set by a signal; agreed by all ranks in `step_done`."""

    ema: Ema | None = None
    """The average of the weights, if there is one; it is updated after each step of the optimizer."""

    scale: LossScale | None = None
    """The scale of the loss under fp16."""

    profile: Steps | None = None
    """Hears of each step, to trace some of them."""

    position: Position = field(default_factory=Position)
    """Steps and epochs done."""

    finished: str = ""
    """Why training ends before the last epoch; empty while it goes on."""

    def __post_init__(self) -> None:
        self._clip = self.config.train.grad_clip
        self._limit = self.config.train.max_steps or float("inf")
        self._save_steps = self.config.train.save_steps
        self._hears_steps = self.callbacks.has("on_step")
        self._parameters = self.parallel.parameters()
        self._pp_group = self.mesh.group("pp")
        self._epoch_ended = False
        self._samples = 0.0
        self._since = time.perf_counter()
        self.seconds = 0.0
        self.samples_seen = 0.0

    @property
    def model(self) -> nn.Module:
        """The model as it is to be called; a pipeline's only by `forward_backward`."""
        return self.parallel.module

    @property
    def grid(self) -> Grid:
        """Sizes of the axes of the device mesh."""
        return self.mesh.grid

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None if it is not known."""
        train, per_epoch = self.config.train, self.train.steps_per_epoch
        if per_epoch is None:
            return train.max_steps  # type: ignore[no-any-return]
        return min(per_epoch * train.epochs, train.max_steps or per_epoch * train.epochs)

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

    def forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradients of a batch to the parameters, in micro-batches, under any layout.

        Returns:
            a detached scalar whose mean over all ranks is the mean loss of the global batch, for `step_done`.
        """
        return self.compute.forward_backward(batch, self.scale.value if self.scale else 1.0)

    def update(self) -> None:
        """Clip the gradients by train.grad_clip, take a step of the optimizer, and clear the gradients."""
        if self.scale is None:
            self.clip_gradients()
            self.optimizer.step()
        else:
            norm = clip_gradients(self._parameters, self._clip, self._pp_group, self.scale.value)
            if self.scale.update(norm):
                self.optimizer.step()
        self.optimizer.zero_grad()

    def clip_gradients(self) -> None:
        """Bound the gradient norm by train.grad_clip, where that is set."""
        if self._clip is not None:
            clip_gradients(self._parameters, self._clip, self._pp_group)

    def step_done(self, loss: Tensor) -> None:
        """Count a step and keep its loss.

        Raises:
            Saved: the ranks agreed to stop; the state has been saved.
        """
        self.position.step += 1
        self.position.batch += 1
        if self.profile is not None:
            self.profile.step()
        if self._hears_steps:
            self.callbacks.call("on_step", self)
        stopping = self.losses.add(loss, self.position.step, self.position.epoch)
        due = self._save_steps is not None and self.position.step % self._save_steps == 0
        if due and not stopping:
            stopping = self.losses.flush(self.position.step, self.position.epoch)
        if due or stopping:
            self.save(required=stopping)
            self.losses.restart_clock()
        if stopping:
            self._leave()

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
        last = self.position.epoch >= self.config.train.epochs or self._at_end()
        self.save(metrics, required=stopping or last)
        if stopping:
            self._leave()

    def finish(self, reason: str) -> None:
        """End training after this epoch; called on all ranks alike, e.g. by a callback."""
        self.finished = reason
        self.log.message(f"training ends: {reason}")

    def evaluate(self, batches: EvalBatches | None, name: str) -> dict[str, float]:
        """Loss, and accuracy or perplexity, over `batches`, written to the metrics as <name>_loss and so on."""
        if batches is None:
            return {}
        with self.averaged():
            results = evaluate(self.parallel, self.compute, batches, self.loss, self.weigh, self.world)
        metrics = {f"{name}_{key}": value for key, value in results.items()}
        epoch = self.position.epoch
        self.log.metrics([{"step": self.position.step, "epoch": epoch, **metrics, "time": time.time()}])
        return metrics

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the model has its averaged weights, where there is an average."""
        return self.ema.swapped(self.model) if self.ema else nullcontext()

    def save(self, metrics: Mapping[str, float] | None = None, required: bool = True) -> None:
        """Save a checkpoint of this moment. Collective.

        Args:
            metrics: of this moment, by which the best checkpoints are kept.
            required: whether the run ends if it cannot be written; else a few in a row may fail.

        Raises:
            CheckpointError: it cannot be written, on any rank.
        """
        self.parallel.agree_on_buffers()
        extra = {
            "position": vars(self.position).copy(),
            "callbacks": self.callbacks.state_dict(),
            "grid": self.grid.axes(),
            "random": self.world.gather(random_state(self.device)),
            "scale": self.scale.state_dict() if self.scale else {},
            TIED: dict(self.parallel.whole.aliases),
        }
        ema = self.ema.tensors() if self.ema else None
        tensors = tensors_of(*self._tensors(), self.optimizer, ema)
        self.saves.save(self.position.step, tensors, extra, metrics or {}, required)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint. Collective.

        Raises:
            UserError: it is of another model or optimizer.
        """
        require_fit(self.checkpoints.sizes(path), self.parallel.whole.shapes)
        ema = self.ema.tensors() if self.ema else None
        restore(self.checkpoints, path, *self._tensors(), self.optimizer, ema)
        extra = self.checkpoints.extra(path)
        self.position = Position(**extra["position"])
        self.callbacks.load_state_dict(extra["callbacks"])
        if self.scale and extra["scale"]:
            self.scale.load_state_dict(extra["scale"])
        if extra["grid"] == self.grid.axes():  # else a rank that is to draw as its neighbours do might not
            set_random_state(extra["random"][self.world.info.rank], self.device)

    def restore_model(self, path: Path) -> None:
        """Take the weights of a checkpoint, and its place; the optimizer stays as it is. Collective.

        Raises:
            UserError: it is of another model.
        """
        require_fit(self.checkpoints.sizes(path), self.parallel.whole.shapes)
        restore(self.checkpoints, path, *self._tensors(), None, self.ema.tensors() if self.ema else None)
        self.position = Position(**self.checkpoints.extra(path)["position"])

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This rank's parameters and persistent buffers by the whole model's names."""
        return dict(self.parallel.named_parameters()), dict(self.parallel.named_buffers())

    def _at_end(self) -> bool:
        return bool(self.finished) or self.position.step >= self._limit

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
