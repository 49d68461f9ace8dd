"""Try one node before the ranks of a job start on it, and tell what is found, a line for each check.

    srun --ntasks-per-node=1 python -u -m slurm_train.train.preflight RUN [--gpus=N]

First what the node is by itself (preflight_host, preflight_device), then, where nothing is wrong with that, how it gets
on with the others (preflight_network). The batch shell reads the lines and judges: slurm_train.launch.preflight. Torch
is imported by a check, so that a node on which that fails can say so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_train.report.preflight import DONE, Finding
from slurm_train.train import preflight_host as host

SECONDS = 110.0
"""How long all checks may take: less than the batch shell waits, so that the one that does not end is named."""


class Preflight:
    """The checks of one node, done one after the other and told at once.

    Args:
        node: its name.
    """

    def __init__(self, node: str) -> None:
        self.node = node
        self.well = True
        self._current = ""

    def check(self, name: str, measure: Callable[[], host.Figure]) -> None:
        """Do a check and tell what it has found.

        Args:
            name: of the check.
            measure: does it; raises NodeFault, or anything else, where something is wrong.
        """
        self._current = name
        try:
            figure = measure()
            self._tell(Finding(self.node, name, figure.text, figure.value))
        except host.NodeFault as fault:
            self.well = False
            self._tell(Finding(self.node, name, fault.figure.text, fault.figure.value, str(fault), fault.blames))
        except Exception as error:
            self.well = False
            self._tell(Finding(self.node, name, fault=f"{type(error).__name__}: {' '.join(str(error).split())}"))

    def limit(self, seconds: float) -> None:
        """End this process after so long, and name the check that did not end."""

        def give_up() -> None:
            self._tell(Finding(self.node, self._current, fault=f"not at its end within {seconds:g} s of the preflight"))
            os._exit(0)

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()

    def done(self) -> None:
        """Say that there is no more to come."""
        self._tell(Finding(self.node, DONE))

    def _tell(self, found: Finding) -> None:
        sys.stdout.write(found.line() + "\n")
        sys.stdout.flush()


def node_name() -> str:
    """This node as Slurm calls it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def try_node(preflight: Preflight, run_dir: Path, gpus: int) -> None:
    """All checks.

    Args:
        preflight: tells what they find.
        run_dir: the run directory.
        gpus: devices that this node is to have.
    """
    preflight.check("directory", lambda: host.directory(run_dir))
    needs = host.needs(_plan(run_dir), gpus)
    preflight.check("memory", lambda: host.memory(needs.host))
    preflight.check("/dev/shm", host.shared_memory)
    preflight.check("disk", lambda: host.disk(run_dir, needs.disk))
    preflight.check("write", lambda: host.write_speed(run_dir / "preflight" / f".write-{preflight.node}"))
    preflight.check("torch", _torch)
    if preflight.well:
        from slurm_train.train.preflight_device import devices

        preflight.check("devices", lambda: devices(gpus, needs.device))
    if preflight.well:
        from slurm_train.train.preflight_network import try_network

        try_network(preflight, run_dir, gpus)


def _plan(run_dir: Path) -> dict[str, object]:
    try:
        plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the check of the directory tells
        return {}
    return plan if isinstance(plan, dict) else {}


def _torch() -> host.Figure:
    import torch

    return host.Figure(torch.__version__)


def main(arguments: Sequence[str]) -> None:
    """Try this node."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--gpus", type=int, default=0, help="devices that this node is to have")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the warning before the time limit is meant for the ranks
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a finding says in one line what torch's stacks do in forty
    preflight = Preflight(node_name())
    preflight.limit(SECONDS)
    try_node(preflight, given.run, given.gpus)
    preflight.done()
    sys.stdout.flush()
    os._exit(0)  # not to wait for a process group whose peers have gone


if __name__ == "__main__":
    main(sys.argv[1:])
