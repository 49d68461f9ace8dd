"""The training loop of `benchmarks/parallel.py --growth`: the usual one, with this project's own CPU time counted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_train.train.context import Context

COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier", "gather_object")


class Aside:
    """CPU seconds of this thread inside some functions; of calls within calls the outermost counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def put(self, owner: Any, name: str) -> None:
        """Count the calls of `owner.name` from now on."""
        setattr(owner, name, self.wrap(getattr(owner, name)))

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time counts."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            since = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - since
                self._inside = False

        return counted


def train(context: Context, folder: str, warm_up: int) -> None:
    """Train to train.max_steps in one epoch, and write this rank's CPU seconds per step to a file in `folder`.

    Its own are those of the main thread less the model, the loss, backward, the optimizer's step and the collectives:
    so batches, weights, clipping, the log and the clearing of gradients remain.
    """
    aside, yardstick = Aside(), Aside()
    modules = ((nn.Module, "__call__"), (Tensor, "backward"), (context.optimizer, "step"))
    for owner, name in (*modules, *((dist, name) for name in COLLECTIVES)):
        aside.put(owner, name)
    measure = yardstick.wrap(reference)
    vectors = list(torch.ones(20, 64))
    since = 0.0
    for epoch in context.epochs():
        for batch in context.batches(epoch):
            loss = context.forward_backward(batch)
            context.update()
            measure(vectors)  # as cold as the project's own code is: the optimizer has just gone through its state
            context.step_done(loss)
            if context.position.step == warm_up:
                aside.seconds = yardstick.seconds = 0.0
                since = time.thread_time()
        break
    steps = context.position.step - warm_up
    own = time.thread_time() - since - aside.seconds - yardstick.seconds
    result = {"own": own / steps, "reference": yardstick.seconds / steps}
    Path(folder, f"{context.world.info.rank}.json").write_text(json.dumps(result))


def reference(vectors: list[Tensor]) -> dict[str, float]:
    """A fixed piece of work of the kind that a loop does for itself: small tensors, small Python objects."""
    norms = torch.stack([vector.square().sum() for vector in vectors]).tolist()
    return {f"norm {number}": norm for number, norm in enumerate(norms)}
