"""The training loop. A user's own is a function like this one, named by train.loop._target_."""

from __future__ import annotations

from slurm_train.train.context import Context


def train(context: Context) -> None:
    """Train until the last epoch, train.max_steps, or an early stop.

    Args:
        context: the run, ready to train; see slurm_train.train.context.
    """
    for epoch in context.epochs():
        for batch in context.batches(epoch):
            loss = context.forward_backward(batch)
            context.update()
            context.step_done(loss)
        context.epoch_done()
