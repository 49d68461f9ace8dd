"""The transformer's torch-free facts against the module, and sizes that cannot be."""

import pytest
import torch

from slurm_train.errors import ConfigError
from slurm_train.models.facts import model_facts
from slurm_train.models.layers import pattern
from slurm_train.models.transformer import Transformer
from slurm_train.models.transformer_facts import transformer_facts

TARGET = "slurm_train.models.transformer.Transformer"
SIZES = [
    {},
    {"tied": True, "vocabulary": 1000},
    {"width": 96, "depth": 1, "heads": 6, "kv_heads": 2, "hidden": 160, "vocabulary": 50, "length": 32},
    {"width": 4096, "depth": 32, "heads": 32, "hidden": 11008, "vocabulary": 32000},
]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_facts_are_those_of_the_module(sizes):
    with torch.device("meta"):
        model = Transformer(**sizes)
    facts = model_facts({"_target_": TARGET, **sizes})
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert facts.tp_plan == model.tp_plan()
    assert (facts.blocks, facts.tied) == (len(model.blocks()), model.tied)
    in_layers = {f"{layer.name}.weight" for layer in facts.layers}
    others = {name: parameter.numel() for name, parameter in model.named_parameters() if name not in in_layers}
    assert facts.other_parameters == sum(others.values())
    assert facts.block_parameters == sum(size for name, size in others.items() if name.startswith("layers.0."))


@pytest.mark.parametrize("sizes", SIZES)
def test_each_layer_is_there_in_order_with_its_size(sizes):
    with torch.device("meta"):
        model = Transformer(**sizes)
    facts = transformer_facts(**sizes)
    modules = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | torch.nn.Embedding)}
    assert [layer.name for layer in facts.layers] == list(modules)
    for layer in facts.layers:
        module = modules[layer.name]
        assert layer.lookup == isinstance(module, torch.nn.Embedding)
        shape = (layer.in_features, layer.out_features) if layer.lookup else (layer.out_features, layer.in_features)
        assert tuple(module.weight.shape) == shape
        assert layer.block == (int(layer.name.split(".")[1]) if layer.name.startswith("layers.") else None)


def test_seven_billion_parameters():
    assert transformer_facts(32000, 4096, 32, 32, hidden=11008).parameters == 6_738_415_616


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"heads": 3}, ["model.heads=3: does not divide the width of 128; take a divisor", "model.kv_heads=2"]),
        ({"heads": 128}, ["model.heads=128: gives each head 128 / 128 = 1 features, an odd number"]),
        ({"kv_heads": 3}, ["model.kv_heads=3: does not divide the 4 heads; take a divisor of 4"]),
        ({"dropout": 1.0}, ["model.dropout=1.0: must be a number from 0 to below 1"]),
        ({"dropout": False, "tied": "no"}, ["model.tied=no: must be true or false", "model.dropout=False: must be"]),
        ({"tied": None, "eps": "tiny"}, ["model.tied=None: must be true", "model.eps=tiny: must be a number above 0"]),
        ({"eps": 0, "rope_base": -1.0}, ["model.rope_base=-1.0: must be a number above 0", "model.eps=0: must be a"]),
        ({"eps": True, "rope_base": float("inf")}, ["model.rope_base=inf: must be", "model.eps=True: must be"]),
        ({"depth": -1, "length": 0}, ["model.depth=-1: must be a whole", "model.length=0: must be a whole"]),
        ({"vocabulary": None}, ["model.vocabulary=None: must be a whole number of at least 1"]),
    ],
)
def test_sizes_that_cannot_be(sizes, told):
    with pytest.raises(ConfigError) as caught:
        model_facts({"_target_": TARGET, "kv_heads": 2, **sizes})
    lines = str(caught.value).splitlines()
    assert len(lines) == len(told) and all(line.startswith(text) for line, text in zip(lines, told, strict=True))


def test_numbers_may_be_whole():
    facts = model_facts({"_target_": TARGET, "dropout": 0, "rope_base": 500_000, "eps": 1, "tied": True})
    assert facts == transformer_facts(tied=True)


def test_what_is_no_argument_of_the_model_is_skipped():
    sizes = {"width": 64, "kv_heads": None, "hidden": None}
    assert model_facts({"_target_": TARGET, "init_from": "a.pt", **sizes}) == transformer_facts(width=64)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("layers.12.attention.q", "layers.*.attention.q"), ("hidden.0", "hidden.*"), ("conv1", "conv1"), ("0", "*")],
)
def test_the_pattern_of_a_name(name, expected):
    assert pattern(name) == expected
