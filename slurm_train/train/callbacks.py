"""Callbacks: small objects whose methods are called at fixed places of a run, each by its `_target_`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from slurm_train.errors import UserError

if TYPE_CHECKING:
    from slurm_train.train.context import Context


class Callback(Protocol):
    """What a callback may have. It needs no base class, and only the methods that it wants; all ranks call them alike.

    A callback with `state_dict` and `load_state_dict` is saved in checkpoints.
    """

    def on_start(self, context: Context) -> None:
        """Before the first step, after a checkpoint was loaded."""

    def on_step(self, context: Context) -> None:
        """After each optimizer step."""

    def on_epoch(self, context: Context, metrics: Mapping[str, float]) -> None:
        """After each epoch, with its metrics (reduced over all ranks), before its checkpoint is written."""

    def on_end(self, context: Context) -> None:
        """After the last step."""


HOOKS = ("on_start", "on_step", "on_epoch", "on_end")


class Callbacks:
    """All callbacks of a run, called in the order of the configuration.

    Args:
        members: callbacks by name.

    Raises:
        UserError: one of them has none of the hooks, so that it would never be called.
    """

    def __init__(self, members: Mapping[str, Any]) -> None:
        for name, member in members.items():
            if not any(hasattr(member, hook) for hook in HOOKS):
                kind = type(member).__name__
                raise UserError(f"{kind} has none of {', '.join(HOOKS)}", f"train.callbacks.{name}")
        self._members = dict(members)
        self._hooks = {hook: [getattr(m, hook) for m in members.values() if hasattr(m, hook)] for hook in HOOKS}

    def call(self, hook: str, *arguments: Any) -> None:
        """Call `hook` of each callback that has it."""
        for method in self._hooks[hook]:
            method(*arguments)

    def has(self, hook: str) -> bool:
        """Whether any callback has this hook."""
        return bool(self._hooks[hook])

    def state_dict(self) -> dict[str, Any]:
        """The state of each callback that has one."""
        return {name: m.state_dict() for name, m in self._members.items() if hasattr(m, "state_dict")}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give each callback its state back."""
        for name, state in states.items():
            if hasattr(self._members.get(name), "load_state_dict"):
                self._members[name].load_state_dict(state)


class EarlyStopping:
    """Ends the run when a metric has not improved for `patience` epochs.

    The metrics are reduced over all ranks, so all ranks decide alike.

    Args:
        metric: val_loss (smaller is better) or val_accuracy (larger is better).
        patience: epochs without improvement that are allowed.
        min_delta: smallest change that counts.
    """

    def __init__(self, metric: str = "val_loss", patience: int = 3, min_delta: float = 0.0) -> None:
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.best = math.inf
        self.bad_epochs = 0

    def on_epoch(self, context: Context, metrics: Mapping[str, float]) -> None:
        """Count epochs without improvement; finish the run after too many."""
        value = metrics[self.metric] if self.metric == "val_loss" else -metrics[self.metric]
        if value < self.best - self.min_delta:  # never true of NaN
            self.best, self.bad_epochs = value, 0
            return
        self.bad_epochs += 1
        if self.bad_epochs >= self.patience:
            context.finish(f"{self.metric} has not improved for {self.bad_epochs} epochs")

    def state_dict(self) -> dict[str, Any]:
        """Best value and the count."""
        return {"best": self.best, "bad_epochs": self.bad_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.best, self.bad_epochs = state["best"], state["bad_epochs"]
