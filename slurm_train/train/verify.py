"""A layout against one process, in lock step on the same data: do its losses, gradients and weights agree?

Rank 0 trains a second copy of the model as a single process beside the layout. After each step the loss, the norm of
the gradients and every weight are compared. Both run in fp32 and without dropout: the masks of a sharded layer cannot
be those of a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from slurm_train.errors import LayoutError
from slurm_train.report.table import aligned
from slurm_train.topology.ranks import SINGLE
from slurm_train.train.context import Context
from slurm_train.train.gradients import clip_gradients
from slurm_train.train.log import RunLog
from slurm_train.train.parallel import ParallelModel
from slurm_train.train.prepare import prepare
from slurm_train.train.process import World
from slurm_train.train.stop import StopFlag

LOSS, NORM, WEIGHT = 1e-4, 1e-3, 1e-5
"""What may differ by rounding: relative of losses and norms, absolute of weights."""

MOVED = 0.02
"""A weight may also differ by this part of how far its parameter has moved, for an optimizer that divides by tiny
gradients (AdamW) makes large differences of small ones."""

SHOWN = 12
"""Parameters in the table, those that differ most."""


@dataclass(frozen=True)
class Difference:
    """One step of a layout and of one process."""

    ours: tuple[float, float]
    """Loss and gradient norm of the layout."""

    theirs: tuple[float, float]
    """The same of one process."""

    worst: tuple[str, float]
    """The parameter that differs most after the step, and its largest absolute difference."""

    @property
    def loss(self) -> float:
        """Relative difference of the losses."""
        return _relative(self.ours[0], self.theirs[0])

    @property
    def norm(self) -> float:
        """Relative difference of the gradient norms."""
        return _relative(self.ours[1], self.theirs[1])

    @property
    def weight(self) -> float:
        """Largest absolute difference of a weight."""
        return self.worst[1]


def verify(layout: Context, steps: int) -> dict[str, float]:
    """Run `steps` steps under a layout and under one process.

    Args:
        layout: ready to train, from a configuration made `exact`.
        steps: optimizer steps.

    Returns:
        the largest differences: loss and gradient_norm relative, weight absolute; the same on all ranks.

    Raises:
        LayoutError: they do not agree.
    """
    world, log = layout.world, layout.log
    alone = _alone(layout) if world.is_main else None
    dropped = [_without_dropout(context.model) for context in (layout, alone) if context is not None]
    log.message("verify runs in fp32" + ", and with dropout 0 in place of the model's" * any(dropped))
    start = {name: p.detach().clone() for name, p in alone.parallel.named_parameters()} if alone else {}
    found: list[Difference] = []
    weights: dict[str, float] = {}
    for ours, theirs in _lock_step(layout, alone, steps):
        weights = _compare_weights(layout.parallel, alone.parallel if alone else None)
        if alone:
            found.append(Difference(ours, theirs, max(weights.items(), key=lambda item: item[1])))
    wrong = _tell(log, found, weights, start, alone) if alone else 0
    figures = [(step.loss, step.norm, step.weight) for step in found] or [(0.0, 0.0, 0.0)]  # rank 0 alone has any
    worst = [max(column) for column in zip(*figures, strict=True)]
    loss, norm, weight, faults = world.sum(torch.tensor([*worst, float(wrong)], dtype=torch.double)).tolist()
    if faults:
        raise LayoutError(
            "the layout does not give what one process gives",
            "parallel",
            "look at the parameters that differ: their style in the plan, or what the model does with their shards",
        )
    return {"loss": loss, "gradient_norm": norm, "weight": weight}


def exact(config: DictConfig) -> DictConfig:
    """A configuration of which every layout must give the same numbers."""
    train = {"precision": "fp32", "async_save": False, "ema": None, "early_stopping": {"patience": 0}}
    return _changed(config, {"train": train})


def _alone(layout: Context) -> Context:
    """The same run as a single process."""
    parallel = {"name": "single", "pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1, "sequence": False}
    parallel |= {"loss_parallel": False, "cuts": [], "microbatches": None}
    train = {"micro_batch": None, "compile": False, "offload": False}
    world = World(SINGLE, layout.device, layout.world.threads, None)
    config = _changed(layout.config, {"parallel": parallel, "train": train})
    return prepare(config, world, layout.directory, RunLog(None), StopFlag())


def _lock_step(
    layout: Context, alone: Context | None, steps: int
) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """(loss, gradient norm) of the layout and of one process, step by step; zeros for what a rank does not have."""
    theirs = _steps(alone, steps) if alone else None
    for ours in _steps(layout, steps):
        yield ours, next(theirs) if theirs else (0.0, 0.0)


def _steps(context: Context, steps: int) -> Iterator[tuple[float, float]]:
    epoch, done = 0, 0
    while done < steps:
        for batch in context.train.epoch(epoch):
            loss = context.forward_backward(batch)
            parameters, limit = context.parallel.parameters(), context.config.train.grad_clip
            norm = clip_gradients(parameters, limit, context.mesh.group("pp"))
            context.optimizer.step()
            context.optimizer.zero_grad()
            context.position.step += 1
            done += 1
            total = context.world.sum(loss.detach().cpu().double().reshape(1)).item()
            yield total / context.world.info.world_size, norm.item()
            if done == steps:
                return
        epoch += 1


def _compare_weights(layout: ParallelModel, alone: ParallelModel | None) -> dict[str, float]:
    """Name -> largest absolute difference, on rank 0. Collective; holds one whole parameter at a time."""
    mine = dict(layout.named_parameters())
    theirs = dict(alone.named_parameters()) if alone else {}
    differences = {}
    for name in layout.whole.parameters:
        whole = _whole(mine.get(name), name, layout)
        if alone and whole is not None:
            differences[name] = (whole.cpu() - theirs[name].detach().cpu()).abs().max().item()
    return differences


def _whole(parameter: nn.Parameter | None, name: str, layout: ParallelModel) -> Tensor | None:
    """A whole parameter on rank 0, sent there by the first rank of the pipeline stage that holds it."""
    whole = None
    if parameter is not None:
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        whole = whole.detach()
    if layout.mesh.grid.pp == 1:
        return whole
    owner = layout.owners[name] * (layout.mesh.grid.world_size // layout.mesh.grid.pp)
    device = layout.mesh.devices.device_type  # type: ignore[union-attr]
    if owner and layout.mesh.rank == owner and whole is not None:
        dist.send(whole.to(device, torch.float32).contiguous(), 0)  # an offloaded one is on the CPU
    elif owner and layout.mesh.rank == 0:
        whole = torch.empty(layout.whole.shapes[name], device=device)
        dist.recv(whole, owner)
    return whole


def _tell(
    log: RunLog, found: list[Difference], weights: dict[str, float], start: dict[str, Tensor], alone: Context
) -> int:
    """Print the tables and the verdict; returns the number of things that are wrong."""
    moved = {
        name: (parameter.detach() - start[name]).abs().max().item()
        for name, parameter in alone.parallel.named_parameters()
    }
    wrong = [name for name, value in weights.items() if not value <= max(WEIGHT, MOVED * moved[name])]
    faults = [f"{len(wrong)} of {len(weights)} parameters ({', '.join(wrong[:4])})"] if wrong else []
    faults += ["the losses"] if not all(step.loss <= LOSS for step in found) else []
    faults += ["the gradient norms"] if not all(step.norm <= NORM for step in found) else []
    for line in [*_step_table(found), "", *_parameter_table(weights, moved, wrong)]:
        log.message(line)
    verdict = f"differs in {' and '.join(faults)}" if faults else "agrees with one process"
    log.message(f"verdict: the layout {verdict}")
    return len(faults)


def _step_table(found: list[Difference]) -> list[str]:
    rows = [["step", "loss", "differs by", "gradient norm", "differs by", "weights differ by", "most in"]]
    for number, step in enumerate(found, 1):
        values = [f"{step.ours[0]:.6f}", f"{step.loss:.1e}", f"{step.ours[1]:.6f}", f"{step.norm:.1e}"]
        rows.append([str(number), *values, f"{step.weight:.1e}", step.worst[0]])
    return aligned(rows).splitlines()


def _parameter_table(weights: dict[str, float], moved: dict[str, float], wrong: list[str]) -> list[str]:
    rows = [["parameter", "differs by", "has moved by", ""]]
    for name in sorted(weights, key=lambda key: -weights[key])[:SHOWN]:
        rows.append([name, f"{weights[name]:.1e}", f"{moved[name]:.1e}", "WRONG" if name in wrong else "agrees"])
    more = len(weights) - SHOWN
    return [*aligned(rows).splitlines(), *([f"and {more} more, which differ less"] if more > 0 else [])]


def _relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-12)


def _changed(config: DictConfig, changes: dict[str, object]) -> DictConfig:
    merged = OmegaConf.merge(config, changes)
    assert isinstance(merged, DictConfig)
    return merged


def _without_dropout(model: nn.Module) -> bool:
    """Set every dropout probability to 0; whether there was any."""
    found = False
    for module in model.modules():
        name = "p" if isinstance(module, _DropoutNd) else "dropout"
        if isinstance(getattr(module, name, None), float) and getattr(module, name) > 0:
            setattr(module, name, 0.0)
            found = True
    return found
