"""Activations computed again: the same gradients from less that is kept, and faults told."""

import copy

import pytest
import torch
from torch import nn

from slurm_train.errors import ConfigError
from slurm_train.train.recompute import recompute


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 8)) for _ in range(4)
        )
        self.head = nn.Linear(8, 2)

    def blocks(self):
        return {f"layers.{n}": layer for n, layer in enumerate(self.layers)}

    def forward(self, inputs):
        for layer in self.layers:
            inputs = inputs + layer(inputs)
        return self.head(inputs)


def net():
    torch.manual_seed(0)
    return Net()


def train(model):
    """Gradients, and how many numbers were kept for the backward pass."""
    kept = 0

    def keep(tensor):
        nonlocal kept
        kept += tensor.numel()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], kept


@pytest.mark.parametrize(
    ("what", "chosen"),
    [
        ("all", ["layers.0", "layers.1", "layers.2", "layers.3"]),
        (1, ["layers.0", "layers.1", "layers.2", "layers.3"]),
        (2, ["layers.0", "layers.2"]),
        (3, ["layers.0", "layers.3"]),
        (9, ["layers.0"]),
        (["layers.[12]", "head"], ["layers.1", "layers.2", "head"]),
        (["layers.*"], ["layers.0", "layers.1", "layers.2", "layers.3"]),  # and not again what is inside them
        ("layers.?.0", ["layers.0.0", "layers.1.0", "layers.2.0", "layers.3.0"]),
    ],
)
def test_gradients_are_the_same_and_names_too(what, chosen):
    plain, model = net(), net()
    assert recompute(model.blocks(), model, what) == chosen
    assert list(model.state_dict()) == list(plain.state_dict())
    expected, _ = train(plain)
    gradients, _ = train(model)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True))


def test_less_is_kept_the_more_is_computed_again():
    kept = []
    for what in (None, 2, "all"):
        model = net()
        if what:
            recompute(model.blocks(), model, what)
        kept.append(train(model)[1])
    assert kept[0] > kept[1] > kept[2]
    assert kept[2] < kept[0] / 3


def test_a_copy_computes_with_its_own_weights():
    model = net()
    recompute(model.blocks(), model, "all")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert other.layers[0](torch.ones(1, 8)).abs().sum() > 0


def test_nothing_is_counted_twice_without_gradients():
    model = net()
    recompute(model.blocks(), model, "all")
    with torch.no_grad():
        assert not model(torch.ones(1, 8)).requires_grad


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (["layer.0", "head"], r"train\.recompute=layer\.0: matches no module of the model; did you mean layers\.0"),
        (0, r"train\.recompute=0: not a number of blocks"),
    ],
)
def test_faults(what, told):
    model = net()
    with pytest.raises(ConfigError, match=told):
        recompute(model.blocks(), model, what)


def test_a_model_without_blocks():
    with pytest.raises(ConfigError, match=r"train\.recompute=all: Linear has no blocks; set parallel\.blocks"):
        recompute({}, nn.Linear(2, 2), "all")
