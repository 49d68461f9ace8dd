"""Tensor-parallel plans are checked before anything is sharded."""

import pytest
from torch import nn

from slurm_train.errors import ConfigError, GridError, UserError
from slurm_train.models.cnn import CNN
from slurm_train.models.mlp import MLP
from slurm_train.models.transformer import Transformer
from slurm_train.train.tensor import declared_plan, resolve_plan


def test_patterns_name_modules():
    assert resolve_plan(MLP(depth=2), {"hidden.*": "colwise", "head": "rowwise"}, tp=2) == {
        "hidden.0": "colwise",
        "hidden.1": "colwise",
        "head": "rowwise",
    }


@pytest.mark.parametrize(
    ("plan", "error", "told"),
    [
        ({"fc": "colwise"}, ConfigError, r"parallel\.plan\.fc: matches no module.*hidden\.0, head"),
        ({"head": "diagonal"}, ConfigError, r"parallel\.plan\.head: unknown style 'diagonal'; use colwise, rowwise, "),
        ({"conv1": "colwise"}, ConfigError, r"conv1 is a Conv2d; only torch\.nn\.Linear"),
        ({"head": "colwise"}, GridError, r"tp=4 does not divide the 10 out_features of head"),
        ({"a": "colwise", "b": "x"}, ConfigError, r"(?s)plan\.a: matches no.*plan\.b: matches no.*plan\.b: unknown"),
    ],
)
def test_bad_plans(plan, error, told):
    with pytest.raises(error, match=told):
        resolve_plan(CNN() if "conv1" in plan else MLP(), plan, tp=4)


def test_a_model_without_a_plan_is_refused():
    with pytest.raises(UserError, match=r"parallel\.tp: Linear declares no tensor-parallel plan; .*parallel\.plan"):
        declared_plan(nn.Linear(2, 2))


def test_two_patterns_that_want_different_things_of_a_module():
    with pytest.raises(ConfigError, match=r"plan\.h\*: hidden\.0 is colwise by hidden\.0 already"):
        resolve_plan(MLP(width=8), {"hidden.0": "colwise", "h*": "rowwise"}, tp=2)


def test_tied_modules_are_sharded_alike():
    model = Transformer(width=16, depth=1, heads=2, tied=True)
    assert resolve_plan(model, {"embed": "rowwise", "head": "head"}, tp=2)
    with pytest.raises(ConfigError, match="embed and head share a parameter but are colwise and head"):
        resolve_plan(model, {"embed": "colwise", "head": "head"}, tp=2)


def test_multihead_attention_is_refused_with_the_reason():
    model = nn.TransformerEncoderLayer(8, 2)
    with pytest.raises(ConfigError, match="self_attn is a MultiheadAttention, which keeps queries, keys and values"):
        resolve_plan(model, {"self_attn": "colwise"}, tp=2)
    with pytest.raises(ConfigError, match="self_attn is a MultiheadAttention, which keeps queries, keys and values"):
        resolve_plan(model, {"self_attn.out_proj": "rowwise"}, tp=2)
    assert resolve_plan(model, {"self_attn": "replicate"}, tp=2) == {"self_attn": "replicate"}
