"""The state of a training as flat tensors: names, what an optimizer keeps, and what is told when it does not fit."""

import pytest
import torch
from torch import nn

from slurm_train.errors import UserError
from slurm_train.models.mlp import MLP
from slurm_train.train.checkpoint import CheckpointStore
from slurm_train.train.state import differences, fit_faults, optimizer_state, require_fit, restore, tensors_of


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path)


class WithNorm(nn.Module):
    """A model with buffers, and a parameter of no dimension."""

    def __init__(self):
        super().__init__()
        self.body = MLP(6, 4, 1, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs):
        return self.norm(self.body(inputs)) * self.scale


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def amsgrad(parameters):
    return torch.optim.Adam(parameters, lr=0.01, amsgrad=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adafactor(parameters):
    return torch.optim.Adafactor(parameters)


class Counting(torch.optim.Optimizer):
    """An optimizer as users write them: with plain numbers in its state, and an argument without default."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.room = 3

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["rate"] = state.get("rate", group["lr"]) * 0.7
                state["none"] = None
                parameter -= state["rate"] / self.room * parameter.grad / state["count"]


def counting(parameters):
    return Counting(parameters, 0.01)


def trained(make, steps=3, seed=0):
    torch.manual_seed(seed)
    model = WithNorm()
    optimizer = make(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        model(torch.rand(5, 6, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def parts(model):
    return dict(model.named_parameters()), dict(model.named_buffers())


@pytest.mark.parametrize("make", [adamw, fused, amsgrad, sgd, momentum, adafactor, counting])
def test_training_goes_on_as_if_it_had_not_been_interrupted(store, make):
    model, optimizer = trained(make)
    path = store.save(3, tensors_of(*parts(model), optimizer), {})
    train(model, optimizer, 4)
    again, its_optimizer = trained(make, steps=0, seed=1)
    restore(store, path, *parts(again), its_optimizer)
    train(again, its_optimizer, 4)
    ours, theirs = tensors_of(*parts(again), its_optimizer), tensors_of(*parts(model), optimizer)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(ours[name].device == theirs[name].device for name in theirs)


def test_the_names_know_no_layout():
    model, optimizer = trained(adamw)
    average = {"scale": torch.tensor(1.0)}
    names = set(tensors_of(*parts(model), optimizer, average))
    assert {"model.scale", "model.body.head.weight", "model.norm.running_mean", "ema.scale"} <= names
    assert {name for name in names if name.startswith("optimizer.scale.")} == {
        "optimizer.scale.step",
        "optimizer.scale.exp_avg",
        "optimizer.scale.exp_avg_sq",
    }


def test_a_parameter_without_state_has_none_afterwards(store):
    model, optimizer = trained(adamw)
    del optimizer.state[model.scale]
    path = store.save(3, tensors_of(*parts(model), optimizer), {})
    again, its_optimizer = trained(adamw)
    assert its_optimizer.state[again.scale]
    restore(store, path, *parts(again), its_optimizer)
    assert again.scale not in its_optimizer.state
    assert its_optimizer.state[again.body.head.bias]["step"] == 3


def test_the_options_of_the_optimizer_stay(store):
    model, optimizer = trained(adamw)
    path = store.save(3, tensors_of(*parts(model), optimizer), {})
    other = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)
    restore(store, path, *parts(model), other)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["weight_decay"]) == (0.25, 0.5)


def test_an_average_is_restored_or_starts_from_the_weights(store):
    model, optimizer = trained(sgd)
    average = {name: tensor.detach() + 1 for name, tensor in model.named_parameters()}
    path = store.save(3, tensors_of(*parts(model), optimizer, average), {})
    loaded = {name: torch.zeros_like(tensor) for name, tensor in average.items()}
    restore(store, path, *parts(model), optimizer, loaded)
    assert all(torch.equal(loaded[name], average[name]) for name in average)
    path = store.save(4, tensors_of(*parts(model), optimizer), {})
    restore(store, path, *parts(model), optimizer, loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.named_parameters())


def test_weights_alone(store):
    model, optimizer = trained(adamw)
    path = store.save(3, tensors_of(*parts(model), optimizer), {})
    again, _ = trained(adamw, steps=0, seed=1)
    restore(store, path, *parts(again))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(model.norm.running_var, again.norm.running_var)


def test_state_follows_the_weights_to_another_precision(store):
    model, optimizer = trained(momentum)
    path = store.save(3, tensors_of(*parts(model), optimizer), {})
    again = WithNorm().bfloat16()
    its_optimizer = momentum(again.parameters())
    restore(store, path, *parts(again), its_optimizer)
    buffer = its_optimizer.state[again.scale]["momentum_buffer"]
    assert buffer.dtype == torch.bfloat16
    assert torch.equal(buffer, optimizer.state[model.scale]["momentum_buffer"].bfloat16())


@pytest.mark.parametrize(("option", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")])
def test_the_count_of_steps_lies_where_the_optimizer_wants_it(option, device):
    parameters = {"w": nn.Parameter(torch.zeros(3, device="meta"))}  # stands for a GPU
    optimizer = torch.optim.AdamW(parameters.values())
    optimizer.param_groups[0].update(option)
    shapes = {"model.w": [3], "optimizer.w.step": [], "optimizer.w.exp_avg": [3], "optimizer.w.exp_avg_sq": [3]}
    outline = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    state = optimizer_state(outline, parameters, optimizer)["w"]
    assert {key: value.device.type for key, value in state.items()} == {
        "step": device,
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "lacking"),
    [
        (adamw, momentum, "SGD keeps momentum_buffer, where it has exp_avg, exp_avg_sq, step"),
        (momentum, fused, "AdamW keeps exp_avg, exp_avg_sq, step, where it has momentum_buffer"),
        (adamw, amsgrad, "Adam keeps max_exp_avg_sq, where it has exp_avg, exp_avg_sq, step"),
    ],
)
def test_state_of_another_optimizer_is_refused(store, saved_by, loaded_by, lacking):
    model, optimizer = trained(saved_by)
    path = store.save(3, tensors_of(*parts(model), optimizer), {})
    with pytest.raises(UserError, match=f"optim: the checkpoint is of another optimizer: {lacking}"):
        restore(store, path, *parts(model), loaded_by(model.parameters()))


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(sgd, adamw), (sgd, momentum), (momentum, sgd), (amsgrad, adamw)])
def test_state_that_does_not_matter_is_left_out(store, saved_by, loaded_by):
    model, optimizer = trained(saved_by)
    path = store.save(3, tensors_of(*parts(model), optimizer), {})
    other = loaded_by(model.parameters())
    restore(store, path, *parts(model), other)
    assert "momentum_buffer" not in other.state[model.scale]
    assert "max_exp_avg_sq" not in other.state[model.scale]
    train(model, other, 1)


class Listing(torch.optim.SGD):
    def step(self):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["history"] = [1, 2]


def test_what_cannot_be_saved_is_refused():
    model, optimizer = trained(lambda parameters: Listing(parameters, lr=0.01))
    with pytest.raises(UserError, match="optim: Listing keeps 'history', a list, which has no place in a checkpoint"):
        tensors_of(*parts(model), optimizer)


def sizes(**shapes):
    return {name.replace("__", "."): torch.Size(shape) for name, shape in shapes.items()}


def test_a_checkpoint_that_fits():
    saved = sizes(model__a=[2], model__b=[], optimizer__a__step=[], ema__a=[2])
    assert fit_faults(saved, sizes(a=[2], b=[])) == ""
    require_fit(saved, sizes(a=[2], b=[]))


def test_a_checkpoint_of_another_model_is_told_in_one_line():
    saved = sizes(model__embed__weight=[300, 64], model__fc__bias=[3], model__same=[1])
    shapes = sizes(embed__weight=[256, 64], head__weight=[5], same=[1])
    line = (
        "the checkpoint is of another model: missing head.weight; not in this model: fc.bias; "
        "other shapes: embed.weight is [300, 64] in it and [256, 64] here"
    )
    assert fit_faults(saved, shapes) == line
    with pytest.raises(UserError) as caught:
        require_fit(saved, shapes)
    assert str(caught.value).startswith(f"model: {line}; ") and caught.value.exit_code == 2


def test_long_lists_are_cut():
    many = {f"layers.{number}": torch.Size([1]) for number in range(10)}
    assert differences({}, many) == "missing layers.0, layers.1, layers.2, layers.3 and 6 more"
    assert differences(many, {}).startswith("not in this model: layers.0, ")
