"""Text from a language model, a token at a time, under any layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from slurm_train.errors import UserError
from slurm_train.train.context import Context
from slurm_train.train.targets import find


@torch.no_grad()
def generate(
    context: Context, prompt: str, tokens: int, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
) -> str:
    """The prompt and what the model makes follow it. Collective; the same text on all ranks.

    Args:
        context: a run whose data set's class has `encode(text) -> ids` and `decode(ids) -> text`.
        prompt: how the text begins; only its last data.length tokens are looked at.
        tokens: number of tokens to add.
        temperature: scores are divided by it before one is drawn; 0 takes the likeliest.
        top_k: draw among this many of the likeliest only. Default: among all.
        seed: seed of the draws.

    Raises:
        UserError: the data set cannot encode, or the prompt has no token.
    """
    data: Any = find(context.config.data, "data")
    if not hasattr(data, "encode") or not hasattr(data, "decode"):
        problem = f"{context.config.data._target_} has no encode and decode"
        raise UserError(problem, "data", "generate is for runs of a language model, such as data=bytes")
    ids = list(data.encode(prompt))
    if not ids:
        raise UserError("the prompt has no token", "--prompt", "give it at least one")
    length = context.config.data.get("length") or context.config.model.get("length")
    if not length:
        raise UserError("neither the data nor the model says how many tokens are looked at", "data.length", "set it")
    generator = torch.Generator().manual_seed(seed)
    context.model.eval()
    with context.averaged():
        for _ in range(tokens):
            seen = ids[-length:]
            # Of one shape always, whatever stands after the token asked for: a causal model does not look there.
            inputs = torch.zeros(1, length, dtype=torch.int64)
            inputs[0, : len(seen)] = torch.tensor(seen)
            scores = context.compute.outputs(inputs.to(context.device))
            ids.append(_agreed(context, _drawn(scores, len(seen) - 1, temperature, top_k, generator)))
    return str(data.decode(ids))


def _drawn(scores: Any, place: int, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """The token drawn by the scores at one place; -1 on a rank that has none."""
    if not isinstance(scores, Tensor):
        return -1
    row = (scores.full_tensor() if isinstance(scores, DTensor) else scores)[0, place].float().cpu()
    if temperature == 0:
        return int(row.argmax())
    if top_k is not None:
        row = row.masked_fill(row < row.topk(min(top_k, len(row))).values[-1], -torch.inf)
    return int(torch.multinomial((row / temperature).softmax(0), 1, generator=generator))


def _agreed(context: Context, token: int) -> int:
    """The token of the first rank of the last pipeline stage, on all ranks."""
    grid = context.grid
    if grid.world_size == 1:
        return token
    tensor = torch.tensor(token, device=context.device)
    dist.broadcast(tensor, src=grid.world_size - grid.world_size // grid.pp)
    return int(tensor)
