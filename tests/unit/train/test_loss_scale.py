"""The loss scale grows, backs off, and goes on from a checkpoint."""

import pytest
import torch
from torch import nn

from slurm_train.train.gradients import clip_gradients
from slurm_train.train.loss_scale import LARGEST, LossScale

GOOD, BAD = torch.tensor(1.0), torch.tensor(float("inf"))


def test_it_is_the_one_of_torch():
    scale, theirs = LossScale(interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for finite in [1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1]:
        theirs.scale(weight.sum() * (1 if finite else float("inf"))).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert scale.update(GOOD if finite else BAD) == finite
        assert scale.value == theirs.get_scale()


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_bad_step_is_not_taken(norm):
    scale = LossScale()
    assert not scale.update(torch.tensor(norm))
    assert scale.value == 32768


def test_it_goes_on_from_its_state():
    scale, other = LossScale(interval=3), LossScale(interval=3)
    scale.update(BAD)
    scale.update(GOOD)
    scale.update(GOOD)
    other.load_state_dict(scale.state_dict())
    other.update(GOOD)
    assert other.value == 65536


def test_it_stays_finite():
    scale = LossScale(value=LARGEST, interval=1)
    scale.update(GOOD)
    assert torch.isfinite(torch.tensor(scale.value))


def test_a_training_step_is_the_one_without_it():
    torch.manual_seed(0)
    model, inputs, scale = nn.Linear(3, 2), torch.randn(4, 3), LossScale()
    model(inputs).square().mean().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    scale(model(inputs).square().mean()).backward()
    norm = clip_gradients(model.parameters(), None, scale=scale.value)
    assert scale.update(norm)
    assert torch.allclose(model.weight.grad, expected)
