"""The checks of a preflight in real processes, each of them a node: what they say, and what is then judged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_train.launch.preflight import Answers, verdict
from slurm_train.report.preflight import DONE, finding
from slurm_train.topology.hostlist import compress_counts
from slurm_train.topology.jobs import scrub
from slurm_train.train.preflight_network import neighbour

REPO = Path(__file__).parents[2]
NODES = ("localhost", "n2", "n3")  # the first one is looked up

SICK = """
import sys
from slurm_train.train import preflight, preflight_network
{}
preflight_network.MEET_SECONDS = {meet}
preflight_network.SHARED_SECONDS = 2.0
preflight_network.REDUCE_SECONDS = 4.0
preflight_network.PAIR_SECONDS = 4.0
preflight.main(sys.argv[1:])
"""
"""A node with something wrong."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "preflight").mkdir()
    (tmp_path / "plan.json").write_text("{}")
    return tmp_path


def nodes(run: Path, count: int, sick: dict[int, str] | None = None, meet: float = 60.0) -> Answers:
    """What nodes say.

    Args:
        run: the run directory.
        count: how many.
        sick: node -> code that makes it so.
        meet: seconds in which they must have met.
    """
    shape = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": run.name,
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NODELIST": ",".join(NODES[:count]),
        "SLURM_STEP_TASKS_PER_NODE": compress_counts([1] * count),
        "SLURM_LOCALID": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
    }
    processes = []
    for number in range(count):
        own = {"SLURM_PROCID": str(number), "SLURM_NODEID": str(number), "SLURMD_NODENAME": NODES[number]}
        code = SICK.format((sick or {}).get(number, ""), meet=meet)
        processes.append(
            subprocess.Popen(
                [sys.executable, "-u", "-c", code, str(run)],
                env={**scrub(os.environ), **shape, **own},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    answers = Answers()
    for process in processes:
        output, _ = process.communicate(timeout=150)
        answers.findings += filter(None, map(finding, output.splitlines()))
        assert process.returncode == 0
    return answers


def faults(answers: Answers) -> dict[str, str]:
    """Node -> the check that was not passed."""
    return {found.node: found.check for found in answers.findings if found.fault}


def checks(answers: Answers, node: str) -> list[str]:
    return [found.check for found in answers.findings if found.node == node]


BY_ITSELF = ["directory", "memory", "/dev/shm", "disk", "write", "torch", "devices"]
TOGETHER = ["meet", "clock", "shared", "all-reduce"]


def test_three_good_nodes(run: Path) -> None:
    answers = nodes(run, 3)
    assert faults(answers) == {}
    for node in NODES:
        assert checks(answers, node) == [*BY_ITSELF, *TOGETHER, DONE]
    assert all(found.value for found in answers.findings if found.check == "all-reduce")
    assert verdict(NODES, answers).fault == ""
    assert list((run / "preflight").iterdir()) == []


def test_a_single_node(run: Path) -> None:
    answers = nodes(run, 1)
    assert faults(answers) == {} and checks(answers, "localhost") == [*BY_ITSELF, DONE]


def judged(run: Path, sick: dict[int, str], count: int = 3, meet: float = 60.0) -> Sequence[str]:
    """The nodes that are found at fault, and the line about it."""
    found = verdict(NODES[:count], nodes(run, count, sick, meet))
    return [*found.failing, found.fault]


AHEAD = "import time; right = time.time; time.time = lambda: right() + 60"


def test_a_clock_that_is_ahead(run: Path) -> None:
    assert judged(run, {1: AHEAD}, 2) == [
        "n2", "node n2 fails its preflight: clock: 60.0 s ahead of localhost, at most 5 s"
    ]  # fmt: skip


@pytest.mark.slow
def test_torch_that_cannot_be_imported_is_told_and_the_others_do_not_wait_for_ever(run: Path) -> None:
    broken = {2: "def torch(): raise ImportError('libc10.so: cannot open')\npreflight._torch = torch"}
    node, line = judged(run, broken, meet=8.0)
    assert (node, line) == ("n3", "node n3 fails its preflight: torch: ImportError: libc10.so: cannot open")


WRONG_SUM = """
import torch, torch.distributed as dist
right = dist.all_reduce
def all_reduce(numbers):
    right(numbers.add_(1))
dist.all_reduce = all_reduce
"""

DEAF = """
import torch.distributed as dist
def all_reduce(numbers):
    raise RuntimeError("no route to host")
dist.all_reduce = all_reduce
"""


CASES = [(WRONG_SUM, "the sum of all nodes is wrong"), pytest.param(DEAF, "", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("sick", "what"), CASES, ids=["wrong", "deaf"])
def test_the_node_with_which_adding_up_fails_is_found(run: Path, sick: str, what: str) -> None:
    node, line = judged(run, {1: sick})
    assert node == "n2" and line.startswith(f"node n2 fails its preflight: all-reduce: {what}")


def test_another_disk_under_the_same_name(run: Path) -> None:
    node, line = judged(run, {1: "preflight_network._text = lambda path: ''"}, 2)
    assert node == "n2" and "what localhost writes into" in line and "is not seen within 2 s" in line


def test_a_check_without_an_end_is_named(run: Path) -> None:
    hangs = "import time; preflight.SECONDS = 6.0; preflight.host.write_speed = lambda path: time.sleep(600)"
    assert judged(run, {0: hangs}, 1) == [
        "localhost", "node localhost fails its preflight: write: not at its end within 6 s of the preflight"
    ]  # fmt: skip


@pytest.mark.parametrize("size", range(2, 9))
def test_each_node_adds_up_with_both_neighbours(size: int) -> None:
    met = set()
    for turn in range(3):
        for rank in range(size):
            if (peer := neighbour(rank, size, turn)) is not None:
                assert neighbour(peer, size, turn) == rank
                met.add(frozenset((rank, peer)))
    assert met == {frozenset((rank, (rank + 1) % size)) for rank in range(size)}
