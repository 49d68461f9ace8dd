"""Batch norm over ranks with uneven shares is the batch norm of one process with all samples."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slurm_train.train.batchnorm import sync_batchnorm

SHARES = {2: (5, 2), 3: (4, 1, 3)}
SHAPES = {"1d": (6,), "1d_long": (6, 4), "2d": (6, 3, 2), "3d": (6, 2, 2, 2)}


def net(kind, dtype=torch.double, **options):
    torch.manual_seed(0)
    norm = {"1": nn.BatchNorm1d, "2": nn.BatchNorm2d, "3": nn.BatchNorm3d}[kind[0]](6, **options)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return nn.Sequential(norm, nn.Tanh(), copy.deepcopy(norm)).to(dtype)


def batch(kind, count, dtype=torch.double):
    """Samples whose mean is large beside their spread, and what their outputs are weighted by in the loss."""
    samples, weights = torch.randn(2, count, *SHAPES[kind], generator=torch.Generator().manual_seed(1)).to(dtype)
    return samples + 3, weights


def train(model, samples, weights):
    """Outputs and gradients of two forward passes and one backward pass, in the order of the samples."""
    model(samples)
    samples = samples.requires_grad_()
    outputs = model(samples)
    (outputs * weights).sum().backward()
    evaluated = model.eval()(samples.detach())
    return (
        outputs.detach(),
        samples.grad,
        evaluated.detach(),
        [parameter.grad for parameter in model.parameters()],
        dict(model.named_buffers()),
    )


def on_rank(kind, shares, options):
    model = net(kind, **options)
    names, classes = list(model.state_dict()), [type(module) for module in model]
    model = sync_batchnorm(model, dist.group.WORLD)
    assert list(model.state_dict()) == names
    assert [type(module) for module in model] == classes
    samples, weights = batch(kind, sum(shares), options.get("dtype", torch.double))
    start = sum(shares[: dist.get_rank()])
    mine = slice(start, start + shares[dist.get_rank()])
    return train(model, samples[mine].clone(), weights[mine])


CASES = [
    (2, "1d", {}),
    (3, "1d_long", {}),
    (2, "2d", {"affine": False}),
    (3, "2d", {"momentum": None}),
    (3, "3d", {"track_running_stats": False}),
]


def check(world, shares, kind, options, tolerance):
    whole = batch(kind, sum(shares), options.get("dtype", torch.double))
    outputs, by_inputs, evaluated, by_weights, buffers = train(net(kind, **options), *whole)
    results = world(len(shares)).run(on_rank, kind, shares, options)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(torch.cat([result[0] for result in results]), outputs, **close)
    torch.testing.assert_close(torch.cat([result[1] for result in results]), by_inputs, **close)
    if options.get("track_running_stats", True):  # else evaluation is by the batch of each rank
        torch.testing.assert_close(torch.cat([result[2] for result in results]), evaluated, **close)
    for n, expected in enumerate(by_weights):
        torch.testing.assert_close(sum(result[3][n] for result in results), expected, **close)
    for result in results:
        assert result[4].keys() == buffers.keys()
        for name, expected in buffers.items():
            torch.testing.assert_close(result[4][name], expected, **close)


@pytest.mark.parametrize(("ranks", "kind", "options"), CASES)
def test_uneven_shares(world, ranks, kind, options):
    check(world, SHARES[ranks], kind, options, 1e-10)


def test_single_precision(world):
    check(world, SHARES[2], "2d", {"dtype": torch.float}, 1e-5)


def test_a_rank_without_samples(world):
    check(world, (5, 0), "2d", {}, 1e-10)


def evaluate_alone():
    """Only rank 0 evaluates: an exchange would hang."""
    model = sync_batchnorm(net("1d"), dist.group.WORLD).eval()
    return model(torch.zeros(2, 6, dtype=torch.double)).shape if dist.get_rank() == 0 else None


def test_evaluation_exchanges_nothing(world):
    assert world(2).run(evaluate_alone)[0] == (2, 6)


def far_from_zero():
    model = sync_batchnorm(nn.BatchNorm1d(1, affine=False).double(), dist.group.WORLD)
    samples = torch.arange(6, dtype=torch.double).view(6, 1) + 1e6
    return model(samples[:2] if dist.get_rank() == 0 else samples[2:])


def test_a_large_mean_costs_no_digits(world):
    expected = nn.BatchNorm1d(1, affine=False).double()(torch.arange(6, dtype=torch.double).view(6, 1))
    torch.testing.assert_close(torch.cat(world(2).run(far_from_zero)), expected, rtol=1e-9, atol=1e-9)


def low_precision():
    model = sync_batchnorm(nn.BatchNorm1d(6), dist.group.WORLD)
    samples = torch.randn(4, 6).bfloat16().requires_grad_()
    outputs = model(samples)
    outputs.sum().backward()
    return outputs.dtype, samples.grad.dtype, model.weight.grad.dtype


def test_low_precision_inputs(world):
    assert world(2).run(low_precision) == [(torch.bfloat16, torch.bfloat16, torch.float)] * 2
