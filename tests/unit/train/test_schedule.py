"""Learning rates over the steps, and optimizers that follow them, resumed or not."""

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from slurm_train.config.schema import ScheduleConfig
from slurm_train.errors import UserError
from slurm_train.train.schedule import factor, follow


def factors(total, **options):
    return [factor(ScheduleConfig(**options), step, total) for step in range(total)]


def test_constant_with_and_without_warmup():
    assert factors(3) == [1, 1, 1]
    assert factors(5, warmup=4) == [0.25, 0.5, 0.75, 1, 1]


def test_linear_ends_at_the_floor_and_stays_there():
    assert factors(5, name="linear") == [1, 0.75, 0.5, 0.25, 0]
    assert factors(6, name="linear", warmup=2, steps=4, floor=0.2) == pytest.approx([0.5, 1, 0.6, 0.2, 0.2, 0.2])


def test_cosine_is_half_a_cosine():
    assert factors(5, name="cosine") == pytest.approx([1, 0.5 + 2**0.5 / 4, 0.5, 0.5 - 2**0.5 / 4, 0])
    assert factors(6, name="cosine", warmup=2, floor=0.5) == pytest.approx(
        [0.5, 1, 0.926777, 0.75, 0.573223, 0.5], 1e-5
    )


def test_a_warmup_as_long_as_the_run():
    assert factors(3, name="cosine", warmup=3) == pytest.approx([1 / 3, 2 / 3, 1])
    assert factors(4, name="linear", warmup=2, steps=2) == [0.5, 1, 0, 0]


def test_faults():
    with pytest.raises(UserError, match=r"train\.schedule\.steps: the cosine schedule .*train\.max_steps"):
        factor(ScheduleConfig(name="cosine"), 0, None)
    with pytest.raises(UserError, match=r"train\.schedule\.name: unknown schedule 'step'"):
        factor(ScheduleConfig(name="step"), 0, 5)
    assert factor(ScheduleConfig(name="cosine", steps=4, floor=1), 2, None) == 1


def optimizer(*rates):
    weights = [nn.Parameter(torch.ones(1)) for _ in rates]
    for weight in weights:
        weight.grad = torch.ones(1)
    return torch.optim.SGD([{"params": [w], "lr": rate} for w, rate in zip(weights, rates, strict=True)])


def train(follower, schedule, start, end):
    """The rates of each step, as the optimizer uses them."""
    step, used = start, []
    follower.register_step_post_hook(lambda o, *_: used.append([float(group["lr"]) for group in o.param_groups]))
    follow(follower, schedule, 6, lambda: step)
    while step < end:
        follower.step()
        step += 1
    return used


def test_every_group_follows_from_its_own_rate_and_a_resumed_run_has_the_same_rates():
    schedule = OmegaConf.structured(ScheduleConfig(name="linear", warmup=2))
    whole = train(optimizer(1.0, 0.1), schedule, 0, 6)
    assert whole == [pytest.approx([f, 0.1 * f]) for f in (0.5, 1, 0.75, 0.5, 0.25, 0)]
    resumed = optimizer(1.0, 0.1)
    assert train(resumed, schedule, 3, 6) == whole[3:]
    assert [group["initial_lr"] for group in resumed.param_groups] == [1.0, 0.1]


def test_the_rate_is_set_before_the_first_step_and_a_tensor_stays_one():
    rate = torch.tensor(0.5)
    follower = optimizer(rate)
    follow(follower, ScheduleConfig(warmup=4), None, lambda: 0)
    assert follower.param_groups[0]["lr"] is rate
    assert rate == 0.125


def test_a_constant_rate_hooks_nothing():
    follower = optimizer(0.5)
    follow(follower, ScheduleConfig(), None, lambda: 0)
    assert not follower._optimizer_step_pre_hooks
    assert "initial_lr" not in follower.param_groups[0]
