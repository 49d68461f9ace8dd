"""A language model as a user finds it: written as those of Hugging Face are, with no thought of any layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Config:
    """What a language model is made of."""

    vocab_size: int = 256
    hidden_size: int = 32
    intermediate_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    tie_word_embeddings: bool = False


@dataclass
class Output:
    """What a language model gives."""

    logits: Tensor
    loss: Tensor | None = None


class Rotary(nn.Module):
    """Cosines and sines of the positions, which all layers share."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        features = config.hidden_size // config.num_attention_heads
        powers = torch.arange(0, features, 2) / features
        self.register_buffer("inv_freq", 10000.0**-powers, persistent=False)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[:, None, :, None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


class SelfAttention(nn.Module):
    """As many heads as the projections give."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_dim = width // config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(
        self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None
    ) -> Tensor:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        q, k, v = (layer(hidden).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = position_embeddings
        q, k = (x * cos + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin for x in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=attention_mask is None)
        return self.o_proj(mixed.transpose(1, 2).reshape(*hidden.shape[:-1], -1))


class GatedLayers(nn.Module):
    """Layers between attentions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """A block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        self.mlp = GatedLayers(config)

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), position_embeddings, attention_mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """All below the scores."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.rotary_emb = Rotary(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        position_embeddings = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=position_embeddings, attention_mask=attention_mask)
        return self.norm(hidden)


class ForCausalLM(nn.Module):
    """A language model as a user finds it: keywords in, an object with `.logits` out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        logits = self.lm_head(self.model(input_ids, attention_mask))
        if labels is None:
            return Output(logits)
        return Output(logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
