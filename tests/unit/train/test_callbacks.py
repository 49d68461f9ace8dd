"""Callbacks are called if they have the hook, and early stopping counts."""

import pytest

from slurm_train.errors import UserError
from slurm_train.train.callbacks import Callbacks, EarlyStopping


class Run:
    """Stands for the context: remembers why it was told to finish."""

    reason = ""

    def finish(self, reason):
        self.reason = reason


def test_only_hooks_that_exist_are_called():
    class OnStep:
        steps = 0

        def on_step(self, context):
            self.steps += 1

    member = OnStep()
    callbacks = Callbacks({"mine": member})
    callbacks.call("on_step", None)
    callbacks.call("on_end", None)
    assert member.steps == 1
    assert callbacks.has("on_step") and not callbacks.has("on_end")


def test_a_callback_without_any_hook_is_refused():
    with pytest.raises(UserError, match=r"train\.callbacks\.mine: object has none of on_start"):
        Callbacks({"mine": object()})


@pytest.mark.parametrize(
    ("metric", "values", "stops_after"),
    [
        ("val_loss", [1.0, 0.9, 0.95, 0.91], 4),
        ("val_loss", [1.0, 0.9, 0.8, 0.7], None),
        ("val_loss", [float("nan"), 0.9, 0.8], None),
        ("val_accuracy", [0.5, 0.6, 0.6, 0.6], 4),
        ("val_loss", [float("nan")] * 3, 2),
    ],
)
def test_early_stopping(metric, values, stops_after):
    run, early = Run(), EarlyStopping(metric, patience=2)
    stopped = None
    for epoch, value in enumerate(values, start=1):
        early.on_epoch(run, {metric: value})
        if run.reason and stopped is None:
            stopped = epoch
    assert stopped == stops_after


def test_early_stopping_goes_on_counting_after_a_resume():
    run, early = Run(), EarlyStopping("val_loss", patience=2)
    for value in (1.0, 1.1):
        early.on_epoch(run, {"val_loss": value})
    resumed = EarlyStopping("val_loss", patience=2)
    Callbacks({"early": resumed}).load_state_dict(Callbacks({"early": early}).state_dict())
    resumed.on_epoch(run, {"val_loss": 1.2})
    assert run.reason == "val_loss has not improved for 2 epochs"
