"""Causal grouped-query attention with rotary positions (Su et al., 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class AddingLinear(nn.Linear):
    """A linear layer whose outputs are added to the residual stream; it only starts with smaller weights."""


class Attention(nn.Module):
    """Each token mixes in the values of the tokens up to it.

    Args:
        width: features of a token.
        heads: query heads; width / heads, the features of a head, is an even number.
        kv_heads: key and value heads, each shared by heads / kv_heads query heads.
        dropout: probability of dropping an attention weight in training.
        rope_base: base of the rotary frequencies.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float, rope_base: float) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.rope_base = rope_base
        self.q = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.core = AttentionCore(dropout)
        self.o = AddingLinear(heads * self.head_dim, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """[b, t, width] from [b, t, width]."""
        # As many heads as the projections give: under tensor parallelism those of this rank.
        q, k, v = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.q(features), self.k(features), self.v(features))
        )
        cos, sin = rotary_angles(q.shape[2], self.head_dim, self.rope_base, q.device)
        mixed = self.core(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o(mixed.transpose(1, 2).flatten(2))


class AttentionCore(nn.Module):
    """softmax(q k / sqrt(head_dim)) v over the tokens up to each one.

    Args:
        dropout: probability of dropping an attention weight in training.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[b, heads, t, head_dim] of queries of that shape, and of keys and values [b, kv_heads, t, head_dim]."""
        dropout = self.dropout if self.training else 0.0
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)


def rotary_angles(length: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [length, head_dim / 2], of position * base^(-2 i / head_dim)."""
    powers = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), base**-powers)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., t, head_dim] with each pair (feature i of the first half, i of the second) turned by its angle."""
    first, second = x.chunk(2, dim=-1)
    # In float32, whatever x is: at bfloat16 far positions would run into one another.
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)
