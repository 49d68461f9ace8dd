"""The plan: geometry, place and environment of a run, and all that is wrong with it, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_train.config.compose import compose
from slurm_train.errors import ConfigError
from slurm_train.launch.plan import LaunchPlan, make_plan
from slurm_train.launch.show import show
from slurm_train.report.rundir import RunDirectory

FMNIST = ("+experiment=fmnist",)
TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def planned(*overrides: str, env: Mapping[str, str] | None = None) -> LaunchPlan:
    return make_plan(compose([*FMNIST, *overrides]), env or {})


def faults(*overrides: str, env: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        planned(*overrides, env=env)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("overrides", "env", "launcher", "world", "grid", "local_batch"),
    [
        ((), {}, "local", 1, {}, 64),
        (("launcher.tasks_per_node=2",), {}, "local", 2, {"dp_replicate": 2}, 32),
        (("parallel=ddp", "parallel.dp_replicate=4"), {}, "local", 4, {"dp_replicate": 4}, 16),
        (("parallel=tp", "parallel.tp=2"), {}, "local", 2, {"tp": 2}, 64),
        (("parallel=tp", "launcher.tasks_per_node=4"), {}, "local", 4, {"tp": 4}, 64),
        ((), TORCHRUN, "inline", 2, {"dp_replicate": 2}, 32),
        (("launcher.tasks_per_node=7",), TORCHRUN, "inline", 2, {"dp_replicate": 2}, 32),
        (("launcher=inline",), {}, "inline", 1, {}, 64),
    ],
)
def test_the_geometry(
    overrides: tuple[str, ...], env: dict[str, str], launcher: str, world: int, grid: dict[str, int], local_batch: int
) -> None:
    plan = planned(*overrides, env=env)
    assert (plan.launcher, plan.world_size, plan.local_batch) == (launcher, world, local_batch)
    assert plan.grid == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1, **grid}
    assert [place.rank for place in plan.ranks] == list(range(world))


FAULTS = {
    "tp does not divide": (
        ("parallel=tp", "parallel.tp=3"),
        "parallel.tp=3: does not divide the 512 out_features of hidden.0 (colwise)",
    ),
    "batch": (
        ("launcher.tasks_per_node=3",),
        "train.batch_size=64: the global batch is not divisible by the 3 data ranks",
    ),
    "grid": (("parallel=ddp", "parallel.dp_replicate=2", "launcher.tasks_per_node=3"), "but there are 3 ranks"),
    "single": (("parallel=single", "launcher.tasks_per_node=2"), "but there are 2 ranks"),
    "ddp with tp": (("parallel=ddp", "parallel.tp=2"), "the layout ddp has no tensor parallelism"),
    "tp of several layers": (
        ("parallel=tp", "parallel.tp=3"),
        "the 512 in_features of head (rowwise); use a tp of 2 or 4, or sizes that 3 divides",
    ),
    "ddp with tp and replicas": (
        ("parallel=ddp", "parallel.tp=2", "launcher.tasks_per_node=4"),
        "parallel.tp=2: the layout ddp has no tensor parallelism; use parallel=ddp_tp",
    ),
    "ddp with shards": (
        ("parallel=ddp", "parallel.dp_shard=2", "launcher.tasks_per_node=4"),
        "parallel.dp_shard=2: the layout ddp has no sharding; use parallel=hsdp",
    ),
    "no product": (
        ("parallel=pp_tp", "launcher.tasks_per_node=3"),
        "parallel.pp=2: pp=2 x tp=-1: the fixed axes take 2 ranks, which does not divide the world of 3; start 2 or 4",
    ),
    "micro-batch": (
        ("train.micro_batch=64", "launcher.tasks_per_node=2"),
        "train.micro_batch=64: is more than a data rank's share of the global batch, 64 / 2 data ranks = 32; use at",
    ),
    "sequence of an MLP": (
        ("parallel=tp_sp", "parallel.tp=2"),
        "parallel.sequence=true: the model's tensor-parallel plan has no module of style sequence or rowwise_scatter "
        "or gather; use parallel=tp",
    ),
    "sequence typed": (
        ("parallel=tp", "parallel.tp=2", "parallel.sequence=true"),
        "style sequence or rowwise_scatter or gather; leave it out",
    ),
    "no blocks": (("parallel=pp", "parallel.pp=2"), "parallel.pp=2: the model has no blocks to cut between; name"),
    "cuts": (
        ("parallel=pp", "parallel.pp=3", "parallel.cuts=[head]"),
        "parallel.cuts=[head]: 3 stages begin at 2 cuts, not at 1; name 2 modules",
    ),
    "blocks of an MLP's own": (
        ("parallel=pp", "parallel.pp=2", "train.batch_size=1", "parallel.blocks=[hidden.*]"),
        "train.batch_size=1: the 1 samples of a data rank make no micro-batches that are equal, at least 2; use 2",
    ),
    "initial weights": (("model.init_from=none.pt",), "model.init_from=none.pt: is no file"),
    "no layer": (("model=linear", "parallel=tp", "parallel.tp=2"), "the model has no layer to shard"),
    "plan pattern": (
        ("parallel=tp", "parallel.tp=2", "parallel.plan.fc=colwise"),
        "parallel.plan.fc=colwise: matches no",
    ),
    "names": (("parallel=tp", "parallel.tp=2", "parallel.plan.fc=colwise"), "they are hidden.0, head"),
    "classes": (("model.classes=9",), "model.classes=9: the data has 10 classes; use 10"),
    "bytes": (
        ("model=lm_tiny", "data=bytes", "model.vocabulary=128"),
        "model.vocabulary=128: the data has 256 kinds of tokens; use 256",
    ),
    "tokens for an MLP": (
        ("data=bytes",),
        "data._target_=slurm_train.data.text.Bytes: its samples are sequences of tokens, which the model does not",
    ),
    "images for a language model": (
        ("model=lm_tiny",),
        "data._target_=slurm_train.data.fashion_mnist.FashionMNIST: its samples are of shape 1 x 28 x 28, but the "
        "model takes sequences of tokens; use data=bytes or data=tokens",
    ),
    "samples": (("train.batch_size=100000",), "fewer than one global batch"),
    "validation": (("train.validation=1234567",), "train.validation=1234567: leaves none"),
    "data path": (("data.root=/nonexistent",), "data.root: /nonexistent does not exist"),
    "nodes": (("launcher.nodes=2",), "launcher.nodes=2: the local launcher has one node"),
    "cpus": (("launcher.cpus_per_task=100000",), "launcher.cpus_per_task: 1 x 100000 CPUs are more than"),
    "submitit's own signs": (("run.dir=a%jb",), "contains %j, which submitit replaces"),
    "a run directory below a file": (("run.dir=/dev/null/x",), "/dev/null is not a directory"),
}


TRANSFORMER = (
    "model._target_=slurm_train.models.transformer.Transformer",
    *("data=bytes", f"data.path={__file__}", "data.length=32"),
    *("model.vocabulary=288", "model.width=48", "model.depth=6", "model.heads=8", "model.kv_heads=4"),
    *("model.hidden=96", "model.length=32"),
)
TRANSFORMER_FAULTS = {
    "heads": (
        ("parallel=tp", "parallel.tp=3"),
        "parallel.tp=3: does not divide the 8 heads and the 4 kv_heads; use a tp of 2 or 4, or sizes that 3 divides",
    ),
    "sequence": (
        ("parallel=tp_sp", "parallel.tp=3"),
        "does not divide the 8 heads, the 4 kv_heads and the 32 tokens of a sequence; use a tp of 2 or 4",
    ),
    "many sizes": (
        ("parallel=tp", "parallel.tp=5"),
        "(rowwise_scatter), the 48 out_features of layers.*.attention.q (colwise) and 7 more sizes; use a tp of 4, or",
    ),
    "impossible heads": (("model.heads=16",), "model.heads=16: gives each head 48 / 16 = 3 features, an odd number"),
    "plan pattern": (
        ("parallel=tp", "parallel.tp=2", "parallel.plan.fc=colwise"),
        "matches no linear layer of the model; they are embed, layers.*.attention.q,",
    ),
    "two patterns": (
        ("parallel=tp", "parallel.tp=2", "parallel.plan={embed: rowwise, emb*: colwise}"),
        "parallel.plan.emb*=colwise: embed is rowwise by embed already; let one pattern match",
    ),
    "loss on shards": (
        ("parallel=tp", "parallel.tp=2", "parallel.loss_parallel=true", "parallel.plan.embed=rowwise"),
        "parallel.loss_parallel=true: the model's tensor-parallel plan has no module of style head; leave it out",
    ),
    "blocks": (
        ("parallel=pp", "parallel.pp=8"),
        "parallel.pp=8: 8 stages, but the model has 6 blocks; use parallel.pp=6 on 6 ranks, or parallel.pp=4 "
        "parallel.dp_replicate=-1, or model.depth=8",
    ),
    "blocks for all ranks": (
        ("parallel=pp", "launcher.tasks_per_node=16", "parallel.tp=2"),
        "parallel.pp=-1: 8 stages, but the model has 6 blocks; use parallel.pp=6 on 12 ranks, or parallel.pp=4 "
        "parallel.dp_replicate=-1, or model.depth=8",
    ),
    "blocks beside shards": (
        ("parallel=pp_fsdp", "parallel.pp=8", "launcher.tasks_per_node=16"),
        "use parallel.pp=6 on 12 ranks, or parallel.pp=4, or model.depth=8",
    ),
    "few blocks": (
        ("parallel=pp", "parallel.pp=3", "model.depth=2"),
        "use parallel.pp=2 on 2 ranks, or model.depth=3",
    ),
    "interleaved blocks": (
        ("parallel=pp", "parallel.pp=4", "parallel.schedule=interleaved"),
        "parallel.pp=4: pp=4 x virtual=2 = 8 stages, but the model has 6 blocks; use parallel.pp=3 on 3 ranks, or",
    ),
    "tied": (
        ("parallel=pp", "parallel.pp=2", "model.tied=true"),
        "model.tied=true: a tied weight across pipeline stages; use model.tied=false",
    ),
    "micro-batches": (
        ("parallel=pp", "parallel.pp=4", "parallel.microbatches=6"),
        "parallel.microbatches=6: the 64 samples of a data rank take a number that divides them, at least 4; use 4 or",
    ),
    "micro-batches of a data rank": (
        ("parallel=pp_fsdp", "parallel.pp=4", "train.batch_size=8", "launcher.tasks_per_node=16"),
        "train.batch_size=8: the 2 samples of a data rank make no micro-batches that are equal, at least 4; use 16",
    ),
}


@pytest.mark.parametrize("name", TRANSFORMER_FAULTS)
def test_faults_of_a_transformer(name: str) -> None:
    overrides, text = TRANSFORMER_FAULTS[name]
    found = faults(*TRANSFORMER, *overrides)
    assert len(found) == 1 and text in found[0]


@pytest.mark.parametrize(
    ("overrides", "grid"),
    [
        (("parallel=fsdp_tp", "launcher.tasks_per_node=8"), {"dp_shard": 4, "tp": 2}),
        (("parallel=hsdp_tp", "launcher.tasks_per_node=8"), {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        (("parallel=tp_sp", "parallel.tp=4"), {"tp": 4}),
        (("parallel.tp=2", "launcher.tasks_per_node=4"), {"dp_replicate": 2, "tp": 2}),
        (("parallel=pp_tp", "parallel.dp_shard=2", "launcher.tasks_per_node=8"), {"pp": 2, "dp_shard": 2, "tp": 2}),
        (("parallel=pp", "parallel.pp=4"), {"pp": 4}),  # 6 blocks on 4 stages
        (("parallel=pp", "parallel.pp=3", "parallel.schedule=interleaved", "train.batch_size=12"), {"pp": 3}),
        (("parallel=pp", "parallel.pp=2", "parallel.cuts=[layers.5]"), {"pp": 2}),
    ],
)
def test_layouts_that_fit_a_transformer(overrides: tuple[str, ...], grid: dict[str, int]) -> None:
    plan = planned(*TRANSFORMER, *overrides)
    assert plan.grid == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1, **grid}
    assert plan.costs and plan.costs["parameters"] == plan.parameters


def test_what_is_said_of_too_few_blocks_works() -> None:
    typed, six = (*TRANSFORMER, "model.depth=4", "parallel=pp", "train.batch_size=12"), "launcher.tasks_per_node=6"
    (line,) = faults(*typed, six)
    assert "use parallel.pp=4 on 4 ranks, or parallel.pp=3 parallel.dp_replicate=-1, or model.depth=6" in line
    assert planned(*typed, "parallel.pp=4", "launcher.tasks_per_node=4").grid["pp"] == 4
    assert planned(*typed, "parallel.pp=3", "parallel.dp_replicate=-1", six).grid["dp_replicate"] == 2
    assert planned(*typed, "model.depth=6", six).grid["pp"] == 6


def test_a_users_model_may_be_cut_by_name() -> None:
    Path("mine.py").write_text("class Net:\n    pass\n")
    mine = ("model._target_=mine.Net", "parallel=pp", "parallel.pp=2")
    assert planned(*mine).costs is None
    assert planned(*mine, "parallel.cuts=[head]").grid["pp"] == 2
    assert "micro-batches" in faults(*mine, "train.batch_size=1")[0]


def test_a_run_that_goes_on_needs_no_initial_weights(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", "a: 1\n", "{}")
    composed = compose([*FMNIST, "model.init_from=none.pt"])
    assert make_plan(composed, {}, existing=directory).continues


def test_the_costs_are_shown() -> None:
    text = show(planned(*TRANSFORMER, "parallel=pp_tp", "launcher.tasks_per_node=4", "optim=sgd"))
    lines = text[text.index("costs of a step") :].splitlines()
    rows = [line.split() for line in lines]
    for words in (
        ["micro-batches", "4", "of", "16", "samples,", "a", "rank", "waits", "20%", "of", "the", "time"],
        ["along", "pp", "384", "KiB", "sent", "a", "rank"],
        ["layers.*.attention.k", "(6)", "48", "x", "24", "colwise", "48", "x", "12"],
        ["layers.*.mlp.down", "(6)", "96", "x", "48", "rowwise_scatter", "48", "x", "48"],
    ):
        assert words in rows
    assert any(line.startswith("  memory") and "not known" not in line for line in lines)
    assert "in the host's memory" not in text and "in the host's memory" in show(planned("train.offload=true"))
    unknown = show(planned("optim._target_=torch.optim.Adamax"))
    assert "a rank, optimizer not known, activations not known:" in unknown


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    overrides, text = FAULTS[name]
    assert text in "\n".join(faults(*overrides))


@pytest.mark.parametrize(
    ("overrides", "env", "text"),
    [
        ((), {"RANK": "0"}, "LOCAL_RANK: RANK set, but"),
        ((), {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, "start it with srun"),
        (("launcher=local",), TORCHRUN, "launcher=local: this process was started as rank 1 of 2 (RANK=1)"),
        (
            ("launcher.gpus_per_node=3",),
            {"CUDA_VISIBLE_DEVICES": "5,7"},
            "launcher.gpus_per_node: 3 are more than the 2",
        ),
    ],
)
def test_faults_of_the_environment(overrides: tuple[str, ...], env: dict[str, str], text: str) -> None:
    assert text in "\n".join(faults(*overrides, env=env))


def test_all_faults_are_told_at_once() -> None:
    found = faults(
        "parallel=tp", "parallel.tp=3", "train.batch_size=70000", "data.root=/nonexistent", "run.dir=/dev/null/x"
    )
    assert [line.partition(":")[0] for line in found] == ["data.root", "parallel.tp=3", "run.dir=/dev/null/x"]


def test_nothing_is_made(tmp_path: Path) -> None:
    plan = planned()
    assert list(tmp_path.iterdir()) == []
    assert Path(plan.run_dir).parent == tmp_path / "runs" / "fmnist"


def test_the_place_of_a_run(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "12", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1", "SLURM_PROCID": "0"}
    step |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_ID": "0"}
    assert planned("run.name=mine").run_dir == str(tmp_path / "runs/fmnist/mine")
    assert planned("run.dir=here").run_dir == str(tmp_path / "here")
    assert planned(env=step).run_id == "job-12"
    RunDirectory.create(tmp_path / "runs/fmnist/job-12", "a: 1\n", "{}")
    assert planned(env=step).run_id == "job-12-2"
    again = planned(env=step | {"SLURM_RESTART_COUNT": "1"})
    assert (again.run_id, again.continues) == ("job-12", True)
    assert "used already; choose another one, or go on with it by the verb resume" in faults("run.name=job-12")[0]


def test_the_environment_of_the_ranks() -> None:
    assert "GLOO_SOCKET_IFNAME" not in planned().environment
    assert planned(env={"GLOO_SOCKET_IFNAME": "eth0"}).environment == {"PYTHONUNBUFFERED": "1"}
    env = {"CUDA_VISIBLE_DEVICES": "5,7,8"}
    assert planned("launcher.gpus_per_node=2", env=env).environment["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert "CUDA_VISIBLE_DEVICES" not in planned(env=env).environment
    assert planned(env=TORCHRUN).environment == {}


def test_threads_come_from_whoever_says_so() -> None:
    assert (planned("train.threads=3").threads, planned("train.threads=3").threads_reason) == (3, "train.threads")
    plan = planned("launcher.cpus_per_task=1")
    assert (plan.threads, plan.environment["OMP_NUM_THREADS"]) == (1, "1")
    assert planned(env={"OMP_NUM_THREADS": "5"}).threads == 5


def test_a_users_model_and_data_are_not_checked() -> None:
    Path("mine.py").write_text("class Net:\n    pass\n\n\ndef data(split): ...\n")
    plan = planned("model._target_=mine.Net", "data._target_=mine.data")
    assert plan.parameters is None and plan.data is None
    assert any("mine.Net" in note for note in plan.unchecked) and any("mine.data" in note for note in plan.unchecked)
    assert "not checked:" in show(plan)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (("parallel=pp", "parallel.pp=2", "parallel.cuts=[layers.5]"), "parallel.cuts"),
        (("parallel.blocks=[layers.*]", "train.recompute=[nope]"), "parallel.blocks, train.recompute"),
        (("train.recompute=all",), ""),
    ],
)
def test_names_of_modules_are_not_checked(overrides: tuple[str, ...], keys: str) -> None:
    notes = planned(*TRANSFORMER, *overrides).unchecked
    assert notes == ((f"{keys}: names of modules (plan --deep looks)",) if keys else ())


@pytest.mark.parametrize(("warmup", "warned"), [(0, False), (6, False), (7, True), (8, True)])
def test_a_warm_up_as_long_as_the_run(warmup: int, warned: bool) -> None:
    text = f"train.schedule.warmup={warmup}: the run has 7 steps, so its learning rate only ever rises"
    plan = planned("train.max_steps=7", f"train.schedule.warmup={warmup}")
    assert plan.warnings == ((text,) if warned else ())


def test_the_plan_as_json_and_as_text() -> None:
    plan = planned("parallel=tp", "parallel.tp=2", "launcher.time=1:30")
    read = json.loads(plan.to_json())
    assert (read["world_size"], read["time_seconds"], read["parameters"]) == (2, 90, 407050)
    assert [layer["name"] for layer in read["layers"]] == ["hidden.0", "head"]
    text = show(plan)
    for part in (plan.run_dir, "1 node x 2 = 2", "tp=2", "407,050 parameters", "784 x 512  colwise  784 x 256", "1:30"):
        assert part in text


def test_a_large_world_is_shown_by_its_ends() -> None:
    lines = show(planned("launcher.tasks_per_node=64")).splitlines()
    table = lines[lines.index("") + 2 :]
    ranks = [line.split()[0] for line in table[: table.index("")]]
    assert ranks == [*map(str, range(8)), "...", *map(str, range(56, 64))]


def test_steps_that_end_a_run_before_its_last_epoch() -> None:
    plan = planned("train.epochs=100", "train.max_steps=7")
    assert plan.total_steps == 7 < plan.epochs * (plan.steps_per_epoch or 0)
    assert ", ends after 7 steps (train.max_steps)" in show(plan)
