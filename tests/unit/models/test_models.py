"""The models do what their torch-free facts say."""

import pytest
import torch

from slurm_train.models.cnn import CNN
from slurm_train.models.facts import FACTS, model_facts
from slurm_train.models.linear_regression import Line, LinearRegression
from slurm_train.models.mlp import MLP

MODELS = [
    (MLP, {}),
    (MLP, {"in_features": 12, "width": 8, "depth": 3, "classes": 4}),
    (MLP, {"in_features": 12, "depth": 0, "classes": 4}),
    (CNN, {}),
    (CNN, {"channels": 4, "width": 6, "classes": 3}),
    (LinearRegression, {"features": 5}),
]


@pytest.mark.parametrize(("cls", "arguments"), MODELS)
def test_facts_agree_with_the_module(cls, arguments):
    model = cls(**arguments)
    facts = model_facts({"_target_": f"{cls.__module__}.{cls.__name__}", **arguments})
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    modules = dict(model.named_modules())
    for layer in facts.layers:
        assert (modules[layer.name].in_features, modules[layer.name].out_features) == (
            layer.in_features,
            layer.out_features,
        )


def test_every_model_of_the_project_has_facts():
    elsewhere = {"slurm_train.models.transformer.Transformer"}  # test_facts.py
    assert {f"{cls.__module__}.{cls.__name__}" for cls, _ in MODELS} | elsewhere == set(FACTS)


def test_a_users_model_has_no_facts():
    assert model_facts({"_target_": "my_file.MyNet", "width": 3}) is None


@pytest.mark.parametrize("depth", range(5))
def test_mlp_plan_pairs_column_and_row_wise_layers(depth):
    plan = list(MLP(8, 4, depth, 2).tp_plan().values())
    assert plan == ["colwise", "rowwise"] * ((depth + 1) // 2)


@pytest.mark.parametrize("shape", [(3, 1, 28, 28), (3, 784)])
def test_mlp_flattens_any_input(shape):
    assert MLP()(torch.zeros(shape)).shape == (3, 10)


def test_cnn_scores_images():
    assert CNN(channels=4, classes=7)(torch.zeros(2, 1, 28, 28)).shape == (2, 7)


@pytest.mark.parametrize("model", [MLP(dropout=0.5), CNN(dropout=0.5)])
def test_dropout_acts_in_training_only(model):
    images = torch.rand(4, 1, 28, 28)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


def test_line_splits_differ_and_are_reproducible():
    train, test = Line("train"), Line("test")
    assert torch.equal(train.x, Line("train").x)
    assert not torch.equal(train.x, test.x)
    assert not torch.equal(train.x, Line("train", seed=1).x)
    assert not torch.equal(test.x, Line("train", seed=1).x)
