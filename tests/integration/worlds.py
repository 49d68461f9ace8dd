"""Worlds of real gloo ranks for tests: spawned once, kept alive, and handed one function after another.

    def mean_rank(offset: float) -> float: ...        # at the top of a test module

    def test_mean(world):
        assert world(2).run(mean_rank, 1.0) == [1.5, 1.5]

The ranks are spawned processes with one thread each, whose default process group is ready. They import the
function by its name and get pickled arguments. A world in which a rank raised or hung is ended, and the next
call starts it anew, so that no test sees what another one left half done. Ranks end with their parent.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tests.conftest import speaks_of_ranks

START_SECONDS = 120.0
GRACE_SECONDS = 2.0  # for the other ranks to tell their own trouble after one rank raised


class WorldError(RuntimeError):
    """Ranks raised, died or hung. `failures` maps each such rank to its traceback or to what happened."""

    def __init__(self, failures: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
        self.failures = failures


class World:
    """`size` ranks on this host, started at the first `run`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    @property
    def pids(self) -> list[int | None]:
        """The process ids of the living ranks, in rank order; empty before the start and after a failure."""
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call `function(*args)` on all ranks at once and return their results in rank order.

        Args:
            function: a function at the top of a module.
            args: picklable arguments, the same for all ranks.
            timeout: seconds until ranks that have not answered are killed.

        Raises:
            WorldError: a rank raised, died or did not answer in time.
        """
        if not self._processes:
            self._start()
        call = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        return self._gather(timeout)

    def close(self) -> None:
        """End all ranks, killing those that do not leave by themselves."""
        for pipe in self._pipes:
            pipe.close()  # end of file: an idle rank returns
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._store.port, rank, self.size))
            process.start()
            theirs.close()  # else the death of the rank would not close the pipe
            self._pipes.append(mine)
            self._processes.append(process)
        self._gather(START_SECONDS)

    def _gather(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(zip(self._pipes, range(self.size), strict=True))
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                raised, value = self._receive(rank)
                (failures if raised else results)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not failures:
            failures = {rank: f"no answer within {timeout:g} s" for rank in waiting.values()}
        if failures:
            self._kill()
            raise WorldError(failures)
        return [results[rank] for rank in range(self.size)]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(GRACE_SECONDS)
            return True, f"died with exit code {self._processes[rank].exitcode}"

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


class Worlds:
    """One world of each size that was asked for; a context manager that ends them all."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def get(self, size: int) -> World:
        """The world of `size` ranks."""
        return self._worlds.setdefault(size, World(size))

    def __enter__(self) -> Worlds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for world in self._worlds.values():
            world.close()


def _serve(pipe: Connection, port: int, rank: int, size: int) -> None:
    """The life of a rank: join the world, then answer calls until the pipe closes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in filter(speaks_of_ranks, list(os.environ)):
        del os.environ[name]

    def join() -> None:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    _answer(pipe, join)
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            dist.destroy_process_group()
            return
        _answer(pipe, lambda call=call: _call(call))


def _call(call: bytes) -> Any:
    function, args = pickle.loads(call)
    return function(*args)


def _answer(pipe: Connection, action: Callable[[], Any]) -> None:
    try:
        answer = pickle.dumps((False, action()))
    except BaseException:
        answer = pickle.dumps((True, traceback.format_exc()))
    pipe.send_bytes(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
