"""A model's size and planned layers, found by building it on the meta device: JSON in, JSON out, for `plan --deep`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from slurm_train.errors import SlurmTrainError, UserError
from slurm_train.models.layers import SHARDED_SIZE, Layer
from slurm_train.train.blocks import block_names
from slurm_train.train.recompute import recompute
from slurm_train.train.stages import check_ties, stage_starts
from slurm_train.train.targets import build
from slurm_train.train.tensor import declared_plan, resolve_plan, tied_names


def inspect(question: dict[str, Any]) -> dict[str, Any]:
    """Build the model that a question describes.

    Args:
        question: search (directories of the user's files), model (its config), plan (tensor-parallel plan, or empty),
            tp (its ranks), blocks (parallel.blocks), cuts (parallel.cuts), stages (number of pipeline stages),
            recompute (train.recompute).

    Returns:
        parameters (their number) and layers (each that the plan shards, as a slurm_train.models.layers.Layer); or
        faults (key, message, remedy of each).
    """
    sys.path[:0] = question["search"]
    arguments = {key: value for key, value in question["model"].items() if key != "init_from"}
    try:
        with torch.device("meta"), contextlib.redirect_stdout(sys.stderr):
            model = build(OmegaConf.create({"model": arguments}).model, "model")
        if not isinstance(model, nn.Module):
            target = question["model"]["_target_"]
            raise UserError(f"{target} gave a {type(model).__name__}, not a torch.nn.Module", "model")
        plan = {}
        if question["tp"] > 1:
            plan = resolve_plan(model, question["plan"] or declared_plan(model), question["tp"])
        blocks = block_names(model, question["blocks"])
        if question["recompute"] is not None:
            recompute({name: model.get_submodule(name) for name in blocks}, model, question["recompute"])
        if question["stages"] > 1:
            check_ties(model, stage_starts(model, blocks, question["cuts"], question["stages"]))
    except SlurmTrainError as error:
        return {"faults": [[fault.key, fault.message, fault.remedy] for fault in error.faults]}
    layers = [asdict(layer) for layer in _layers(model, plan, blocks)]
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "layers": layers}


def _layers(model: nn.Module, plan: Mapping[str, str], blocks: Sequence[str]) -> list[Layer]:
    """The linear layers and embeddings that a plan shards, in the order of the model."""
    again = {name for group in tied_names(model) for name in group[1:]}
    layers = []
    for name, module in model.named_modules():
        if plan.get(name, "") in SHARDED_SIZE:
            block = next((place for place, block in enumerate(blocks) if f"{name}.".startswith(f"{block}.")), None)
            layers.append(_layer(name, module, plan[name], block, f"{name}.weight" in again))
    return layers


def _layer(name: str, module: Any, style: str, block: int | None, tied: bool) -> Layer:
    if isinstance(module, nn.Embedding):
        sizes = (module.num_embeddings, module.embedding_dim)
        return Layer(name, *sizes, style, bias=False, block=block, lookup=True, tied=tied)
    sizes = (module.in_features, module.out_features)
    return Layer(name, *sizes, style, bias=module.bias is not None, block=block, tied=tied)


if __name__ == "__main__":
    print(json.dumps(inspect(json.load(sys.stdin))))
