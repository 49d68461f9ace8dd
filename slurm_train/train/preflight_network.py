"""How the nodes of a job get on with each other: they meet, compare clocks and the shared disk, and add up numbers."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slurm_train.errors import StartError
from slurm_train.topology.device import backend
from slurm_train.topology.ranks import RankInfo, ranks
from slurm_train.topology.rendezvous import rendezvous
from slurm_train.train.meet import check_in, missing_ranks, open_store
from slurm_train.train.preflight_host import MIB, Figure, NodeFault

if TYPE_CHECKING:
    from slurm_train.train.preflight import Preflight

MEET_SECONDS = 40.0
SHARED_SECONDS = 10.0
REDUCE_SECONDS = 20.0
PAIR_SECONDS = 8.0
LEAVE_SECONDS = 5.0

CLOCK_SECONDS = 5.0
"""By how much clocks may differ: which event came first is told by their times."""

NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""How many are added up: 4 MiB, and 64 MiB on devices."""

ROUNDS = 3


def try_network(preflight: Preflight, run_dir: Path, gpus: int) -> None:
    """The checks between nodes; none on a single one.

    Args:
        preflight: tells what they find.
        run_dir: the run directory.
        gpus: devices of a node; their network is tried where there are any, by one device a node.
    """
    info = ranks(os.environ)
    if info.world_size == 1:
        return
    network = Network(info)
    preflight.check("meet", network.meet)
    if not preflight.well:
        return
    preflight.check("clock", network.clock)
    preflight.check("shared", lambda: network.shared(run_dir / "preflight" / ".shared"))
    preflight.check("all-reduce", lambda: network.all_reduce("cuda" if gpus else "cpu"))
    network.leave()


class Network:
    """The nodes of a job, as one of them sees the others.

    Args:
        info: this one; one rank a node.
    """

    def __init__(self, info: RankInfo) -> None:
        self._rank, self._size = info.rank, info.world_size
        self._info = info
        self._store: dist.Store = dist.HashStore()

    def meet(self) -> Figure:
        """Find the store of the first node, and wait there for all."""
        began = time.monotonic()
        try:
            self._store = open_store(rendezvous(os.environ, self._info), self._info, MEET_SECONDS)
        except StartError as error:
            raise NodeFault(str(error), blames=self._named([0]) if self._rank else ()) from None
        try:
            check_in(self._store, self._info, MEET_SECONDS)
        except StartError as error:
            missing = missing_ranks(self._store, self._size)
            raise NodeFault(str(error), blames=self._named(missing or [0])) from None
        seconds = time.monotonic() - began
        return Figure(f"{seconds:.1f} s", round(seconds, 2))

    def clock(self) -> Figure:
        """This clock against that of the first node, whose word is taken to be half a round trip old."""
        trips = []
        for _ in range(3):
            began = time.monotonic()
            self._store.add("trip", 0)
            trips.append(time.monotonic() - began)
        self._together("clocks", MEET_SECONDS)
        if not self._rank:
            self._store.set("clock", repr(time.time()))
        told = float(self._store.get("clock"))
        skew = time.time() - told - min(trips) / 2 if self._rank else 0.0
        figure = Figure(f"{skew:+.2f} s", round(skew, 3))
        if abs(skew) > CLOCK_SECONDS:
            apart = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} {self._named([0])[0]}"
            raise NodeFault(f"{apart}, at most {CLOCK_SECONDS:g} s", figure, self._named([self._rank, 0]))
        return figure

    def shared(self, path: Path) -> Figure:
        """Whether a file that the first node writes is seen here.

        Args:
            path: of the file, which is taken away again.
        """
        if not self._rank:
            path.write_text(token := secrets.token_hex(8), encoding="ascii")
            self._store.set("shared", token)
        token, deadline = self._store.get("shared").decode(), time.monotonic() + SHARED_SECONDS
        while (seen := _text(path)) != token and time.monotonic() < deadline:
            time.sleep(0.2)
        self._together("seen", 2 * SHARED_SECONDS)
        if not self._rank:
            path.unlink(missing_ok=True)
        if seen != token:
            fault = f"what {self._named([0])[0]} writes into {path.parent} is not seen within {SHARED_SECONDS:g} s"
            raise NodeFault(fault, blames=self._named([self._rank, 0]))
        return Figure("ok")

    def all_reduce(self, device: str) -> Figure:
        """Add up over all nodes; where that fails, over each two neighbours of a ring, to find out which is at fault.

        Args:
            device: cpu or cuda.

        Returns:
            the bandwidth that the network is used with: 2 (n - 1) / n x bytes / time ("busbw" in PERFORMANCE.md of
            NVIDIA's nccl-tests).
        """
        fault, seconds = self._add_up("all", self._rank, self._size, device, REDUCE_SECONDS)
        if fault:
            self._store.add("bad", 1)
        missing = self._together("reduced", REDUCE_SECONDS)
        _leave_group()
        if missing:
            raise NodeFault(f"not at its end within {2 * REDUCE_SECONDS:g} s", blames=self._named(missing))
        if not self._store.add("bad", 0):
            speed = 2 * (self._size - 1) / self._size * 4 * NUMBERS[device] / seconds / MIB
            return Figure(f"{speed:.0f} MiB/s", round(speed, 1))
        bad = self._bad_neighbours(device)
        raise NodeFault(fault or "it fails on other nodes", blames=self._named(bad or range(self._size)))

    def _bad_neighbours(self, device: str) -> list[int]:
        """The neighbours in the ring with which adding up fails."""
        bad = []
        for turn in range(3):
            peer = neighbour(self._rank, self._size, turn)
            if peer is not None:
                low, high = sorted((self._rank, peer))
                fault, _ = self._add_up(f"{low}-{high}", int(self._rank == high), 2, device, PAIR_SECONDS)
                bad += [peer] if fault else []
            self._together(f"turn {turn}", PAIR_SECONDS)
            _leave_group()
        return bad

    def _add_up(self, name: str, rank: int, size: int, device: str, timeout: float) -> tuple[str, float]:
        """What is wrong with adding up ("" for nothing), and the seconds of the fastest time."""
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # else NCCL ends the process when the time is up
        times = []
        try:
            dist.init_process_group(
                backend(device),
                store=dist.PrefixStore(name, self._store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
            for _ in range(1 + ROUNDS):  # the first one connects
                numbers = torch.full((NUMBERS[device],), float(rank + 1), device=device)
                began = time.monotonic()
                dist.all_reduce(numbers)
                total = int(numbers.sum(dtype=torch.float64).item())  # waits for the device
                times.append(time.monotonic() - began)
                if total != NUMBERS[device] * size * (size + 1) // 2:
                    return "the sum of all nodes is wrong", 0.0
        except (RuntimeError, ValueError) as error:
            return " ".join(str(error).split()), 0.0
        return "", min(times)

    def leave(self) -> None:
        """Say that this node needs the store no more. The first one, which keeps it, waits a little for all."""
        with suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "1")
            if not self._rank:
                self._store.wait([f"left/{rank}" for rank in range(self._size)], timedelta(seconds=LEAVE_SECONDS))

    def _together(self, name: str, seconds: float) -> list[int]:
        """Wait for all nodes; those that did not come in time."""
        with suppress(RuntimeError):
            self._store.set(f"{name}/{self._rank}", "1")
            if self._store.add(name, 1) == self._size:
                self._store.set(f"{name}/all", "1")
            self._store.wait([f"{name}/all"], timedelta(seconds=seconds))
            return []
        try:
            return [rank for rank in range(self._size) if not self._store.check([f"{name}/{rank}"])]
        except RuntimeError:  # the store has gone with its node
            return [0]

    def _named(self, these: list[int] | range) -> tuple[str, ...]:
        return tuple(self._info.hosts[rank] for rank in these)


def neighbour(rank: int, size: int, turn: int) -> int | None:
    """With whom a node adds up in a turn; None if with nobody. In three turns all neighbours of a ring have met, those
    of a ring of even length in two.

    >>> [[neighbour(rank, 3, turn) for rank in range(3)] for turn in range(3)]
    [[1, 0, None], [None, 2, 1], [2, None, 0]]
    """
    for edge, other in ((rank, (rank + 1) % size), ((rank - 1) % size, (rank - 1) % size)):
        last_of_odd = size % 2 and edge == size - 1
        if size > 2 and turn == (2 if last_of_odd else edge % 2):
            return other
    return 1 - rank if size == 2 and turn == 0 else None


def _leave_group() -> None:
    """Leave the process group; called when all have done with it, or as if."""
    with suppress(Exception):
        dist.destroy_process_group()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
