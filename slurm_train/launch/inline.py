"""The inline launcher: this process is already one rank of the run, and does its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurm_train.errors import Saved
from slurm_train.launch.plan import LaunchPlan
from slurm_train.launch.runs import resume_command
from slurm_train.task import Settings, Task


def run(plan: LaunchPlan, config_yaml: str) -> dict[str, Any]:
    """Be this rank until the run is done.

    Rank 0 makes a new run directory once the ranks have met.

    Args:
        plan: what to run.
        config_yaml: text of the run's config.yaml.

    Returns:
        the final metrics.

    Raises:
        SlurmTrainError: whatever the run ends with.
    """
    settings = Settings(config_yaml, plan.to_json())
    try:
        return Task(plan.run_dir, plan.verb, settings, create=not plan.continues, live=True, options=plan.options)()
    except Saved as saved:
        made = Path(plan.run_dir, "config.yaml").exists()  # not if it was stopped before
        remedy = f"go on with: {resume_command(plan.verb, Path(plan.run_dir))}" if made else ""
        raise Saved(saved.faults[0].message, remedy=remedy) from saved
