"""What a run does beside its steps: stop, go on, end early, call back, and take what a user brings."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from slurm_train.errors import CheckpointError, Saved, UserError
from slurm_train.report.rundir import RunDirectory
from tests.integration.runs import SAMPLE, losses, run_on_rank, state, weights
from tests.integration.worlds import WorldError

HERE = "tests.integration.test_training"
BASE = ["+experiment=fmnist", SAMPLE, "train.epochs=2", "train.validation=11000"]
SMALL = [*BASE, "model.width=32"]


def run_with(overrides, directory, options):
    return run_on_rank(overrides, directory, **options)


def stopped(overrides, directory, options):
    try:
        run_on_rank(overrides, directory, **options)
    except Saved as saved:
        return str(saved)


def equal(ours, theirs):
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_going_on_gives_bitwise_the_same(tmp_path):
    overrides = [*SMALL, "model.dropout=0.2"]
    run_on_rank(overrides, str(tmp_path / "whole"))
    run_on_rank([*overrides, "train.max_steps=7"], str(tmp_path / "parts"))
    run_on_rank([*overrides, "train.max_steps=20"], str(tmp_path / "parts"), attempt=2)
    run_on_rank(overrides, str(tmp_path / "parts"), attempt=3)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


@pytest.mark.parametrize("optimizer", [["optim=sgd"], ["optim=sgd", "optim.momentum=0.9"], ["optim=adamw"]])
def test_options_of_the_optimizer_can_be_changed_on_a_resume(tmp_path, optimizer):
    run_on_rank([*SMALL, *optimizer, "train.epochs=1"], str(tmp_path / "run"))
    before = weights(tmp_path / "run")
    run_on_rank([*SMALL, *optimizer, "optim.lr=0"], str(tmp_path / "run"), attempt=2)
    assert state(tmp_path / "run")["position"]["epoch"] == 2
    equal(weights(tmp_path / "run"), before)


def test_one_rank_asked_to_stop_stops_all_and_nothing_is_lost(world, tmp_path):
    overrides = [*SMALL, "parallel=ddp"]
    told = world(2).run(stopped, overrides, str(tmp_path / "run"), {"stop_on": 1})
    assert all("saved at step 1" in text for text in told)
    assert state(tmp_path / "run")["position"] == {"step": 1, "epoch": 0, "batch": 1}
    world(2).run(run_with, overrides, str(tmp_path / "run"), {"attempt": 2})
    world(2).run(run_with, overrides, str(tmp_path / "whole"), {})
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    events = [event["event"] for event in RunDirectory(tmp_path / "run").events()]
    assert [name for name in events if name in ("stopped", "resumed", "done")] == ["stopped", "resumed", "done"]


def test_a_broken_newest_checkpoint_is_told_and_left_out(tmp_path):
    run_on_rank(SMALL, str(tmp_path / "run"))
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    next(newest.glob("*.distcp")).write_bytes(b"torn")
    run_on_rank(SMALL, str(tmp_path / "run"), "evaluate")
    told = [event.get("text", "") for event in RunDirectory(tmp_path / "run").events()]
    assert any(f"checkpoint {newest.name} is left out" in text for text in told)


def test_evaluation_without_a_checkpoint_is_an_error(tmp_path):
    run_on_rank(SMALL, str(tmp_path / "run"))
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        (path / "trainer.pt").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        run_on_rank(SMALL, str(tmp_path / "run"), "evaluate")


class Recorder:
    """A user's callback: counts what it hears."""

    def __init__(self):
        self.heard = []

    def on_start(self, context):
        self.heard.append("start")

    def on_step(self, context):
        self.heard.append(context.position.step)

    def on_epoch(self, context, metrics):
        self.heard.append(sorted(metrics))

    def on_end(self, context):
        context.log.event("heard", heard=self.heard)


def test_a_users_callback_hears_everything(tmp_path):
    overrides = [*SMALL, "train.epochs=1", "train.max_steps=2", f"train.callbacks.mine._target_={HERE}.Recorder"]
    run_on_rank(overrides, str(tmp_path / "run"))
    heard = next(event["heard"] for event in RunDirectory(tmp_path / "run").events() if event["event"] == "heard")
    assert heard == ["start", 1, 2, ["val_accuracy", "val_loss"]]


def test_early_stopping_ends_all_ranks_alike(world, tmp_path):
    early = ["train.early_stopping.patience=1", "train.early_stopping.min_delta=100", "train.epochs=9"]
    results = world(2).run(run_with, [*SMALL, "parallel=ddp", *early], str(tmp_path / "run"), {})
    assert results[0]["test_loss"] == results[1]["test_loss"]
    assert state(tmp_path / "run")["position"]["epoch"] == 2


class HalfUsed(nn.Module):
    """A user's model with a layer that is never used."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(784, 10)
        self.spare = nn.Linear(4, 4)

    def forward(self, images):
        return self.used(images.flatten(1))


def test_parameters_without_a_gradient_are_named_under_ddp(world, tmp_path):
    overrides = [*BASE, f"model._target_={HERE}.HalfUsed", "parallel=ddp"]
    with pytest.raises(WorldError) as caught:
        world(2).run(run_with, overrides, str(tmp_path / "run"), {})
    assert "parallel.find_unused: these parameters get no gradient: spare.weight, spare.bias" in str(caught.value)


def test_parameters_without_a_gradient_can_be_allowed(world, tmp_path):
    overrides = [*BASE, f"model._target_={HERE}.HalfUsed", "parallel=ddp", "parallel.find_unused=true"]
    world(2).run(run_with, overrides, str(tmp_path / "run"), {})
    assert len(losses(tmp_path / "run")) == 32


class TwoLayers(nn.Module):
    """A user's model without a plan of its own."""

    def __init__(self, hidden=16):
        super().__init__()
        self.fc1 = nn.Linear(784, hidden)
        self.fc2 = nn.Linear(hidden, 10)

    def forward(self, images):
        return self.fc2(self.fc1(images.flatten(1)).relu())


def test_a_users_model_under_tp_by_a_plan_in_the_config(world, tmp_path):
    overrides = [*BASE, f"model._target_={HERE}.TwoLayers"]
    run_on_rank(overrides, str(tmp_path / "one"))
    plan = ["parallel=tp", "parallel.plan={fc1: colwise, fc2: rowwise}"]
    world(2).run(run_with, [*overrides, *plan], str(tmp_path / "two"), {})
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert all(abs(two[step] - one[step]) <= 1e-4 * one[step] for step in one)


def points(split):
    generator = torch.Generator().manual_seed(int(split == "test"))
    inputs = torch.randn(130, 784, generator=generator)
    return inputs, (inputs[:, 0] > 0).long()


class Mapped(Dataset):
    """A user's map-style data set."""

    def __init__(self, split="train"):
        self.inputs, self.targets = points(split)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Streamed(IterableDataset):
    """A user's stream."""

    def __init__(self, split="train"):
        self.inputs, self.targets = points(split)

    def __iter__(self):
        return zip(self.inputs, self.targets, strict=True)


@pytest.mark.parametrize(
    "data",
    [
        [f"data._target_={HERE}.Mapped"],
        [f"data._target_={HERE}.Mapped", "train.workers=1"],
        [f"data._target_={HERE}.Streamed", "train.validation=0"],
    ],
)
def test_a_users_data_gives_the_same_steps_on_any_number_of_ranks(world, tmp_path, data):
    overrides = ["+experiment=fmnist", "model.width=16", "train.epochs=2", "train.batch_size=32", *data]
    alone = run_on_rank([*overrides, "train.workers=0"], str(tmp_path / "one"))
    together = world(2).run(run_with, [*overrides, "parallel=ddp"], str(tmp_path / "two"), {})[0]
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == two.keys() and len(one) in (8, 10)
    assert all(abs(two[step] - one[step]) <= 1e-4 * one[step] for step in one)
    assert together["test_accuracy"] == alone["test_accuracy"]


def my_training(context, steps):
    """A user's own training function: no loop of the project's."""
    batch = next(iter(context.batches(0)))
    for _ in range(steps):
        loss = context.loss(context.model(batch.inputs), batch.targets)
        loss.backward()
        context.optimizer.step()
        context.optimizer.zero_grad()
        context.step_done(loss)
    context.epoch_done()


def test_a_users_own_training_function(tmp_path):
    overrides = [*SMALL, f"train.loop._target_={HERE}.my_training", "train.loop.steps=5"]
    run_on_rank(overrides, str(tmp_path / "run"))
    found = losses(tmp_path / "run")
    assert list(found) == [1, 2, 3, 4, 5]
    assert found[5] < found[1]


class Broken(nn.Module):
    """A user's model that cannot be built."""

    def __init__(self):
        raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (f"model._target_={HERE}.Broken", "model: .*Broken raised ValueError: no such thing"),
        (f"model._target_={HERE}.points", "model: .*points raised TypeError"),
        (f"train.loss._target_={HERE}.losses_of_another_kind", "losses_of_another_kind"),
    ],
)
def test_a_target_that_does_not_work_is_the_users_fault(tmp_path, override, told):
    with pytest.raises(UserError, match=told):
        run_on_rank([*BASE, override], str(tmp_path / "run"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_linear_regression_finds_the_line(world, tmp_path, ranks):
    overrides = ["+experiment=linear_regression"]
    if ranks == 1:
        run_on_rank(overrides, str(tmp_path / "run"))
    else:
        world(ranks).run(run_with, [*overrides, "parallel=ddp"], str(tmp_path / "run"), {})
    found = weights(tmp_path / "run")
    assert found["line.weight"].item() == pytest.approx(2.0, abs=0.02)
    assert found["line.bias"].item() == pytest.approx(-1.0, abs=0.02)


class Normalised(nn.Module):
    """A user's model with batch norm, whose statistics differ between replicas."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(784)
        self.head = nn.Linear(784, 10)

    def forward(self, images):
        return self.head(self.norm(images.flatten(1)))


def test_replicas_evaluate_with_the_statistics_that_are_saved(world, tmp_path):
    overrides = [*BASE, f"model._target_={HERE}.Normalised"]
    trained = world(2).run(run_with, [*overrides, "parallel=ddp"], str(tmp_path / "run"), {})
    alone = run_on_rank(overrides, str(tmp_path / "run"), "evaluate")
    assert alone["test_accuracy"] == trained[0]["test_accuracy"]


def test_a_parameter_without_a_gradient_does_not_hinder_a_resume(tmp_path):
    overrides = [*BASE, f"model._target_={HERE}.HalfUsed"]
    run_on_rank([*overrides, "train.max_steps=20"], str(tmp_path / "parts"))
    run_on_rank(overrides, str(tmp_path / "parts"), attempt=2)
    run_on_rank(overrides, str(tmp_path / "whole"))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_an_early_stopped_run_can_be_extended(tmp_path):
    early = ["train.early_stopping.patience=1", "train.early_stopping.min_delta=100"]
    run_on_rank([*SMALL, *early, "train.epochs=9"], str(tmp_path / "run"))
    assert state(tmp_path / "run")["position"]["epoch"] == 2
    run_on_rank([*SMALL, "train.epochs=4"], str(tmp_path / "run"), attempt=2)
    assert state(tmp_path / "run")["position"]["epoch"] == 4


class Pairs(Dataset):
    """A user's data with a mapping of targets."""

    def __init__(self):
        self.inputs, self.targets = points("train")

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], {"label": self.targets[index], "weight": 1.0}


def loss_of_pairs():
    return lambda outputs, targets: nn.functional.cross_entropy(outputs, targets["label"])


def test_targets_may_be_a_mapping(tmp_path):
    overrides = ["+experiment=fmnist", "model.width=16", "train.epochs=1", "train.batch_size=32"]
    user = [f"data._target_={HERE}.Pairs", f"train.loss._target_={HERE}.loss_of_pairs"]
    result = run_on_rank([*overrides, *user], str(tmp_path / "run"))
    assert "test_loss" not in result
    assert len(losses(tmp_path / "run")) == 4
