"""The training loop of `benchmarks/parallel.py --growth`: the usual one, with this project's own CPU time counted."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from slurm_train.train.context import Context

COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier", "gather_object")
LOOK_SECONDS = 0.05


class Aside:
    """CPU seconds of this thread inside some functions; of calls within calls the outermost counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.inside = False

    def put(self, owner: Any, name: str) -> None:
        """Count the calls of `owner.name` from now on."""
        setattr(owner, name, self.wrap(getattr(owner, name)))

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time counts."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            self.inside = True
            since = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - since
                self.inside = False

        return counted


class Calls:
    """Counts the calls of functions, Python's and C's, outside of what is put aside."""

    def __init__(self, aside: Aside) -> None:
        self.number = 0
        self._aside = aside

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """For sys.setprofile."""
        self.number += event in ("call", "c_call") and not self._aside.inside


def train(context: Context, folder: str, warm_up: int, counted: int, processes: int) -> None:
    """Train to train.max_steps in one epoch, and write this rank's figures per step to a file in `folder`.

    Its own CPU seconds are those of the main thread less the model, the loss, backward, the optimizer's step and the
    collectives: so batches, weights, clipping, the log and the clearing of gradients remain. After the warm-up it waits
    until so many processes, of this world and of others beside it, have come as far; after `counted` more steps its
    calls are counted instead, which no other process disturbs.
    """
    aside = Aside()
    modules = ((nn.Module, "__call__"), (Tensor, "backward"), (context.optimizer, "step"), (dist.Work, "wait"))
    for owner, name in (*modules, *((dist, name) for name in COLLECTIVES)):
        aside.put(owner, name)
    calls = Calls(aside)
    own = since = 0.0
    for epoch in context.epochs():
        for batch in context.batches(epoch):
            loss = context.forward_backward(batch)
            context.update()
            context.step_done(loss)
            if context.position.step == warm_up:
                meet(Path(folder), processes)
                aside.seconds = 0.0
                since = time.thread_time()
            elif context.position.step == warm_up + counted:
                own = time.thread_time() - since - aside.seconds
                sys.setprofile(calls)
        break
    sys.setprofile(None)
    last = context.position.step - warm_up - counted
    figures = {"rank": context.world.info.rank, "own": own / counted, "calls": calls.number / last}
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(figures))


def meet(folder: Path, processes: int) -> None:
    """Wait until so many processes are here."""
    (folder / f"{os.getpid()}.here").touch()
    while sum(1 for _ in folder.glob("*.here")) < processes:
        time.sleep(LOOK_SECONDS)
