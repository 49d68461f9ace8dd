"""The simple dense network: flattened images, hidden layers with ReLU, one score per class."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from slurm_train.models.facts import mlp_facts


class MLP(nn.Module):
    """A multi-layer perceptron.

    Args:
        in_features: values per sample; inputs of any shape [batch, ...] are flattened to [batch, in_features].
        width: features of each hidden layer.
        depth: number of hidden layers.
        classes: number of outputs.
        dropout: probability of dropping a hidden activation in training.
    """

    def __init__(
        self, in_features: int = 784, width: int = 512, depth: int = 1, classes: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.facts = mlp_facts(in_features, width, depth, classes, dropout)
        *hidden, head = (nn.Linear(layer.in_features, layer.out_features) for layer in self.facts.layers)
        self.hidden = nn.ModuleList(hidden)
        self.drops = nn.ModuleList(nn.Dropout(dropout) if dropout else nn.Identity() for _ in hidden)
        self.head = head

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores [batch, classes] of inputs [batch, ...]."""
        features = inputs.flatten(1)
        for layer, drop in zip(self.hidden, self.drops, strict=True):
            features = drop(F.relu(layer(features)))
        return self.head(features)

    def tp_plan(self) -> dict[str, str]:
        """Tensor-parallel style of each sharded layer."""
        return self.facts.tp_plan
