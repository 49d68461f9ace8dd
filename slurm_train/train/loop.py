"""The training loop. A user's own is a function like this one, named by train.loop._target_."""

from __future__ import annotations

from slurm_train.train.context import Context


def train(context: Context) -> None:
    """Train until the last epoch, train.max_steps, or an early stop.

    Args:
        context: the run, ready to train; see slurm_train.train.context.
    """
    model, loss_of, optimizer = context.model, context.loss, context.optimizer
    for epoch in context.epochs():
        for inputs, targets, weight in context.batches(epoch):
            loss = loss_of(model(inputs), targets)
            if weight != 1.0:
                loss = loss * weight
            loss.backward()
            context.clip_gradients()
            optimizer.step()
            optimizer.zero_grad()
            context.step_done(loss)
        context.epoch_done()
