"""Python processes that this package starts: the environment in which they find it, and questions that they answer."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import slurm_train
from slurm_train.errors import ConfigError, Fault, SlurmTrainError


def importable(env: Mapping[str, str]) -> dict[str, str]:
    """`env`, with the directory that holds this package on PYTHONPATH.

    A package that is installed is found anyway; one in a clone only where `python -m` was typed.
    """
    root = str(Path(slurm_train.__file__).parents[1])
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root in paths or root in site.getsitepackages():
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join([*paths, root])}


def ask(module: str, question: Mapping[str, Any], about: str, cwd: str | None = None) -> dict[str, Any]:
    """What a module of the training side, run in a process of its own, answers to a question.

    Args:
        module: reads JSON from its input and prints JSON as its last line.
        question: plain data.
        about: what the question is about, for the case that there is no answer.
        cwd: where the process runs.

    Raises:
        SlurmTrainError: the faults in the answer, or there is none.
    """
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        cwd=cwd,
        env=importable(os.environ),
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines() or ["its process ended without a word"]
        raise SlurmTrainError(f"{about} could not be looked at: {lines[-1]}") from None
    if "faults" in answer:
        faults = [Fault(*fault) for fault in answer["faults"]]
        if answer.get("exit_code", 2) == 2:
            raise ConfigError(faults)
        raise SlurmTrainError(faults[0].message, faults[0].key, faults[0].remedy)
    return answer
