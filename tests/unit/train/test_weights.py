"""What a mean over nothing counts: nothing, also in the gradients."""

import pytest
import torch

from slurm_train.models.token_loss import TokenCrossEntropy
from slurm_train.train.weights import weighted


@pytest.mark.parametrize("weight", [0.0, torch.zeros(())])
def test_a_mean_over_nothing_counts_nothing(weight):
    scores = torch.randn(2, 3, 5, requires_grad=True)
    loss = TokenCrossEntropy()(scores, torch.full((2, 3), -100))
    assert loss.isnan()
    counted = weighted(loss, weight)
    counted.backward()
    assert counted == 0
    assert torch.equal(scores.grad, torch.zeros_like(scores))
