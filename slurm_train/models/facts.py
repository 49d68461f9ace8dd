"""What the models of this project are made of, told without torch, so that `plan` can check a layout.

The modules build themselves from the same functions, so that plan and model cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slurm_train.errors import ConfigError, Fault
from slurm_train.models.layers import Layer, ModelFacts
from slurm_train.models.transformer_facts import transformer_facts


def mlp_facts(
    in_features: int = 784, width: int = 512, depth: int = 1, classes: int = 10, dropout: float = 0.0
) -> ModelFacts:
    """The layers of `slurm_train.models.mlp.MLP`: column- and row-wise in pairs, so that a pair costs one all-reduce.

    A last layer without a partner stays replicated. Dropout after a column-wise layer works on shards.
    """
    sizes = [in_features, *[width] * depth, classes]
    names = [*(f"hidden.{index}" for index in range(depth)), "head"]
    paired = len(names) - len(names) % 2
    styles = [("colwise", "rowwise")[index % 2] if index < paired else "" for index in range(len(names))]
    drops = {f"drops.{index}": "sharded" for index in range(depth) if dropout and styles[index] == "colwise"}
    plan = {name: style for name, style in zip(names, styles, strict=True) if style} | drops
    layers = zip(names, sizes, sizes[1:], styles, strict=False)
    return ModelFacts(tuple(Layer(name, inputs, outputs, style) for name, inputs, outputs, style in layers), plan=plan)


def cnn_facts(channels: int = 16, width: int = 128, classes: int = 10, dropout: float = 0.0) -> ModelFacts:
    """The layers of `slurm_train.models.cnn.CNN`: the convolutions are replicated, the two linear layers are a pair."""
    convolutions = (9 + 1) * channels + (9 * channels + 1) * 2 * channels
    products = 28 * 28 * 9 * channels + 14 * 14 * 9 * channels * 2 * channels
    hidden = Layer("hidden", 2 * channels * 7 * 7, width, "colwise")
    head = Layer("head", width, classes, "rowwise")
    plan = {"hidden": "colwise", "head": "rowwise"} | ({"drop": "sharded"} if dropout else {})
    return ModelFacts((hidden, head), convolutions, other_products=products, plan=plan)


def linear_regression_facts(features: int = 1) -> ModelFacts:
    """The one layer of `slurm_train.models.linear_regression.LinearRegression`; nothing to shard."""
    return ModelFacts((Layer("line", features, 1),))


FACTS: Mapping[str, Callable[..., ModelFacts]] = {
    "slurm_train.models.mlp.MLP": mlp_facts,
    "slurm_train.models.cnn.CNN": cnn_facts,
    "slurm_train.models.linear_regression.LinearRegression": linear_regression_facts,
    "slurm_train.models.transformer.Transformer": transformer_facts,
}

_LEAST = {"in_features": 1, "width": 1, "depth": 0, "classes": 1, "channels": 1, "features": 1}
_LEAST |= {"vocabulary": 1, "heads": 1, "kv_heads": 1, "hidden": 1, "length": 1}
"""The arguments that count something, and the least that each may be."""

_OPTIONAL = ("kv_heads", "hidden")
"""Those that may be null."""

INIT_FROM = "init_from"
"""A key of every model's configuration that is no argument of the model: a file of weights to start from."""


def model_facts(config: Mapping[str, Any]) -> ModelFacts | None:
    """The facts of the model that a `model` config describes; None for a user's own model, of which nothing is known.

    Args:
        config: `_target_` and the model's arguments.

    Raises:
        ConfigError: an argument that counts something is no such number, or two sizes do not fit each other.
    """
    facts = FACTS.get(str(config.get("_target_")))
    if facts is None:
        return None
    faults = [
        Fault(f"model.{name}={config[name]}", f"must be a whole number of at least {least}")
        for name, least in _LEAST.items()
        if name in config and not (config[name] is None and name in _OPTIONAL) and not _counts(config[name], least)
    ]
    if faults:
        raise ConfigError(faults)
    skipped = {str(key) for key in config if str(key).startswith("_")} | {INIT_FROM}
    return facts(**{str(key): value for key, value in config.items() if str(key) not in skipped})


def _counts(value: Any, least: int) -> bool:
    return type(value) is int and value >= least
