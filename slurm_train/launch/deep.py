"""A closer look at a model: imported and built without memory for its weights, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from slurm_train.errors import ConfigError, Fault, SlurmTrainError
from slurm_train.launch.children import importable
from slurm_train.launch.plan import LaunchPlan


def look(plan: LaunchPlan, config: DictConfig) -> LaunchPlan:
    """The plan with the model's real size and layers.

    Raises:
        ConfigError: the model does not import, cannot be built, or does not fit the layout; the real cause is told.
    """
    question = {
        "search": [plan.cwd, *plan.config_dirs],
        "model": OmegaConf.to_container(config.model, resolve=True),
        "plan": OmegaConf.to_container(config.parallel.plan),
        "tp": plan.grid["tp"],
        "blocks": list(config.parallel.blocks),
    }
    done = subprocess.run(
        [sys.executable, "-m", "slurm_train.train.inspect_model"],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        cwd=plan.cwd,
        env=importable(os.environ),
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise SlurmTrainError(f"the model could not be looked at: {_last_line(done.stderr)}", "model") from None
    if "faults" in answer:
        raise ConfigError([Fault(*fault) for fault in answer["faults"]])
    checked = tuple(note for note in plan.unchecked if not note.startswith("model"))
    return replace(plan, parameters=answer["parameters"], layers=tuple(answer["layers"]), unchecked=checked)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "its process ended without a word"
