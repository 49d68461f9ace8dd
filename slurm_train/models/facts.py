"""What the models of this project are made of, told without torch, so that `plan` can check a layout.

The modules build themselves from the same functions, so that plan and model cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_train.errors import ConfigError, Fault


@dataclass(frozen=True)
class Layer:
    """A linear layer: its module name, its sizes, and its tensor-parallel style.

    `style` is colwise (the output features are sharded), rowwise (the input features are sharded) or "" (replicated).
    """

    name: str
    in_features: int
    out_features: int
    style: str = ""

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return (self.in_features + 1) * self.out_features

    @property
    def sharded_size(self) -> tuple[str, int] | None:
        """Which dimension tensor parallelism divides, and its size; None for a replicated layer."""
        sizes = {"colwise": ("out_features", self.out_features), "rowwise": ("in_features", self.in_features)}
        return sizes.get(self.style)


@dataclass(frozen=True)
class ModelFacts:
    """Number of parameters, the linear layers, and the parameters that are not in linear layers."""

    layers: tuple[Layer, ...]
    other_parameters: int = 0

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return self.other_parameters + sum(layer.parameters for layer in self.layers)

    @property
    def tp_plan(self) -> dict[str, str]:
        """The tensor-parallel plan: module name -> style, for the layers that have one."""
        return {layer.name: layer.style for layer in self.layers if layer.style}


def mlp_facts(
    in_features: int = 784, width: int = 512, depth: int = 1, classes: int = 10, dropout: float = 0.0
) -> ModelFacts:
    """The layers of `slurm_train.models.mlp.MLP`: column- and row-wise in pairs, so that a pair costs one all-reduce.

    A last layer without a partner stays replicated.
    """
    sizes = [in_features, *[width] * depth, classes]
    names = [*(f"hidden.{index}" for index in range(depth)), "head"]
    paired = len(names) - len(names) % 2
    styles = [("colwise", "rowwise")[index % 2] if index < paired else "" for index in range(len(names))]
    layers = zip(names, sizes, sizes[1:], styles, strict=False)
    return ModelFacts(tuple(Layer(name, inputs, outputs, style) for name, inputs, outputs, style in layers))


def cnn_facts(channels: int = 16, width: int = 128, classes: int = 10, dropout: float = 0.0) -> ModelFacts:
    """The layers of `slurm_train.models.cnn.CNN`: the convolutions are replicated, the two linear layers are a pair."""
    convolutions = (9 + 1) * channels + (9 * channels + 1) * 2 * channels
    hidden = Layer("hidden", 2 * channels * 7 * 7, width, "colwise")
    return ModelFacts((hidden, Layer("head", width, classes, "rowwise")), convolutions)


def linear_regression_facts(features: int = 1) -> ModelFacts:
    """The one layer of `slurm_train.models.linear_regression.LinearRegression`; nothing to shard."""
    return ModelFacts((Layer("line", features, 1),))


FACTS: Mapping[str, Callable[..., ModelFacts]] = {
    "slurm_train.models.mlp.MLP": mlp_facts,
    "slurm_train.models.cnn.CNN": cnn_facts,
    "slurm_train.models.linear_regression.LinearRegression": linear_regression_facts,
}

_LEAST = {"in_features": 1, "width": 1, "depth": 0, "classes": 1, "channels": 1, "features": 1}
"""The arguments that count something, and the least that each may be."""


def model_facts(config: Mapping[str, Any]) -> ModelFacts | None:
    """The facts of the model that a `model` config describes; None for a user's own model, of which nothing is known.

    Args:
        config: `_target_` and the model's arguments.

    Raises:
        ConfigError: an argument that counts something is no such number.
    """
    facts = FACTS.get(str(config.get("_target_")))
    if facts is None:
        return None
    faults = [
        Fault(f"model.{name}={config[name]}", f"must be a whole number of at least {least}")
        for name, least in _LEAST.items()
        if name in config and not (type(config[name]) is int and config[name] >= least)
    ]
    if faults:
        raise ConfigError(faults)
    return facts(**{str(key): value for key, value in config.items() if not str(key).startswith("_")})
