"""The loss of a language model."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class TokenCrossEntropy(nn.Module):
    """Mean cross entropy, in nats, over the tokens of all sequences.

    Args:
        ignore_index: targets of this value do not count.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean, a float32 scalar; nan if no target counts.

        Args:
            logits: scores [b, t, vocabulary], which may be a DTensor sharded along the vocabulary.
            targets: int64 token ids [b, t].
        """
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=self.ignore_index)
