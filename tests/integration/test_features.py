"""What a run may do beside its layout, under layouts: formats, recomputation, compilation, dropout, background saves.

Each test compares whole runs of a few steps of a tiny transformer; a run that several tests need is run once.
"""

import json
import os
import re
import shutil
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from slurm_train.data.resident import TensorData
from slurm_train.errors import UserError
from slurm_train.models.transformer import Transformer
from tests.integration.runs import losses, run, run_on_rank, weights
from tests.integration.test_bad_input import started
from tests.integration.test_matrix import LM, Tokens, deviation, weight_deviation

HERE = "tests.integration.test_features"
TINY = [*LM, "model.depth=2", "optim=sgd", "optim.lr=0.1", "train.max_steps=6"]  # of 7 steps an epoch
DROPOUT = "model.dropout=0.5"
TP_SP = ("parallel=tp_sp", "parallel.loss_parallel=false")


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    """The directory of a run on so many ranks with some overrides."""
    directories = {}

    def get(ranks, *overrides):
        key = (ranks, *overrides)
        if key not in directories:
            directory = tmp_path_factory.mktemp("done") / "run"
            run(world, ranks, [*TINY, *overrides], directory)
            assert len(losses(directory)) == 6
            directories[key] = directory
        return directories[key]

    return get


def differ(ours, theirs):
    """Largest relative difference of the losses of two runs."""
    return deviation(losses(ours), losses(theirs))


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_autocast_gives_the_losses_of_one_process_under_autocast(done, layout):
    alone = done(1, "train.precision=bf16")
    assert differ(done(2, "train.precision=bf16", f"parallel={layout}"), alone) < 2e-3
    assert 1e-5 < differ(alone, done(1)) < 2e-2


@pytest.mark.parametrize(("ranks", "layout"), [(1, "single"), (2, "fsdp")])
def test_weights_in_bf16_have_a_master_copy_in_fp32(done, ranks, layout):
    directory = done(ranks, "train.precision=bf16_pure", f"parallel={layout}")
    assert 1e-5 < differ(directory, done(1)) < 2e-2
    for name, tensor in weights(directory).items():
        assert tensor.dtype == torch.float32
        assert name.endswith("norm.weight") or not torch.equal(tensor.bfloat16().float(), tensor), name


def watching(context):
    """The usual training; each rank writes what it saw of it into <run directory>/rank_<number>.pt."""
    part = context.parallel.parts[0]
    seen = {"losses": [], "masks": {}, "calls": Counter()}
    for name, module in part.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, _, out, name=name: keep(seen["masks"], name, module, out))
        if name.endswith(("mlp", "attention", "mlp.down")):
            # Before the forward pass: one that is computed again ends as soon as all that is needed is there.
            module.register_forward_pre_hook(
                lambda module, _, name=name: seen["calls"].update([name] * module.training)
            )
    for epoch in context.epochs():
        for batch in context.batches(epoch):
            loss = context.forward_backward(batch)
            seen["losses"].append(loss.item())
            context.update()
            context.step_done(loss)
        context.epoch_done()
    seen["cores"] = attention_mask(part)
    seen["norms"] = {name: local(p) for name, p in context.parallel.named_parameters() if "norm" in name}
    torch.save(seen, context.directory.path / f"rank_{context.mesh.rank}.pt")


def keep(masks, name, module, outputs):
    if module.training:
        masks[name] = torch.stack([*masks.get(name, []), outputs != 0])


def attention_mask(model):
    """Which weights of the first attention are kept, told by equal ones."""
    core = model.layers["0"].attention.core
    core.train()
    queries = torch.zeros(8, 2, 16, 16)
    return core(queries, queries, torch.eye(16).expand_as(queries))[..., torch.ones(16, 16).tril().bool()] != 0


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def seen(directory, ranks):
    return [torch.load(directory / f"rank_{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize(("layout", "ranks"), [(("parallel=fsdp",), 2), (TP_SP, 2)], ids=str)
@pytest.mark.parametrize(
    ("what", "again"),
    [
        ("all", ["layers.0", "layers.1"]),
        ("2", ["layers.0"]),
        ("[layers.*.mlp]", ["layers.0.mlp", "layers.1.mlp"]),
    ],
)
def test_activations_computed_again_give_the_same_losses(done, layout, ranks, what, again):
    watched = (DROPOUT, *layout, f"train.loop._target_={HERE}.watching")
    without, directory = done(ranks, *watched), done(ranks, *watched, f"train.recompute={what}")
    assert differ(directory, without) < 1e-6
    assert weight_deviation(directory, without) < 1e-6
    for before, after in zip(seen(without, ranks), seen(directory, ranks), strict=True):
        assert before["calls"].keys() == after["calls"].keys()
        for name, calls in after["calls"].items():
            twice = any(name.startswith(f"{block}.") for block in again)
            assert calls == before["calls"][name] * (2 if twice else 1), name


@pytest.mark.parametrize("layout", ["ddp_tp", "ddp_tp with sequence parallelism"])
def test_dropout_is_alike_where_activations_are_and_apart_elsewhere(done, layout):
    sequence = "sequence" in layout
    watched = ("parallel=ddp_tp", f"parallel.sequence={sequence}", DROPOUT, f"train.loop._target_={HERE}.watching")
    ranks = seen(done(4, *watched), 4)
    for first, second in ((ranks[0], ranks[1]), (ranks[2], ranks[3])):  # tensor-parallel groups
        assert first["losses"] == second["losses"]
        for name in first["norms"]:
            assert torch.equal(first["norms"][name], second["norms"][name])
        assert apart(first["cores"], second["cores"])
        for name in first["masks"]:
            ours, theirs = first["masks"][name], second["masks"][name]
            assert apart(ours, theirs) if sequence else torch.equal(ours, theirs)
    assert len(ranks[0]["masks"]) == 5 and len(ranks[0]["norms"]) == 5
    assert ranks[0]["losses"] != ranks[2]["losses"]
    for name in ranks[0]["masks"]:
        assert apart(ranks[0]["masks"][name], ranks[2]["masks"][name])
        assert apart(ranks[0]["masks"][name][0], ranks[0]["masks"][name][1])  # two steps


def apart(ours, theirs):
    """Whether two masks that keep half have nothing to do with each other."""
    return 0.45 < (ours == theirs).float().mean() < 0.55


@pytest.mark.parametrize("layout", [TP_SP, ("parallel=fsdp", "train.recompute=all")], ids=str)
def test_the_same_run_twice_is_bitwise_the_same(world, done, tmp_path, layout):
    overrides = (DROPOUT, *layout, f"train.loop._target_={HERE}.watching")
    run(world, 2, [*TINY, *overrides], tmp_path / "run")
    first = done(2, *overrides)
    assert losses(tmp_path / "run") == losses(first)
    assert weight_deviation(tmp_path / "run", first) == 0.0


def test_another_layout_on_as_many_ranks_draws_as_it_must(world, tmp_path):
    overrides = [*TINY, DROPOUT, f"train.loop._target_={HERE}.watching"]
    run(world, 2, [*overrides, "parallel=ddp", "train.max_steps=3"], tmp_path / "run")
    run(world, 2, [*overrides, "parallel=tp"], tmp_path / "run", attempt=2)
    first, second = seen(tmp_path / "run", 2)
    assert len(first["losses"]) == 3 and first["losses"] == second["losses"]
    assert all(torch.equal(first["masks"][name], second["masks"][name]) for name in first["masks"])


def Untested():
    """Sequences to train on and none to test with, for which there would be more to compile."""
    return Tokens()


@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")  # torch, of its own compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for a CPU by g++")
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("tp_sp", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("single", 1), ("fsdp", 2), ("tp", 2)))],
)
def test_compiled_blocks_give_the_same_losses(world, done, layout, ranks):
    world(2).run(torch._dynamo.reset)  # else a size that an earlier run of these processes had is one that varies
    overrides = [f"parallel={layout}", "model.depth=1", f"data._target_={HERE}.Untested"]
    directory = done(ranks, *overrides, "train.compile=true")
    assert differ(directory, done(ranks, *overrides)) < 1e-4
    assert weight_deviation(directory, done(ranks, *overrides)) < 1e-5


@pytest.mark.parametrize(("layout", "ranks"), [("single", 1), ("fsdp", 2)])
def test_offloaded_weights_give_the_same_losses(done, layout, ranks):
    plain, directory = (done(ranks, f"parallel={layout}", f"train.offload={on}") for on in ("false", "true"))
    assert differ(directory, plain) < 1e-6
    assert weight_deviation(directory, plain) < 1e-6


@pytest.mark.parametrize(("layout", "ranks"), [("tp", 2), ("hsdp", 4)])
def test_micro_batches_give_the_same_losses(done, layout, ranks):
    directory = done(ranks, f"parallel={layout}", "train.micro_batch=3")
    assert differ(directory, done(1)) < 1e-5
    assert weight_deviation(directory, done(1)) < 1e-5


def test_each_rank_leaves_a_trace_of_its_steps(done):
    directory = done(2, "parallel=ddp", "train.profile=2")
    assert sorted(path.name for path in (directory / "profile").iterdir()) == ["rank_0000.json", "rank_0001.json"]
    for path in (directory / "profile").iterdir():
        names = Counter(event.get("name") for event in json.loads(path.read_text())["traceEvents"])
        assert names["ProfilerStep#2"] == names["ProfilerStep#3"] == 1 and names["ProfilerStep#4"] == 0
        assert names["aten::mm"] > 2 * 2 * 7  # of the layers of two blocks in two steps


def test_what_the_background_saved_every_few_steps_is_gone_on_with(world, done, tmp_path):
    overrides = ["parallel=fsdp", "optim.momentum=0.9", "model.dropout=0.1", "train.keep_checkpoints=0"]
    background = [*TINY, *overrides, "train.async_save=true", "train.save_steps=2"]
    run(world, 2, [*background, "train.max_steps=4"], tmp_path / "run")
    run(world, 2, background, tmp_path / "run", attempt=2)
    undisturbed = done(2, *overrides)
    assert sorted(path.name for path in (undisturbed / "checkpoints").iterdir()) == ["step_000006"]
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step_000002", "step_000004", "step_000006"]
    assert losses(tmp_path / "run") == losses(undisturbed)
    assert weight_deviation(tmp_path / "run", undisturbed) == 0.0


class SavesAtTheEnd:
    """A callback."""

    def on_end(self, context):
        context.position.step += 1
        context.save()


def test_what_a_callback_saves_at_the_end_is_waited_for(world, tmp_path):
    callback = f"+train.callbacks.last._target_={HERE}.SavesAtTheEnd"
    run(world, 2, [*TINY, "parallel=fsdp", "train.async_save=true", callback], tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step_000007" / "manifest.json").is_file()


class Normed(nn.Module):
    """A network whose outputs depend on all samples of a batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, inputs):
        return self.layers(inputs)


def Points(split="train"):
    """Of 67 samples the last batch of 16 has 3: one of four ranks has none."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(67 if split == "train" else 9, 8, generator=generator)
    return TensorData(inputs, inputs[:, :4].argmax(dim=1))


POINTS = [f"model._target_={HERE}.Normed", f"data._target_={HERE}.Points", "train.validation=0", "train.batch_size=16"]
POINTS += ["optim=sgd", "optim.lr=0.1", "train.epochs=2"]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_batch_norm_over_all_ranks_is_that_of_one_process(world, tmp_path, layout):
    alone = run_on_rank(POINTS, str(tmp_path / "alone"))
    result = run(world, 4, [*POINTS, f"parallel={layout}", "parallel.sync_batchnorm=true"], tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 10
    assert differ(tmp_path / "run", tmp_path / "alone") < 1e-5
    assert weight_deviation(tmp_path / "run", tmp_path / "alone") < 1e-5
    assert result["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-5)


def test_batch_norm_of_each_rank_is_another(world, tmp_path):
    first = [*POINTS, "train.max_steps=1"]
    run(world, 2, [*first, "parallel=ddp"], tmp_path / "run")
    run_on_rank(first, str(tmp_path / "alone"))
    assert differ(tmp_path / "run", tmp_path / "alone") > 1e-3


FP16 = "train.precision=fp16: a cpu device has no fp16 training; use bf16, or train.device=cuda"


def refused_alone(overrides, directory):
    """On rank 0, which would hang if it waited for the other one."""
    if dist.get_rank() == 0:
        with pytest.raises(UserError, match=re.escape(FP16)):
            run_on_rank(overrides, directory)


def test_fp16_is_refused_on_a_cpu_before_ranks_wait_for_each_other(world, tmp_path):
    world(2).run(refused_alone, [*TINY, "parallel=ddp", "train.precision=fp16"], str(tmp_path / "run"))


def test_fp16_on_a_cpu_ends_with_exit_code_2_and_one_line(tmp_path):
    typed = ["+experiment=lm", "model.depth=1", "train.precision=fp16", "parallel=ddp", "launcher.tasks_per_node=2"]
    typed.append("train.schedule.warmup=0")
    (tmp_path / "text.txt").write_text("all the same " * 1000)
    ended = started([*typed, f"data.path={tmp_path / 'text.txt'}", f"run.dir={tmp_path / 'run'}"], tmp_path)
    assert (ended.returncode, ended.stderr.splitlines()) == (2, [f"error: {FP16}"])


def test_weights_of_another_model_are_refused_with_all_that_differs(tmp_path):
    other = Transformer(vocabulary=64, width=32, depth=3, heads=4, hidden=32, length=16).state_dict()
    del other["layers.0.mlp.up.weight"]
    torch.save(other, tmp_path / "other.pt")
    with pytest.raises(UserError) as caught:
        run_on_rank([*TINY, f"model.init_from={tmp_path / 'other.pt'}"], str(tmp_path / "run"))
    missing, surplus, shapes = re.fullmatch(
        r"model.init_from: .*other\.pt is of another model: missing (.*); not in this model: (.*); "
        r"other shapes: (.*); name the weights of this very model",
        str(caught.value),
    ).groups()
    assert missing == "layers.0.mlp.up.weight"
    assert re.fullmatch(r"layers\.2\..*, layers\.2\..*, layers\.2\..*, layers\.2\..* and 5 more", surplus)
    assert "layers.0.mlp.gate.weight is [32, 32] in it and [64, 32] here" in shapes
    assert not os.listdir(tmp_path / "run" / "checkpoints")
