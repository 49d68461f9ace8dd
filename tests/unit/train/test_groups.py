"""Which parameters decay, and which patterns are faults."""

import pytest
from torch import nn

from slurm_train.errors import ConfigError
from slurm_train.train.groups import by_kind, parameter_groups


def model():
    return nn.ModuleDict({"embed": nn.Embedding(4, 3), "fc": nn.Linear(3, 2), "norm": nn.LayerNorm(2)})


def names(whole, groups):
    known = {parameter: name for name, parameter in whole.named_parameters()}
    return [({known[p] for p in group["params"]}, group.get("weight_decay")) for group in groups]


@pytest.mark.parametrize(
    ("no_decay", "spared"),
    [
        ([], set()),
        (["vectors"], {"fc.bias", "norm.weight", "norm.bias"}),
        (["embed.*", "*.bias"], {"embed.weight", "fc.bias", "norm.bias"}),
        (["vectors", "embed.weight"], {"embed.weight", "fc.bias", "norm.weight", "norm.bias"}),
        (["*"], {"embed.weight", "fc.weight", "fc.bias", "norm.weight", "norm.bias"}),
    ],
)
def test_weight_decay(no_decay, spared):
    whole = model()
    everything = {name for name, _ in whole.named_parameters()}
    expected = [group for group in ((everything - spared, None), (spared, 0.0)) if group[0]]
    assert names(whole, parameter_groups(whole.named_parameters(), no_decay)) == expected


def test_frozen_parameters_are_left_out_and_may_be_named():
    whole = model()
    whole["embed"].requires_grad_(False)
    groups = parameter_groups(whole.named_parameters(), ["embed.*", "vectors"])
    assert names(whole, groups) == [({"fc.weight"}, None), ({"fc.bias", "norm.weight", "norm.bias"}, 0.0)]


def test_patterns_that_match_nothing():
    with pytest.raises(ConfigError) as caught:
        parameter_groups(model().named_parameters(), ["embd.weight", "*.bias", "zzz"])
    first, second = str(caught.value).splitlines()
    told = "train.no_decay=embd.weight: matches no parameter of the model; did you mean embed.weight"
    assert first.startswith(told)
    assert second == (
        "train.no_decay=zzz: matches no parameter of the model; "
        "they have names such as embed.weight, fc.weight, fc.bias, vectors"
    )


def test_a_part_of_a_model_is_checked_against_the_names_of_all():
    part = model()["fc"]
    with pytest.raises(ConfigError):
        parameter_groups(part.named_parameters(), ["norm.*"])
    groups = parameter_groups(part.named_parameters(), ["norm.*"], names=["weight", "norm.weight"])
    assert names(part, groups) == [({"weight", "bias"}, None)]


def test_plain_tensors_are_one_kind():
    parameters = list(model().parameters())
    assert by_kind(parameters) == [parameters]
    assert by_kind([]) == []
