"""The training loop of benchmarks/memory.py: steps without a checkpoint."""

from __future__ import annotations

from slurm_train.train.context import Context


def few_steps(context: Context) -> None:
    """Train to train.max_steps in one epoch, and save nothing."""
    for epoch in context.epochs():
        for batch in context.batches(epoch):
            loss = context.forward_backward(batch)
            context.update()
            context.step_done(loss)
        return
