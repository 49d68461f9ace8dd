"""The inline launcher: this process is already one rank of the run, and does its part."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from slurm_train.errors import RunDirectoryError, Saved
from slurm_train.launch.plan import LaunchPlan
from slurm_train.launch.runs import resume_command
from slurm_train.task import Creation, Task

SHARED_DISK_SECONDS = 60.0
"""How long a rank waits to see the files that rank 0 has changed."""


def run(plan: LaunchPlan, config_yaml: str) -> dict[str, Any]:
    """Be this rank until the run is done.

    Rank 0 makes a new run directory once the ranks have met. For a run that goes on, the files must be there.

    Args:
        plan: what to run.
        config_yaml: text of the run's config.yaml.

    Returns:
        the final metrics.

    Raises:
        SlurmTrainError: whatever the run ends with.
    """
    create = None if plan.continues else Creation(config_yaml, plan.to_json())
    try:
        return Task(plan.run_dir, plan.verb, create, live=True)()
    except Saved as saved:
        remedy = f"go on with: {resume_command(plan.verb, Path(plan.run_dir))}"
        raise Saved(saved.faults[0].message, remedy=remedy) from saved


def wait_for(file: Path, text: str) -> None:
    """Wait until rank 0 has written `text` into `file`.

    Raises:
        RunDirectoryError: it is not seen in time.
    """
    deadline = time.monotonic() + SHARED_DISK_SECONDS
    while file.read_text(encoding="utf-8") != text:
        if time.monotonic() > deadline:
            remedy = "use a disk that all nodes share"
            raise RunDirectoryError(f"{file} does not show what rank 0 has written", remedy=remedy)
        time.sleep(0.05)
