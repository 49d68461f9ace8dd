"""The learning rate over the optimizer steps: a pure function of the step, and what makes an optimizer follow it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from slurm_train.config.schema import ScheduleConfig
from slurm_train.errors import UserError

NAMES = ("constant", "linear", "cosine")


def factor(schedule: ScheduleConfig, step: int, total: int | None) -> float:
    """The factor of the learning rate in the optimizer step that comes after `step` others.

    The last step of the warm-up is the first one at the full rate; without warm-up that is the very first. The floor
    is reached in step number `schedule.steps`, and kept after it.

    Args:
        schedule: the `train.schedule` group of the configuration.
        step: optimizer steps done.
        total: optimizer steps of the whole run, the default of `schedule.steps`; None if unknown.

    Raises:
        UserError: the schedule is unknown, or has to end but nobody knows where.
    """
    if schedule.name not in NAMES:
        raise UserError(f"unknown schedule {schedule.name!r}", "train.schedule.name", f"use {' or '.join(NAMES)}")
    end = schedule.steps if schedule.steps is not None else total
    if end is None and schedule.name != "constant":
        raise UserError(
            f"the {schedule.name} schedule has to end, and the length of the run is not known",
            "train.schedule.steps",
            "set it, or train.max_steps",
        )
    number, peak = step + 1, max(schedule.warmup, 1)
    if number <= peak:
        return number / peak
    if schedule.name == "constant" or end is None:
        return 1.0
    progress = min((number - peak) / (end - peak), 1.0) if end > peak else 1.0
    left = 1 - progress if schedule.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return schedule.floor + (1 - schedule.floor) * left


def follow(
    optimizer: torch.optim.Optimizer, schedule: ScheduleConfig, total: int | None, step_of: Callable[[], int]
) -> None:
    """Set the rate of every parameter group now, and again before each step of the optimizer.

    A group's full rate is its `lr` at this call, kept as its `initial_lr`. The rate depends on nothing but `step_of`,
    so that a resumed run has the rates of one that never stopped.

    Args:
        optimizer: any optimizer; an `lr` that is a tensor stays that tensor.
        schedule: the `train.schedule` group of the configuration.
        total: optimizer steps of the whole run; None if unknown.
        step_of: gives the number of optimizer steps done.

    Raises:
        UserError: as `factor`.
    """
    fields = ("name", "warmup", "steps", "floor")
    schedule = ScheduleConfig(**{field: getattr(schedule, field) for field in fields})  # a DictConfig is slow to read

    def set_rates(*_: Any) -> None:
        now = factor(schedule, step_of(), total)
        for group in optimizer.param_groups:
            full = group.setdefault("initial_lr", float(group["lr"]))
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(full * now)
            else:
                group["lr"] = full * now

    if schedule.name == "constant" and schedule.warmup <= 1:
        return
    set_rates()
    optimizer.register_step_pre_hook(set_rates)
