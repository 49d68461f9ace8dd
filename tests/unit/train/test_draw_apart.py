"""Random numbers of shards: two ranks in one process, by the same seed for both."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slurm_train.train.draw_apart import draw_apart

INPUTS = torch.ones(1000)


def as_rank(rank, function=lambda model: model(INPUTS)):
    """What a rank computes, and where its generator is then."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    draw_apart(model[0], rank)
    torch.manual_seed(3)
    outputs = function(model)
    return outputs, torch.get_rng_state()


def masks(model):
    return model[0](INPUTS), model[0](INPUTS), model[1](INPUTS)


def test_ranks_draw_apart_and_stay_alike():
    (first, again, common), state = as_rank(0, masks)
    (other, _, theirs), their_state = as_rank(1, masks)
    assert 0.4 < (first == other).float().mean() < 0.6
    assert 0.4 < (first == again).float().mean() < 0.6
    assert torch.equal(common, theirs)
    assert torch.equal(state, their_state)


def test_it_is_reproducible_and_moves_on_with_the_seed():
    (first, *_), _ = as_rank(1, masks)
    (same, *_), _ = as_rank(1, masks)
    assert torch.equal(first, same)
    model = nn.Dropout(0.5)
    draw_apart(model, 1)
    torch.manual_seed(4)
    assert not torch.equal(model(INPUTS), first)


def test_eval_mode_draws_nothing():
    model = nn.Dropout(0.5).eval()
    draw_apart(model, 1)
    before = torch.get_rng_state()
    assert torch.equal(model(INPUTS), INPUTS)
    assert torch.equal(torch.get_rng_state(), before)


def test_recomputed_activations_have_the_same_mask():
    inputs = INPUTS.clone().requires_grad_()

    def gradient(model):
        outputs = checkpoint(model, inputs, use_reentrant=False)
        torch.rand(7)  # what else is drawn before the backward pass
        (mask,) = torch.autograd.grad((outputs * inputs).sum(), inputs)
        return outputs.detach(), mask

    (outputs, mask), _ = as_rank(1, gradient)
    assert torch.equal(mask, 2 * outputs)
