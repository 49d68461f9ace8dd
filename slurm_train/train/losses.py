"""The loss of every step, reduced over the ranks and written in blocks, with the stop flag on board.

A reduction a step would cost more than a small model's step, so losses are kept on the device and reduced together
about every `seconds`. How many steps that is, rank 0 decides from its own clock and tells the others in the very
reduction, so that all ranks reduce at the same steps.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from slurm_train.train.log import RunLog
from slurm_train.train.process import World
from slurm_train.train.stop import StopFlag

LARGEST_BLOCK = 1000


class LossLog:
    """Collects one loss a step.

    Args:
        world: the ranks over which losses are averaged.
        log: where the averages are written.
        stop: this rank's stop flag.
        seconds: about how often to reduce and write.
    """

    def __init__(self, world: World, log: RunLog, stop: StopFlag, seconds: float) -> None:
        self._world = world
        self._log = log
        self._stop = stop
        self._seconds = seconds
        self._pending: list[Tensor] = []
        self._block = 1
        self._since = time.perf_counter()

    def restart_clock(self) -> None:
        """Leave out of the pace what was not a training step (evaluation, saving)."""
        self._since = time.perf_counter()

    def add(self, loss: Tensor, step: int, epoch: int) -> bool:
        """Keep a step's loss; at the end of a block reduce and write it. True when the ranks agree to stop.

        Args:
            loss: this rank's weighted mean loss, a scalar; its average over the ranks is the global mean loss.
            step: optimizer steps done, this one included.
            epoch: the epoch it belongs to, from 0.
        """
        self._pending.append(loss.detach())
        if len(self._pending) < self._block:
            return False
        return self.flush(step, epoch)

    def flush(self, step: int, epoch: int) -> bool:
        """Reduce and write what is pending. True when any rank was asked to stop."""
        count = len(self._pending)
        losses = torch.stack(self._pending).cpu().double() if count else torch.empty(0, dtype=torch.double)
        pace = (time.perf_counter() - self._since) / max(count, 1)
        block = min(max(int(self._seconds / max(pace, 1e-9)), 1), LARGEST_BLOCK)
        agreed = torch.tensor([self._stop.requested, block if self._world.is_main else 0], dtype=torch.double)
        *means, stop, block = self._world.sum(torch.cat([losses / self._world.info.world_size, agreed])).tolist()
        self._block = int(block)
        self._pending.clear()
        self._since = time.perf_counter()
        now = time.time()
        first = step - count + 1
        self._log.metrics(
            [{"step": first + i, "epoch": epoch, "loss": loss, "time": now} for i, loss in enumerate(means)]
        )
        return stop > 0
