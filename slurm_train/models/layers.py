"""What is known of a model without torch: its layers, its sizes, its tensor-parallel plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

SHARDED_SIZE = {
    "colwise": "out_features",
    "head": "out_features",
    "rowwise": "in_features",
    "rowwise_scatter": "in_features",
}
"""The tensor-parallel styles that shard a layer's weight -> which of its sizes they divide."""


@dataclass(frozen=True)
class Layer:
    """A linear layer or an embedding (whose in_features are the vocabulary), and its tensor-parallel style."""

    name: str
    """Its module name."""

    in_features: int
    out_features: int
    style: str = ""
    """One of SHARDED_SIZE, or "" for a replicated layer."""

    bias: bool = True
    block: int | None = None
    """Which of the model's repeated blocks it is in; None for outside them."""

    lookup: bool = False
    """Whether it is an embedding, which multiplies nothing."""

    tied: bool = False
    """Whether its weight is that of an earlier layer, and so is counted there."""

    @property
    def parameters(self) -> int:
        """Number of weights and biases that no earlier layer has."""
        return 0 if self.tied else (self.in_features + self.bias) * self.out_features


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before it is built."""

    layers: tuple[Layer, ...]
    """Its linear layers and embeddings, in the order of the forward pass."""

    other_parameters: int = 0
    """Parameters that are in none of these layers."""

    block_parameters: int = 0
    """How many of the other parameters each block has; the rest is used after the blocks."""

    other_products: int = 0
    """Multiplications with weights outside these layers in one sample's forward pass."""

    blocks: int = 0
    """Repeated blocks that pipeline stages may be cut between."""

    divides: Mapping[str, int] = field(default_factory=dict)
    """What the tensor-parallel ranks must divide beside the layers, such as {"heads": 8}."""

    length: int | None = None
    """Tokens of the longest sequence; None for a model of single samples."""

    width: int = 0
    """Features of a token between blocks; 0 for a model of single samples."""

    plan: Mapping[str, str] = field(default_factory=dict)
    """Tensor-parallel plan by patterns of module names; empty: the styles of the layers."""

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, shared ones counted once."""
        return self.other_parameters + sum(layer.parameters for layer in self.layers)

    @property
    def tied(self) -> bool:
        """Whether two layers share a weight."""
        return any(layer.tied for layer in self.layers)

    @property
    def tp_plan(self) -> dict[str, str]:
        """The tensor-parallel plan: module name or pattern -> style."""
        return dict(self.plan) or {layer.name: layer.style for layer in self.layers if layer.style}


def pattern(name: str) -> str:
    """A module name with * for each number in it: what it has in common with its like in other blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
