"""For tests on a real Slurm cluster: they are marked `slurm`, and skipped with the reason where none answers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import REPO, Cluster, marker, may_be_root

FOLDER = Path(__file__).parent
DEFAULT = Path(os.environ.get("CLUSTER_DIR", "/opt/slurm-train-cluster")) / "slurm.conf"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.slurm)


def complaint() -> str:
    """Why no cluster answers, in one line; empty if one does."""
    config = os.environ.get("SLURM_CONF")
    if config and not Path(config).exists():  # sinfo would search the network for one
        return f"SLURM_CONF={config} does not exist"
    try:
        done = subprocess.run(["sinfo", "-h", "-o", "%P"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"sinfo failed: {error}"
    return "" if done.returncode == 0 else f"sinfo failed: {' '.join(done.stderr.split())}"


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[Cluster]:
    """The cluster that SLURM_CONF names, else the project's own if it is up; without one, all is skipped."""
    found = "SLURM_CONF" not in os.environ and DEFAULT.exists()
    if found:
        os.environ["SLURM_CONF"] = str(DEFAULT)
    try:
        if why := complaint():
            pytest.skip(f"no Slurm cluster answers ({why}); tests/cluster/cluster.sh up starts one")
        directory = Path(os.environ.get("SLURM_CONF", "/")).parent
        own = marker(directory).exists()
        if own and REPO.is_relative_to("/tmp") and not (directory / "tmp" / "n1" / REPO.relative_to("/tmp")).exists():
            pytest.skip(
                "the nodes do not see this clone below /tmp; tests/cluster/cluster.sh up, run here, shows it to them"
            )
        yield Cluster(directory if own else None)
    finally:
        if found:
            del os.environ["SLURM_CONF"]


@pytest.fixture(scope="session")
def own_cluster(cluster: Cluster) -> Cluster:
    """The project's own cluster, for tests that cut, kill or change it; skipped on any other."""
    if cluster.directory is None:
        pytest.skip("only on the cluster of tests/cluster/cluster.sh: this test changes it")
    if not may_be_root():
        pytest.skip("tests/cluster/cluster.sh needs root, or sudo without a password")
    return cluster


@pytest.fixture
def limits(cluster: Cluster) -> None:
    """Skips the test where a job's memory and devices are not limited."""
    if cluster.directory is None:
        pytest.skip(
            "only on the cluster of tests/cluster/cluster.sh: it tells whether it enforces memory and device limits"
        )
    words = (cluster.directory / "limits").read_text().strip()
    if words != "enforced":
        pytest.skip(f"this cluster enforces no memory and device limits ({words})")


@pytest.fixture(scope="session")
def shared_root(cluster: Cluster) -> Iterator[Path]:
    """A directory of this session that the nodes see too, for what tests share; its jobs end with it."""
    parent = cluster.directory / "work" if cluster.directory else REPO / "runs"
    parent.mkdir(exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="tests-", dir=parent))
    before = jobs()
    yield root
    cancel(new_jobs(before, root))
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def shared_tmp(shared_root: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory of this test that the nodes see too: `tmp_path` lies below /tmp, and each node has its own."""
    name = re.sub(r"\W+", "_", request.node.name)[:40]
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=shared_root))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_jobs_left(clean_environment: None, shared_tmp: Path) -> Iterator[None]:
    """Cancels the jobs that a test left behind, before its directory goes; fails nothing.

    Whoever else works on the cluster keeps his: the test's jobs came from this session or lie in its directory.
    """
    before = jobs()
    yield
    cancel(new_jobs(before, shared_tmp))


def jobs() -> dict[str, str]:
    """The user's queued and running jobs: id to working directory and comment."""
    lines = ask("squeue", "--me", "-h", "-o", "%A|%Z|%k")
    return {line.partition("|")[0]: line.partition("|")[2] for line in lines}


def new_jobs(before: dict[str, str], directory: Path) -> list[str]:
    """The jobs since `before` that this process's session submitted, or that speak of the directory."""
    session = str(os.getsid(0))
    ours = {
        line.split()[0] for line in ask("squeue", "--me", "-h", "-O", "JobID,AllocSID") if line.split()[1] == session
    }
    return [job for job, words in jobs().items() if job not in before and (job in ours or directory.name in words)]


def cancel(ids: list[str]) -> None:
    """Cancel jobs and wait until they have left the nodes."""
    if not ids:
        return
    ask("scancel", *ids)
    for _ in range(60):
        if not ask("squeue", "-h", "-o", "%A", "-j", ",".join(ids)):
            return
        ask("sleep", "0.25")


def ask(*words: str) -> list[str]:
    """The lines a command prints; none if it fails, as while a test has taken the cluster apart."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []
