"""Every layout gives what one process gives: losses, weights, evaluation, and checkpoints that know no layout."""

import pytest
import torch

from slurm_train.errors import GridError, UserError
from slurm_train.models.mlp import MLP
from tests.integration.runs import SAMPLE, losses, run, run_on_rank, weights
from tests.integration.worlds import WorldError

FMNIST = ["+experiment=fmnist", SAMPLE, "train.epochs=1"]
LAYOUTS = [("ddp", 2), ("ddp", 4), ("tp", 2), ("tp", 4)]


def agree(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    worst = max(abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in theirs)
    assert worst <= tolerance


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """What one process does with some overrides; each set is run once."""
    done = {}

    def get(*overrides):
        if overrides not in done:
            directory = tmp_path_factory.mktemp("single") / "run"
            done[overrides] = (directory, run_on_rank([*overrides, "parallel=single"], str(directory)))
        return done[overrides]

    return get


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_the_losses_of_one_process(world, single, tmp_path, layout, ranks):
    overrides = [*FMNIST, "train.max_steps=100"]
    expected, scores = single(*overrides)
    result = run(world, ranks, [*overrides, f"parallel={layout}"], tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 100
    agree(losses(tmp_path / "run"), losses(expected), 1e-4)
    assert result["test_loss"] == pytest.approx(scores["test_loss"], rel=1e-4)
    assert result["test_accuracy"] == pytest.approx(scores["test_accuracy"], abs=2e-3)


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_the_weights_of_one_process_under_sgd(world, single, tmp_path, layout, ranks):
    overrides = [*FMNIST, "optim=sgd", "train.max_steps=50", "model.depth=2", "model.width=64", "train.grad_clip=0.5"]
    expected, _ = single(*overrides)
    run(world, ranks, [*overrides, f"parallel={layout}"], tmp_path / "run")
    ours, theirs = weights(tmp_path / "run"), weights(expected)
    assert sorted(ours) == sorted(theirs)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


class Double(MLP):
    """In double precision, where no rounding can move an activation to the other side of a ReLU."""

    def __init__(self):
        super().__init__(width=64, depth=2)
        self.double()

    def forward(self, inputs):
        return super().forward(inputs.double())


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_a_whole_epoch_is_the_same_but_for_rounding(world, single, tmp_path, layout, ranks):
    overrides = [*FMNIST, "optim=sgd", "model._target_=tests.integration.test_layouts.Double"]
    expected, scores = single(*overrides)
    result = run(world, ranks, [*overrides, f"parallel={layout}"], tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 169
    agree(losses(tmp_path / "run"), losses(expected), 1e-12)
    assert result["test_accuracy"] == scores["test_accuracy"]


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("tp", 2)])
def test_the_convolutional_network(world, single, tmp_path, layout, ranks):
    overrides = ["+experiment=fmnist_cnn", SAMPLE, "model.channels=4", "train.epochs=1", "train.max_steps=30"]
    expected, _ = single(*overrides)
    run(world, ranks, [*overrides, f"parallel={layout}"], tmp_path / "run")
    agree(losses(tmp_path / "run"), losses(expected), 1e-4)


def test_a_last_batch_that_leaves_a_rank_without_a_sample(world, single, tmp_path):
    # 203 samples: three batches of 64 and one of 11; 195: three and one of 3, for four ranks
    overrides = [*FMNIST, "train.validation=11805", "train.epochs=2"]
    expected, _ = single(*overrides)
    run(world, 4, [*overrides, "parallel=ddp"], tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 8
    agree(losses(tmp_path / "run"), losses(expected), 1e-4)


@pytest.mark.parametrize(
    ("before", "after"), [(("tp", 2), ("single", 1)), (("ddp", 4), ("tp", 2)), (("single", 1), ("ddp", 2))]
)
def test_a_checkpoint_goes_on_under_another_layout(world, single, tmp_path, before, after):
    overrides = [*FMNIST, "train.validation=11000", "train.epochs=3"]
    expected, _ = single(*overrides)
    first = [*FMNIST, "train.validation=11000", "train.epochs=1"]
    run(world, before[1], [*first, f"parallel={before[0]}"], tmp_path / "run")
    run(world, after[1], [*overrides, f"parallel={after[0]}"], tmp_path / "run", attempt=2)
    agree(losses(tmp_path / "run"), losses(expected), 1e-4)


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 4), ("tp", 2)])
def test_evaluation_counts_every_sample_once(world, single, tmp_path, layout, ranks):
    overrides = [*FMNIST, "train.max_steps=20", "train.eval_batch_size=333"]
    directory, scores = single(*overrides)
    options = {"verb": "evaluate", "attempt": ranks}
    result = run(world, ranks, [*overrides, f"parallel={layout}"], directory, **options)
    assert result["test_accuracy"] == scores["test_accuracy"]
    assert result["test_loss"] == pytest.approx(scores["test_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "error", "told"),
    [
        (["parallel=tp", "model.width=63"], GridError, "tp=2 does not divide the 63 out_features of hidden.0"),
        (["parallel=single"], GridError, "there are 2 ranks"),
        (["parallel=tp", "parallel.plan={nothing: colwise}"], UserError, "parallel.plan.nothing: matches no module"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_the_ranks_too(world, tmp_path, overrides, error, told):
    with pytest.raises(WorldError) as caught:
        world(2).run(run_on_rank, [*FMNIST, *overrides], str(tmp_path / "run"))
    assert set(caught.value.failures) == {0, 1}
    assert all(told in text for text in caught.value.failures.values())
