"""A decoder-only transformer: RMS norms before each part, rotary positions, grouped-query attention, gated SiLU layers.

It keeps to what the layouts need of a model: it can be built on the meta device (init_weights), names its repeated
blocks and its tensor-parallel plan, and calls its modules one after the other, so that it can be cut into stages.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slurm_train.errors import ConfigError, Fault, UserError
from slurm_train.models.attention import AddingLinear, Attention
from slurm_train.models.transformer_facts import PLAN, default_hidden, transformer_facts

INIT_STD = 0.02
"""Standard deviation of the initial weights."""


class Transformer(nn.Module):
    """Token ids in, scores of the next token out.

    Args:
        vocabulary: number of different tokens.
        width: features of a token between the blocks.
        depth: number of blocks.
        heads: query heads of each attention; they divide the width into even parts.
        kv_heads: key and value heads, each shared by heads / kv_heads query heads. Default: as many as heads.
        hidden: features inside the gated layers. Default: 8/3 of the width, rounded up to a multiple of 32.
        length: longest sequence.
        tied: let the last layer share the weight of the embedding.
        dropout: probability of dropping an attention weight, or a feature of what is added to the residual stream.
        rope_base: base of the rotary frequencies; larger for longer sequences.
        eps: added to the mean square in the norms.

    Raises:
        ConfigError: the sizes do not fit each other.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        kv_heads: int | None = None,
        hidden: int | None = None,
        length: int = 256,
        tied: bool = False,
        dropout: float = 0.0,
        rope_base: float = 10000.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        hidden = default_hidden(width) if hidden is None else hidden
        sizes = {"vocabulary": vocabulary, "width": width, "depth": depth, "heads": heads, "kv_heads": kv_heads}
        _check(sizes | {"hidden": hidden, "length": length})
        sizes = {"width": width, "heads": heads, "kv_heads": kv_heads, "dropout": dropout}
        transformer_facts(**sizes, tied=tied, rope_base=rope_base, eps=eps)  # refuses what does not fit
        self.depth = depth
        self.length = length
        self.tied = tied
        self.embed = nn.Embedding(vocabulary, width)
        self.embed_dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleDict(
            {str(i): Block(width, heads, kv_heads, hidden, dropout, rope_base, eps) for i in range(depth)}
        )
        self.norm = RMSNorm(width, eps)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for module in self.modules():
            self.init_weights(module)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores [b, t, vocabulary] of token ids, int64 [b, t].

        Raises:
            UserError: a sequence is longer than `length`.
        """
        if inputs.shape[1] > self.length:
            raise UserError(
                f"a sequence of {inputs.shape[1]} tokens is longer than the model's {self.length}",
                "model.length",
                "raise it, or take shorter sequences: data.length",
            )
        features = self.embed_dropout(self.embed(inputs))
        for block in self.layers.values():
            features = block(features)
        return self.head(self.norm(features))

    @torch.no_grad()
    def init_weights(self, module: nn.Module) -> None:
        """Fill the parameters that `module`, one of this model's own, holds itself.

        Args:
            module: a linear layer, embedding or norm; others hold nothing of their own.
        """
        if isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, nn.Linear | nn.Embedding):
            # Each block adds to the residual stream twice: so its variance does not grow with the depth.
            adds = isinstance(module, AddingLinear)
            module.weight.normal_(std=INIT_STD / (2 * self.depth) ** 0.5 if adds else INIT_STD)

    def blocks(self) -> list[str]:
        """Names of the repeated blocks, in order."""
        return [f"layers.{name}" for name in self.layers]

    def tp_plan(self) -> dict[str, str]:
        """Tensor-parallel style of each module that has one: patterns of names."""
        return dict(PLAN)


class Block(nn.Module):
    """Attention, then the gated layers; each reads the normed features and adds to them. Arguments: see Transformer."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, hidden: int, dropout: float, rope_base: float, eps: float
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width, eps)
        self.attention = Attention(width, heads, kv_heads, dropout, rope_base)
        self.attention_dropout = nn.Dropout(dropout)
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, hidden)
        self.mlp_dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """[b, t, width] from [b, t, width]."""
        features = features + self.attention_dropout(self.attention(self.attention_norm(features)))
        return features + self.mlp_dropout(self.mlp(self.mlp_norm(features)))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)). Arguments: see Transformer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = AddingLinear(hidden, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """[b, t, width] from [b, t, width]."""
        return self.down(F.silu(self.gate(features)) * self.up(features))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    Args:
        width: size of that dimension.
        eps: see the formula.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, features: Tensor) -> Tensor:
        """[..., width] from [..., width]."""
        return F.rms_norm(features, self.weight.shape, self.weight, self.eps)


def _check(sizes: dict[str, int]) -> None:
    """Refuse sizes below 1, all at once."""
    faults = [Fault(f"model.{name}={size}", "must be at least 1") for name, size in sizes.items() if size < 1]
    if faults:
        raise ConfigError(faults)
