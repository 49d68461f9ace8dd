"""The weights of a run as one file, for use without this project: JSON in, JSON out, for the verb `export`.

Runs in one process without the model and without a process group: names, sizes and dtypes are in the checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slurm_train.errors import CheckpointError, SlurmTrainError, UserError
from slurm_train.report.rundir import RunDirectory
from slurm_train.train.checkpoint import CheckpointStore
from slurm_train.train.state import EMA, MODEL, TIED

SUFFIXES = (".safetensors", ".pt", ".pth")


def export(run: str | Path, output: str | Path, ema: bool = False, checkpoint: str = "") -> str:
    """Write the weights in a checkpoint to a file: parameters and buffers under the names of the whole model.

    A .pt or .pth file holds a flat state dict. A tied parameter has all of its names there; a .safetensors file cannot
    share memory, so it has the first name, and the others in its metadata.

    Args:
        run: the run directory.
        output: the file, a new one: .safetensors, .pt or .pth.
        ema: write the averaged weights, where there are any; buffers have none.
        checkpoint: name of the checkpoint, e.g. step_000100; "" takes the newest whole one.

    Returns:
        a line about what was written.

    Raises:
        UserError: the output is of another kind or exists; there is no such checkpoint, or no average in it.
        CheckpointError: the checkpoint named is broken.
    """
    output = Path(output)
    if output.suffix not in SUFFIXES:
        raise UserError(f"{output} has none of the suffixes {', '.join(SUFFIXES)}")
    if output.exists():
        raise UserError(f"{output} exists already", remedy="choose another name, or remove it")
    if not output.absolute().parent.is_dir():
        raise UserError(f"{output.absolute().parent} is not a directory")
    store = CheckpointStore(RunDirectory.open(run).checkpoints)
    path = _named(store, checkpoint) if checkpoint else _newest(store)
    weights = _weights(store, path, ema)
    step = int(path.name.removeprefix("step_"))
    beside = output.with_name(f".{output.name}.tmp")
    try:
        _write(beside, output.suffix, weights, step, store.extra(path).get(TIED, {}))
        size = beside.stat().st_size
        beside.rename(output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from None
    finally:
        beside.unlink(missing_ok=True)
    values = sum(tensor.numel() for tensor in weights.values())
    kind = "averaged weights" if ema else "weights"
    return f"{output}: {kind} of step {step:,}, {len(weights):,} tensors, {values:,} values, {size:,} bytes"


def _newest(store: CheckpointStore) -> Path:
    path, broken = store.newest()
    if path is None:
        found = f"; {broken[0]}" if broken else ""
        raise UserError(f"{store.directory.parent} has no whole checkpoint{found}", remedy="let it end an epoch first")
    return path


def _named(store: CheckpointStore, name: str) -> Path:
    path = store.directory / name
    if not path.is_dir():
        there = ", ".join(sorted(found.name for found in store.directory.glob("step_*")))
        raise UserError(f"{store.directory.parent} has no checkpoint {name}", remedy=f"it has {there or 'none'}")
    if fault := store.fault(path):
        raise CheckpointError(f"checkpoint {name} is broken: {fault}")
    return path


def _weights(store: CheckpointStore, path: Path, ema: bool) -> dict[str, Tensor]:
    """Name -> weight, whole and on the CPU."""
    outline = store.outline(path)
    if ema and not any(saved.startswith(EMA) for saved in outline):
        raise UserError(f"{path.name} has no averaged weights", "train.ema", "export without --ema")
    sources = {}
    for saved in outline:
        if saved.startswith(MODEL):
            name = saved.removeprefix(MODEL)
            sources[name] = EMA + name if ema and EMA + name in outline else saved
    tensors = {saved: torch.empty_like(outline[saved], device="cpu") for saved in sources.values()}
    store.load(path, tensors)
    return {name: tensors[saved] for name, saved in sources.items()}


def _write(path: Path, suffix: str, weights: Mapping[str, Tensor], step: int, tied: Mapping[str, str]) -> None:
    if suffix == ".safetensors":
        save_file(dict(weights), path, metadata={"format": "pt", "step": str(step), **tied})
    else:
        torch.save({**weights, **{alias: weights[name] for alias, name in tied.items()}}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Export what a question describes.

    Args:
        question: the arguments of `export`.

    Returns:
        line (for the user); or faults (key, message, remedy of each) and exit_code.
    """
    try:
        return {"line": export(**question)}
    except SlurmTrainError as error:
        faults = [[fault.key, fault.message, fault.remedy] for fault in error.faults]
        return {"faults": faults, "exit_code": error.exit_code}


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
