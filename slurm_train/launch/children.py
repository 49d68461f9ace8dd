"""The environment in which this package is found by the Python processes that it starts."""

from __future__ import annotations

import os
import site
from collections.abc import Mapping
from pathlib import Path

import slurm_train


def importable(env: Mapping[str, str]) -> dict[str, str]:
    """`env`, with the directory that holds this package on PYTHONPATH.

    A package that is installed is found anyway; one in a clone only where `python -m` was typed.
    """
    root = str(Path(slurm_train.__file__).parents[1])
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root in paths or root in site.getsitepackages():
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join([*paths, root])}
