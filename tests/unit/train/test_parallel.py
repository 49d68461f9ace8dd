"""Tensor-parallel plans are checked before anything is sharded; gradient norms are true norms."""

import pytest
import torch
from torch import nn

from slurm_train.errors import ConfigError, GridError, UserError
from slurm_train.models.cnn import CNN
from slurm_train.models.mlp import MLP
from slurm_train.train.parallel import clip_gradients, declared_plan, resolve_plan


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
        ({"head": "diagonal"}, ConfigError, r"parallel\.plan\.head: unknown style 'diagonal'; use colwise or rowwise"),
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


def test_clip_gradients_scales_to_the_limit_and_no_further():
    model = MLP(6, 4, 1, 3)
    model(torch.rand(5, 6)).sum().backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(clip_gradients(model, limit=1e9), norm)
    assert torch.allclose(clip_gradients(model, limit=0.5), norm)
    after = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(after, torch.tensor(0.5), atol=1e-4)
