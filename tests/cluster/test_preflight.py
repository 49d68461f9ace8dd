"""A preflight on real nodes: all well, a node that cannot import torch, and one too many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.jobs import REPO, Cluster, slurm, wait_for_accounting, wait_for_job, wait_until
from tests.cluster.test_launcher import SHORT, command, ended, events, submit

PREFLIGHT = ("launcher.preflight=true", "launcher=slurm", "parallel=ddp", "train.max_steps=5")

BROKEN = """
import os, sys
if os.environ.get("SLURMD_NODENAME") in os.environ.get("BROKEN", "").split():
    sys.modules["torch"] = None  # as where its libraries cannot be loaded
"""


def broken(work: Path, *nodes: str) -> tuple[str, ...]:
    """Overrides by which torch cannot be imported on some nodes."""
    folder = work / "broken"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BROKEN)
    return (f"launcher.env.PYTHONPATH={folder}:{REPO}", f"launcher.env.BROKEN='{' '.join(nodes)}'")


@pytest.fixture(autouse=True)
def idle() -> None:
    """All nodes are free, so that Slurm takes the first ones."""
    wait_until(lambda: set(slurm("sinfo", "-h", "-p", "debug", "-o", "%t").split()) == {"idle"}, 120, "idle nodes")


def report(run: Path, job: str, restart: int) -> dict[str, object]:
    return json.loads((run / "preflight" / f"{job}_{restart}.json").read_text())


def test_good_nodes_are_told_with_figures_and_the_ranks_start(shared_tmp: Path) -> None:
    job, run = submit(*SHORT, *PREFLIGHT, "launcher.nodes=2", "launcher.tasks_per_node=2", cwd=shared_tmp)
    ended(job, run, timeout=150)
    told = report(run, job, 0)
    assert len(told["nodes"]) == 2 and told["fault"] == ""
    (event,) = events(run, "preflight")
    assert event["nodes"] == 2 and event["job"] == job
    assert event["figures"]["all-reduce"][0] > 0 and abs(event["figures"]["clock"][1]) < 1
    log = (run / "logs" / f"{job}_batch.log").read_text()
    for node, figures in told["nodes"].items():
        assert set(figures) >= {"directory", "memory", "disk", "write", "torch", "devices", "clock", "all-reduce"}
        assert any(line.split()[0] == node and figures["torch"] in line for line in log.splitlines() if line)
    assert list((run / "preflight").iterdir()) == [run / "preflight" / f"{job}_0.json"]
    assert events(run, "started")[0]["world_size"] == 4


def test_a_failing_node_is_named_and_left_out(shared_tmp: Path) -> None:
    words = (*SHORT, *PREFLIGHT, *broken(shared_tmp, "n1"), "launcher.nodes=2", "launcher.exclude=n4")
    job, run = submit(*words, cwd=shared_tmp)
    wait_until(lambda: "excluded" in str(events(run, "preflight")), 150, "the first preflight")
    ended(job, run, timeout=150)
    first, second = events(run, "preflight")
    assert first["excluded"] == ["n1"]
    assert first["fault"].startswith("node n1 fails its preflight: torch: ModuleNotFoundError")
    assert first["fault"].endswith(f"job {job} goes back into the queue without n1")
    assert sorted(report(run, job, 1)["nodes"]) == ["n2", "n3"] and "fault" not in second
    assert slurm("squeue", "-h", "-t", "all", "-j", job, "-o", "%x") == "n[1,4]"
    assert len(events(run, "done")) == 1


def cause(run: Path, job: str) -> str:
    """What status tells of a job that has failed with exit code 1."""
    assert wait_for_job(job, timeout=150) == "FAILED"
    wait_for_accounting(job)
    told = json.loads(command("status", str(run), "--json", cwd=run.parent).stdout)
    assert told["exit_code"] == 1
    return str(told["cause"])


def test_a_second_failure_and_a_job_that_needs_all_nodes_end_clearly(shared_tmp: Path, own_cluster: Cluster) -> None:
    bad = broken(shared_tmp, "n1", "n2")
    twice = submit(*SHORT, *PREFLIGHT, *bad, "launcher.exclude='n[3-4]'", "run.dir=twice", cwd=shared_tmp)
    told = cause(twice[1], twice[0])
    first, second = (event["fault"][:7] for event in events(twice[1], "preflight"))
    assert {first, second} == {"node n1", "node n2"}
    assert told.startswith(f"{second} fails its preflight: torch: ")
    assert told.endswith(f"; the job ends, for it was requeued once already, without {first.removeprefix('node ')}")
    whole = submit(*SHORT, *PREFLIGHT, *bad, "launcher.nodes=4", "run.dir=whole", cwd=shared_tmp)
    told = cause(whole[1], whole[0])
    assert told.startswith("node n1 fails its preflight: torch: ") and "(so do n2); the job ends, for without" in told
    assert not events(whole[1], "started")
