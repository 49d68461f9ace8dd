"""For all tests: a clean environment around each, and the count of tests that ran on real Slurm."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("no timed tests", deadline=None)
settings.load_profile("no timed tests")

# A shell's background job (`.ci/run &`) is born deaf to Ctrl-C, and so would be what the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

RANK_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "JOB_COMPLETION_INDEX"}
RANK_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "PET_")
KEPT = {"SLURM_CONF"}  # says where the cluster is, not which rank this is
ON_SLURM = pytest.StashKey[set[str]]()


def speaks_of_ranks(name: str) -> bool:
    """Whether an environment variable could make this process look like a rank of some world."""
    return name not in KEPT and (name in RANK_NAMES or name.startswith(RANK_PREFIXES))


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """No variables of ranks or jobs in a test, and the environment as it was after it."""
    before = dict(os.environ)
    for name in filter(speaks_of_ranks, before):
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def one_thread(clean_environment: None) -> None:
    """One thread for torch, if the test's module uses it: small tensors gain nothing from more."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(trylast=True)  # after the folder of the cluster's tests has marked its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remember which tests are marked `slurm`: a report's keywords would also match a folder of that name."""
    config.stash[ON_SLURM] = {item.nodeid for item in items if item.get_closest_marker("slurm")}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of faults, and say how many tests marked `slurm` really ran."""
    if "tests.faults.table" in sys.modules:
        faults = sys.modules["tests.faults.table"]
        terminalreporter.section(f"{len(faults.ROWS)} faults")
        terminalreporter.write_line(faults.table())
    outcomes = ("passed", "failed")
    reports = [report for outcome in outcomes for report in terminalreporter.stats.get(outcome, [])]
    ran = {report.nodeid for report in reports} & config.stash.get(ON_SLURM, set())
    terminalreporter.write_line(f"{len(ran)} tests ran on real Slurm")
