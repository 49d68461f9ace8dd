"""Models of which not every layout or step is a matter of course: batch norms in pipelines, scores beside others."""

import re

import pytest
from torch import nn
from torch.nn import functional as F

from slurm_train.errors import UserError
from tests.integration.runs import losses, run, run_on_rank, weights
from tests.integration.test_matrix import deviation, weight_deviation

HERE = "tests.integration.test_unusual_models"
POINTS = ["data._target_=tests.integration.test_user_models.Points", "train.validation=0", "optim=sgd", "optim.lr=0.1"]
NORMED = [*POINTS, f"model._target_={HERE}.Normed", "train.epochs=1", "train.micro_batch=4"]


class Normed(nn.Module):
    """Two stages with a batch norm in each, and dropout in the second."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Linear(16, 4))

    def forward(self, inputs):
        return self.second(self.first(inputs))


PIPELINE = ["parallel=pp", "parallel.cuts=[second]"]


def test_finding_out_shapes_leaves_batch_norms_alone(world, tmp_path):
    run(world, 2, [*NORMED, *PIPELINE, "train.batch_size=16"], tmp_path / "run")
    run_on_rank([*NORMED, "train.batch_size=16"], str(tmp_path / "alone"))
    assert deviation(losses(tmp_path / "run"), losses(tmp_path / "alone")) < 1e-5
    ours, theirs = weights(tmp_path / "run"), weights(tmp_path / "alone")
    assert ours["first.1.num_batches_tracked"] == theirs["first.1.num_batches_tracked"] == 40
    assert weight_deviation(tmp_path / "run", tmp_path / "alone") < 1e-5


def test_a_pipeline_with_dropout_goes_on_bit_by_bit(world, tmp_path):
    drops = [*NORMED, *PIPELINE, "model.dropout=0.5", "train.batch_size=16", "train.keep_checkpoints=0"]
    run(world, 2, drops, tmp_path / "undisturbed")
    run(world, 2, [*drops, "train.max_steps=5"], tmp_path / "run")
    run(world, 2, drops, tmp_path / "run", attempt=2)
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    assert weight_deviation(tmp_path / "run", tmp_path / "undisturbed") == 0.0


def refused(overrides, directory):
    told = "train.batch_size=64: the last batch of an epoch has 32 samples, which batch norms in a pipeline cannot take"
    with pytest.raises(UserError, match=re.escape(told)):
        run_on_rank(overrides, directory)
    return True


def test_a_partial_batch_of_batch_norms_in_a_pipeline_is_refused(world, tmp_path):
    overrides = [*NORMED, *PIPELINE, "train.batch_size=64"]
    assert world(2).run(refused, overrides, str(tmp_path / "run")) == [True, True]


class Beside(nn.Module):
    """Scores, and a number beside them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        return {"scores": self.head(inputs), "penalty": self.head.weight.square().sum()}


class Penalised(nn.Module):
    """The loss that takes both."""

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs["scores"], targets) + 0.01 * outputs["penalty"]


def test_a_number_beside_the_scores(world, tmp_path):
    beside = [*POINTS, f"model._target_={HERE}.Beside", f"train.loss._target_={HERE}.Penalised", "train.epochs=2"]
    beside += ["train.batch_size=32", "train.eval_batch_size=8"]
    alone = run_on_rank(beside, str(tmp_path / "alone"))
    shared = run(world, 2, [*beside, "parallel=ddp"], tmp_path / "run")
    assert shared["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-5)
    assert weight_deviation(tmp_path / "run", tmp_path / "alone") < 1e-5
