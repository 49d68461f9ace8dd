"""A model's size and planned layers, found by building it on the meta device: JSON in, JSON out, for `plan --deep`."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from slurm_train.errors import SlurmTrainError, UserError
from slurm_train.train.parallel import declared_plan, resolve_plan
from slurm_train.train.targets import build


def inspect(question: dict[str, Any]) -> dict[str, Any]:
    """Build the model that a question describes.

    Args:
        question: search (directories of the user's files), model (its config), plan (tensor-parallel plan, or empty),
            tp (its ranks).

    Returns:
        parameters (their number) and layers (name, in_features, out_features, style of each planned one); or faults
        (key, message, remedy of each).
    """
    sys.path[:0] = question["search"]
    try:
        with torch.device("meta"), contextlib.redirect_stdout(sys.stderr):
            model = build(OmegaConf.create({"model": question["model"]}).model, "model")
        if not isinstance(model, nn.Module):
            target = question["model"]["_target_"]
            raise UserError(f"{target} gave a {type(model).__name__}, not a torch.nn.Module", "model")
        plan = {}
        if question["tp"] > 1:
            plan = resolve_plan(model, question["plan"] or declared_plan(model), question["tp"])
    except SlurmTrainError as error:
        return {"faults": [[fault.key, fault.message, fault.remedy] for fault in error.faults]}
    layers = [_layer(name, model.get_submodule(name), style) for name, style in plan.items()]
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "layers": layers}


def _layer(name: str, module: Any, style: str) -> dict[str, Any]:
    return {"name": name, "in_features": module.in_features, "out_features": module.out_features, "style": style}


if __name__ == "__main__":
    print(json.dumps(inspect(json.load(sys.stdin))))
