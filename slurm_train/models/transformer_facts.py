"""What `slurm_train.models.transformer.Transformer` is made of, told without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any

from slurm_train.errors import ConfigError, Fault
from slurm_train.models.layers import Layer, ModelFacts

PLAN = {
    "embed": "rowwise_scatter",
    "embed_dropout": "sequence",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather",
    "layers.*.attention.[qkv]": "colwise",
    "layers.*.attention.core": "sharded",
    "layers.*.attention.o": "rowwise_scatter",
    "layers.*.attention_dropout": "sequence",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp": "gather",
    "layers.*.mlp.gate": "colwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise_scatter",
    "layers.*.mlp_dropout": "sequence",
    "norm": "sequence",
    "head": "head",
}
"""Tensor-parallel style of each module that has one, by patterns of names."""

_NUMBERS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "dropout": (lambda value: 0 <= value < 1, "must be a number from 0 to below 1"),
    "rope_base": (lambda value: 0 < value < inf, "must be a number above 0"),
    "eps": (lambda value: 0 < value < inf, "must be a number above 0"),
}
"""The arguments that are no counts: what each may be, and how that is said."""


def transformer_facts(
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
) -> ModelFacts:
    """The layers of the transformer; its other parameters are the weights of the norms, two in each block and one last.

    The arguments and their defaults are the model's.

    Raises:
        ConfigError: the heads do not fit the width or each other, or an argument is not of its kind.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    hidden = default_hidden(width) if hidden is None else hidden
    numbers = {"dropout": dropout, "rope_base": rope_base, "eps": eps}
    if faults := [*_head_faults(width, heads, kv_heads), *_kind_faults(tied, numbers)]:
        raise ConfigError(faults)
    layers = [Layer("embed", vocabulary, width, "rowwise_scatter", bias=False, lookup=True)]
    for block in range(depth):
        layers += _block(block, width, width // heads * kv_heads, hidden)
    layers.append(Layer("head", width, vocabulary, "head", bias=False, tied=tied))
    return ModelFacts(
        tuple(layers),
        other_parameters=(2 * depth + 1) * width,
        block_parameters=2 * width,
        blocks=depth,
        divides={"heads": heads, "kv_heads": kv_heads},
        length=length,
        width=width,
        plan=PLAN,
    )


def default_hidden(width: int) -> int:
    """8/3 of the width, rounded up to a multiple of 32: as many weights as an ungated layer of 4 times the width."""
    return -(-8 * width // 96) * 32


def _block(block: int, width: int, kv_width: int, hidden: int) -> list[Layer]:
    sizes = {
        "attention.q": (width, width, "colwise"),
        "attention.k": (width, kv_width, "colwise"),
        "attention.v": (width, kv_width, "colwise"),
        "attention.o": (width, width, "rowwise_scatter"),
        "mlp.gate": (width, hidden, "colwise"),
        "mlp.up": (width, hidden, "colwise"),
        "mlp.down": (hidden, width, "rowwise_scatter"),
    }
    return [
        Layer(f"layers.{block}.{name}", inputs, outputs, style, bias=False, block=block)
        for name, (inputs, outputs, style) in sizes.items()
    ]


def _head_faults(width: int, heads: int, kv_heads: int) -> Iterator[Fault]:
    if width % heads:
        yield Fault(f"model.heads={heads}", f"does not divide the width of {width}", "take a divisor")
    elif width // heads % 2:
        yield Fault(
            f"model.heads={heads}",
            f"gives each head {width} / {heads} = {width // heads} features, an odd number",
            "rotary positions turn pairs of them: take fewer or more heads",
        )
    if heads % kv_heads:
        yield Fault(f"model.kv_heads={kv_heads}", f"does not divide the {heads} heads", f"take a divisor of {heads}")


def _kind_faults(tied: Any, numbers: Mapping[str, Any]) -> Iterator[Fault]:
    if not isinstance(tied, bool):
        yield Fault(f"model.tied={tied}", "must be true or false")
    for name, value in numbers.items():
        good, problem = _NUMBERS[name]
        if type(value) not in (int, float) or not good(value):
            yield Fault(f"model.{name}={value}", problem)
