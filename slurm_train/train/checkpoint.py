"""Checkpoints: whole states under plain names, written beside and renamed, the newest good one found again.

A checkpoint is the state of a single process, whatever layout wrote it: sharded parameters are gathered, DDP's prefix
is taken off, so that it loads under any layout and world size.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from slurm_train.errors import CheckpointError
from slurm_train.train.process import World

STATE, MANIFEST = "state.pt", "manifest.json"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
LENIENT = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and optimizer state, whole and on the CPU. Collective; complete on rank 0 only."""
    return {
        "model": get_model_state_dict(model, options=WHOLE),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=WHOLE),
    }


def load_model(model: nn.Module, state: dict[str, Any]) -> None:
    """Load whole weights into a model of any layout. Collective.

    Raises:
        CheckpointError: names or shapes do not fit the model.
    """
    try:
        set_model_state_dict(model, state["model"], options=WHOLE)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the checkpoint does not fit the model: {reason}") from None


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load whole optimizer state, by parameter name. Collective.

    Learning rate and the like stay those of the configuration, so that they can be changed on a resume.
    """
    if not state["optimizer"]["state"]:  # plain SGD has none, and torch cannot load none
        return
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=LENIENT)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the checkpoint does not fit the optimizer: {reason}") from None
    for name, parameter in model.named_parameters():
        if name.removeprefix("module.") not in state["optimizer"]["state"]:
            optimizer.state.pop(parameter, None)  # it had none: it never got a gradient
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)


class CheckpointStore:
    """The checkpoints of one run: directories `step_<number>`, each with its state and a manifest of checksums.

    Args:
        directory: where they lie.
        world: all ranks; rank 0 writes and reads the directory.
        keep: how many of the newest to keep; 0 keeps all.
    """

    def __init__(self, directory: Path, world: World, keep: int = 0) -> None:
        self.directory = directory
        self._world = world
        self._keep = keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint; it appears under its name only when it is whole and on disk.

        All ranks wait until rank 0 has written it, so that none ends, and takes the job with it, before.
        """
        path = self.directory / f"step_{step:06d}"
        if self._world.is_main:
            beside = self.directory / f".step_{step:06d}.tmp"
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            with (beside / STATE).open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            with (beside / MANIFEST).open("w") as file:
                json.dump({"step": step, "files": {STATE: _sha256(beside / STATE)}}, file)
                file.flush()
                os.fsync(file.fileno())
            aside = self.directory / f".step_{step:06d}.old"
            shutil.rmtree(aside, ignore_errors=True)
            if path.exists():  # written again after a resume from an older one
                path.rename(aside)
            beside.rename(path)
            shutil.rmtree(aside, ignore_errors=True)
            self._remove_old(path)
        self._world.barrier()
        return path

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest whole checkpoint, and a line for each newer one that is broken. Read by rank 0 only."""
        broken = []
        for path in reversed(self._paths()):
            fault = _fault(path)
            if not fault:
                return path, broken
            broken.append(f"checkpoint {path.name} is left out: {fault}")
        return None, broken

    def load(self, path: Path) -> dict[str, Any]:
        """The state in a checkpoint, on the CPU. Runs no code from the file."""
        state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
        return state

    def _paths(self) -> list[Path]:
        """All checkpoints, oldest first, by number: step_9000 comes before step_10000."""
        numbered = [(re.fullmatch(r"step_(\d+)", path.name), path) for path in self.directory.glob("step_*")]
        return [path for _, path in sorted((int(match[1]), path) for match, path in numbered if match)]

    def _remove_old(self, newest: Path) -> None:
        """Keep the newest ones up to the one just written; higher numbers are broken, or of a future that was left."""
        paths = self._paths()
        for path in paths[: paths.index(newest) + 1][: -self._keep] if self._keep else []:
            shutil.rmtree(path)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fault(path: Path) -> str:
    """What is wrong with a checkpoint; empty when it is whole."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        changed = [name for name, checksum in files.items() if _sha256(path / name) != checksum]
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
    return f"the checksum of {changed[0]} is wrong" if changed else ""
