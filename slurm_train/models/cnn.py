"""A small convolutional network for 28 x 28 images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from slurm_train.models.facts import cnn_facts


class CNN(nn.Module):
    """Two 3 x 3 convolutions with 2 x 2 max-pooling, then two linear layers.

    Args:
        channels: channels of the first convolution; the second has twice as many.
        width: features between the two linear layers.
        classes: number of outputs.
        dropout: probability of dropping a feature before the last layer in training.
    """

    def __init__(self, channels: int = 16, width: int = 128, classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.facts = cnn_facts(channels, width, classes, dropout)
        hidden, head = self.facts.layers
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.hidden = nn.Linear(hidden.in_features, hidden.out_features)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(head.in_features, head.out_features)

    def forward(self, images: Tensor) -> Tensor:
        """Scores [batch, classes] of images [batch, 1, 28, 28]."""
        features = F.max_pool2d(F.relu(self.conv1(images)), 2)
        features = F.max_pool2d(F.relu(self.conv2(features)), 2)
        features = self.drop(F.relu(self.hidden(features.flatten(1))))
        return self.head(features)

    def tp_plan(self) -> dict[str, str]:
        """Tensor-parallel style of each sharded layer."""
        return self.facts.tp_plan
