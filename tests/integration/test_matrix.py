"""Every layout gives what one process gives, and goes on from what any other saved: the language model.

The quick tests take each layout in its smallest worlds and each as a writer and a reader of checkpoints once; the slow
ones take larger worlds and every pair. `SLURM_TRAIN_REPORT=FILE` has the deviations written to a file, a line each.
"""

import itertools
import json
import os

import pytest
import torch

from slurm_train.data.resident import TensorData
from tests.integration.runs import losses, run, run_on_rank, weights

HERE = "tests.integration.test_matrix"
LM = [
    "model._target_=slurm_train.models.transformer.Transformer",
    *[f"model.{key}={value}" for key, value in {"vocabulary": 64, "width": 32, "depth": 4, "heads": 4}.items()],
    *["model.kv_heads=4", "model.hidden=64", "model.length=16"],
    f"data._target_={HERE}.Tokens",
    *["train.loss._target_=slurm_train.models.token_loss.TokenCrossEntropy", "train.validation=0"],
    *["train.batch_size=16", "train.eval_batch_size=7", "train.grad_clip=1.0", "train.epochs=9"],
]
REPORT = os.environ.get("SLURM_TRAIN_REPORT")  # read now: a test's environment is clean of such names
SGD = ["optim=sgd", "optim.lr=0.1", "train.max_steps=50"]
INTERLEAVED = ("parallel=pp", "parallel.schedule=interleaved")

QUICK = [
    (("parallel=ddp", "train.micro_batch=3"), 2),
    (("parallel=fsdp", "train.micro_batch=3"), 2),
    (("parallel=hsdp",), 4),
    (("parallel=tp_sp",), 2),
    (("parallel=ddp_tp",), 4),
    (("parallel=fsdp_tp", "parallel.sequence=true", "parallel.loss_parallel=true"), 4),
    (("parallel=pp_tp",), 4),
    (("parallel=pp_fsdp",), 4),
    (INTERLEAVED, 2),
]
SLOW = [
    (("parallel=ddp",), 2),
    (("parallel=ddp", "train.micro_batch=3"), 4),
    (("parallel=fsdp",), 2),
    (("parallel=fsdp", "train.micro_batch=3"), 4),
    (("parallel=hsdp",), 8),
    (("parallel=hsdp", "parallel.dp_shard=4"), 8),
    (("parallel=tp",), 2),
    (("parallel=tp",), 4),
    (("parallel=tp_sp",), 4),
    (("parallel=ddp_tp",), 8),
    (("parallel=fsdp_tp",), 4),
    (("parallel=fsdp_tp",), 8),
    (("parallel=hsdp_tp",), 8),
    (("parallel=hsdp_tp",), 16),
    (("parallel=pp",), 2),
    (("parallel=pp",), 4),
    (("parallel=pp_tp",), 8),
    (("parallel=pp_tp", "parallel.sequence=true", "parallel.loss_parallel=true"), 4),
    (("parallel=pp_fsdp",), 8),
    (("parallel=pp_fsdp", "parallel.schedule=interleaved"), 4),
    (("parallel=pp", "parallel.dp_replicate=2", "parallel.pp=2"), 4),
    ((*INTERLEAVED, "model.depth=8"), 4),
]
SAVERS = {
    "single": (("parallel=single",), 1),
    "ddp": (("parallel=ddp",), 2),
    "fsdp": (("parallel=fsdp",), 4),
    "hsdp": (("parallel=hsdp",), 4),
    "tp_sp": (("parallel=tp_sp",), 2),
    "fsdp_tp": (("parallel=fsdp_tp",), 4),
    "pp": (INTERLEAVED, 2),
    "pp_fsdp": (("parallel=pp_fsdp",), 4),
}
RING = [("fsdp_tp", "pp"), ("pp", "hsdp"), ("hsdp", "single"), ("pp_fsdp", "tp_sp"), ("tp_sp", "ddp")]
PAIRS = [pair for pair in itertools.permutations(SAVERS, 2) if pair not in RING]


def Tokens(split="train"):
    """Sequences of which each token follows from the two before it, some of them not to be predicted."""
    generator = torch.Generator().manual_seed(3 + (split == "test"))
    samples = torch.randint(0, 64, (103 if split == "train" else 27, 17), generator=generator)
    for place in range(2, 17):
        samples[:, place] = (3 * samples[:, place - 1] + samples[:, place - 2]) % 64
    targets = samples[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    return TensorData(samples[:, :-1].contiguous(), targets)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """What one process does with some overrides; each set is run once."""
    done = {}

    def get(*overrides):
        if overrides not in done:
            directory = tmp_path_factory.mktemp("single") / "run"
            done[overrides] = (directory, run_on_rank([*LM, *overrides, "parallel=single"], str(directory)))
        return done[overrides]

    return get


def deviation(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in theirs)


def report(**figures):
    if REPORT:
        with open(REPORT, "a") as file:
            file.write(json.dumps(figures) + "\n")


def weight_deviation(ours, theirs):
    ours, theirs = weights(ours), weights(theirs)
    assert sorted(ours) == sorted(theirs)
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


def check_layout(world, single, tmp_path, layout, ranks):
    expected, scores = single(*SGD, *(word for word in layout if word.startswith("model.")))
    result = run(world, ranks, [*LM, *SGD, *layout], tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 50
    loss = deviation(losses(tmp_path / "run"), losses(expected))
    weight = weight_deviation(tmp_path / "run", expected)
    report(layout=" ".join(layout), ranks=ranks, loss=loss, weight=weight)
    assert loss < 1e-4
    assert weight < 1e-5
    assert result["test_loss"] == pytest.approx(scores["test_loss"], rel=1e-4)


@pytest.mark.parametrize(("layout", "ranks"), QUICK, ids=str)
def test_the_losses_and_weights_of_one_process(world, single, tmp_path, layout, ranks):
    check_layout(world, single, tmp_path, layout, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks"), SLOW, ids=str)
def test_the_same_in_larger_worlds(world, single, tmp_path, layout, ranks):
    check_layout(world, single, tmp_path, layout, ranks)


def check_pair(world, single, tmp_path, before, after):
    """AdamW, a schedule, an average: saved in the middle of an epoch, gone on with under another layout."""
    overrides = ["train.schedule.name=cosine", "train.schedule.warmup=3", "train.ema=0.9", "train.no_decay=[vectors]"]
    overrides += ["train.schedule.steps=20"]
    expected, scores = single(*overrides, "train.max_steps=20")
    for attempt, (name, steps) in enumerate(((before, 10), (after, 20)), 1):
        layout, ranks = SAVERS[name]
        typed = [*LM, *overrides, f"train.max_steps={steps}", *layout]
        result = run(world, ranks, typed, tmp_path / "run", attempt=attempt)
    loss = deviation(losses(tmp_path / "run"), losses(expected))
    report(before=before, after=after, loss=loss, weight=weight_deviation(tmp_path / "run", expected))
    assert len(losses(tmp_path / "run")) == 20
    assert loss < 1e-4
    assert result["test_loss"] == pytest.approx(scores["test_loss"], rel=1e-4)


@pytest.mark.parametrize(("before", "after"), RING)
def test_a_checkpoint_goes_on_under_another_layout(world, single, tmp_path, before, after):
    check_pair(world, single, tmp_path, before, after)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_every_pair_of_layouts(world, single, tmp_path, before, after):
    check_pair(world, single, tmp_path, before, after)
