"""Averages of weights: their values, and parameters that come back as they were."""

import pytest
import torch
from torch import nn

from slurm_train.train.ema import Ema


def test_the_average_is_the_formula_and_follows_an_optimizer():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = Ema(dict(model.named_parameters()), decay=0.9)
    optimizer.register_step_post_hook(lambda *_: ema.update())
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(4):
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        expected = {name: 0.9 * expected[name] + 0.1 * p.detach() for name, p in model.named_parameters()}
    for name, average in ema.tensors().items():
        assert torch.allclose(average, expected[name], atol=1e-6)
        assert not average.requires_grad


def test_swapped_gives_the_averages_and_the_very_weights_back_even_after_an_error():
    model = nn.Linear(3, 2)
    ema = Ema(dict(model.named_parameters()), decay=0.5)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.uniform_()
    trained, place = model.weight.detach().clone(), model.weight.data_ptr()
    with pytest.raises(RuntimeError, match="inside"), ema.swapped(model):
        assert torch.equal(model.weight, start)
        raise RuntimeError("inside")
    assert torch.equal(model.weight, trained)
    assert model.weight.data_ptr() == place
    assert torch.equal(ema.tensors()["weight"], start)


def test_averages_are_loaded_in_place():
    model = nn.Linear(3, 2)
    ema = Ema(dict(model.named_parameters()), decay=0.5)
    ema.tensors()["weight"].fill_(7)
    with ema.swapped():
        assert (model.weight == 7).all()
