"""The gradient norm and clipping of one process; those of many are in tests/integration/test_gradients.py."""

import pytest
import torch
from torch import nn

from slurm_train.models.mlp import MLP
from slurm_train.train.gradients import clip_gradients, gradient_norm


def trained(scale=1.0):
    torch.manual_seed(0)
    model = MLP(6, 4, 1, 3)
    (model(torch.rand(5, 6)).sum() * scale).backward()
    return model


def flat(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_clipping_scales_to_the_limit_and_no_further():
    model = trained()
    norm, before = flat(model).norm(), flat(model)
    assert torch.allclose(gradient_norm(model.parameters()), norm)
    assert torch.allclose(clip_gradients(model.parameters(), 1e9), norm)
    assert torch.equal(flat(model), before)
    assert torch.allclose(clip_gradients(model.parameters(), 0.5), norm)
    assert torch.allclose(flat(model), before * (0.5 / norm), rtol=1e-5)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_scaled_loss_is_unscaled_in_the_same_pass(limit):
    plain, scaled = trained(), trained(1024.0)
    norm = clip_gradients(plain.parameters(), limit)
    assert torch.allclose(clip_gradients(scaled.parameters(), limit, scale=1024.0), norm)
    assert torch.allclose(flat(scaled), flat(plain))


def test_an_overflow_shows_in_the_norm():
    model = trained()
    model.head.bias.grad[0] = float("inf")
    assert not torch.isfinite(clip_gradients(model.parameters(), 1.0, scale=2.0))


def test_low_precision_is_added_up_in_single_and_types_may_be_mixed():
    low, high = nn.Parameter(torch.zeros(300).bfloat16()), nn.Parameter(torch.zeros(1, dtype=torch.double))
    low.grad, high.grad = torch.ones(300).bfloat16(), torch.ones(1, dtype=torch.double)
    norm = gradient_norm([low, high])
    assert norm.dtype == torch.double
    assert norm.item() == pytest.approx(301**0.5, rel=1e-6)
    assert gradient_norm([low]).dtype == torch.float
    clip_gradients([low, high], 1.0)
    assert gradient_norm([low, high]).item() == pytest.approx(1.0, rel=5e-3)


def test_no_gradients_at_all():
    assert gradient_norm(nn.Linear(2, 2).parameters()) == 0
    assert clip_gradients([], 1.0) == 0
