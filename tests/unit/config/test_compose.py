"""compose: good command lines, and one line for each bad one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from slurm_train.config.checks import check
from slurm_train.config.compose import Composed, apply, compose
from slurm_train.errors import ConfigError

MODELS = "cnn, linear, lm_125m, lm_1b, lm_350m, lm_7b, lm_small, lm_tiny, mlp, transformer"
LAYOUTS = "auto, ddp, ddp_tp, fsdp, fsdp_tp, hsdp, hsdp_tp, pp, pp_fsdp, pp_tp, single, tp, tp_sp"


def lines(act: Callable[[], Any]) -> list[str]:
    """What a user is told: by compose or, where it finds nothing, by check."""
    try:
        composed = act()
    except ConfigError as error:
        return str(error).splitlines()
    return [str(fault) for fault in check(composed.config, composed.config_dirs)]


BAD = [
    (["modle=cnn"], "modle=cnn: unknown key; did you mean model?"),
    (["model=cnnn"], f"model=cnnn: model has no cnnn; did you mean cnn? options of model: {MODELS}"),
    (["model="], f"model=: no option of model is given; options of model: {MODELS}"),
    (["model=null"], f"model=null: model has no null; options of model: {MODELS}"),
    (
        ["model=../data/line"],
        "model=../data/line: model has no ../data/line; for a class of your own type model._target_=../data/line",
    ),
    (
        ["model=my_file.Net"],
        "model=my_file.Net: model has no my_file.Net; for a class of your own type model._target_=my_file.Net",
    ),
    (
        ["+experiment=fmnst"],
        "+experiment=fmnst: experiment has no fmnst; did you mean fmnist? options of experiment: fmnist, "
        "fmnist_cnn, linear_regression, lm",
    ),
    (
        ["parallel=dpp"],
        f"parallel=dpp: parallel has no dpp; did you mean pp? options of parallel: {LAYOUTS}",
    ),
    (
        ["modell/x=y"],
        "modell/x=y: no such group; did you mean model? groups: data, experiment, launcher, model, optim, "
        "parallel, train",
    ),
    (["model@teacher=mlp"], "model@teacher=mlp: a group has one place here; type model=mlp"),
    (["~model"], f"~model: a group cannot be taken away; options of model: {MODELS}"),
    (["model=cnn", "model=mlp"], "model=mlp: model is chosen twice; keep one of model=cnn and model=mlp"),
    (["train.epoch=3"], "train.epoch=3: unknown key; did you mean train.epochs?"),
    (["epochs=3"], "epochs=3: unknown key; did you mean train.epochs?"),
    (["+epochs=3"], "+epochs=3: unknown key; did you mean train.epochs?"),
    (["trian.epochs=3"], "trian.epochs=3: unknown key; did you mean train.epochs?"),
    (["lr=3"], "lr=3: unknown key; did you mean optim.lr?"),
    (["++train.zzzz=3"], "++train.zzzz=3: unknown key; did you mean train?"),
    (["train.epochs.x=3"], "train.epochs.x=3: train.epochs is a value and has no keys; did you mean train.epochs?"),
    (["train={epoch: 3}"], "train={epoch: 3}: train.epoch: unknown key; did you mean train.epochs?"),
    (["train.epochs=abc"], "train.epochs=abc: must be an integer"),
    (["train.epochs=1.5"], "train.epochs=1.5: must be an integer"),
    (["train.epochs=true"], "train.epochs=true: must be an integer"),
    (["train.epochs=null"], "train.epochs=null: must be an integer"),
    (["train.epochs="], "train.epochs=: must be an integer"),
    (["train.max_steps=x"], "train.max_steps=x: must be an integer or null"),
    (["train={epochs: x}"], "train={epochs: x}: train.epochs: must be an integer"),
    (["parallel.find_unused=7x"], "parallel.find_unused=7x: must be true or false"),
    (["train.timeout=long"], "train.timeout=long: must be a number"),
    (["run.name=[1]"], "run.name=[1]: must be a text or null"),
    (["launcher=local", "launcher.nodes=two"], "launcher.nodes=two: must be an integer"),
    (
        ["train.loss=torch.nn.MSELoss"],
        "train.loss=torch.nn.MSELoss: must have a _target_; type train.loss._target_=FILE.NAME",
    ),
    (["train.epochs"], "train.epochs: is not KEY=VALUE"),
    (["fmnist"], "fmnist: is not KEY=VALUE; did you mean +experiment=fmnist?"),
    ([""], "'': is not KEY=VALUE"),
    (["=3"], "=3: is not KEY=VALUE"),
    (["--epochs=3"], "--epochs=3: an override has no dashes; did you mean train.epochs?"),
    (["a b=3"], "a b=3: a b is not a key"),
    (["data.root=x(1)"], "data.root=x(1): unknown function; quote it inside the argument: data.root='x(1)'"),
    (
        ["data.root={"],
        "data.root={: the value does not follow Hydra's grammar; type data.root={NAME: 'VALUE', ...}, but a NAME with "
        "quotes or brackets in a YAML file (--config-dir)",
    ),
    (
        ["parallel.plan={'layers.*.q': colwise}"],
        "parallel.plan={'layers.*.q': colwise}: the value does not follow Hydra's grammar; type parallel.plan={NAME: "
        "'VALUE', ...}, but a NAME with quotes or brackets in a YAML file (--config-dir)",
    ),
    (
        ["parallel.plan.layers.*.q=colwise"],
        "parallel.plan.layers.*.q=colwise: parallel.plan.layers.*.q is not a key; type parallel.plan={NAME: 'VALUE', "
        "...}, but a NAME with quotes or brackets in a YAML file (--config-dir)",
    ),
    (
        ["train.recompute=[layers.[01]]"],
        "train.recompute=[layers.[01]]: the value does not follow Hydra's grammar; quote each text in the list: "
        "train.recompute=['TEXT', ...]",
    ),
    (
        ["train.epochs=1,2"],
        "train.epochs=1,2: several values; a sweep needs -m; quote a comma inside the argument: "
        "train.epochs='1,2', or type a list: train.epochs=[1,2]",
    ),
    (["seed=range(1,4)"], "seed=range(1,4): several values; a sweep needs -m; give one value"),
    (["~train.epochs"], "~train.epochs: only arguments of a _target_ can be taken away; set it: train.epochs=VALUE"),
    (["~model.widht"], "~model.widht: there is no such key; did you mean model.width?"),
    (["~model.width=3"], "~model.width=3: model.width is 512; type ~model.width"),
    (["run.name=${experiment}"], "run.name=${experiment}: Interpolation key 'experiment' not found"),
    (
        ["run.dir=${oc.env:NO_SUCH_NAME}"],
        "run.dir=${oc.env:NO_SUCH_NAME}: Environment variable 'NO_SUCH_NAME' not found",
    ),
    (["train.epochs=${run.experiment}"], "train.epochs=${run.experiment}: must be an integer"),
    (["run.name=${hydra:job.num}"], "run.name=${hydra:job.num}: Hydra does not know this before the run starts"),
    (["model.width=???"], "model.width: needs a value; type model.width=VALUE"),
    (["hydra.job.foo=3"], "hydra.job.foo=3: Could not override 'hydra.job.foo'."),
    (
        ["model.widht=3"],
        "model.widht=3: slurm_train.models.mlp.MLP has no argument widht; did you mean width? it takes "
        "in_features, width, depth, classes, dropout",
    ),
    (["optim._target_=torch.optim.Adm"], "optim._target_=torch.optim.Adm: torch.optim has no Adm; did you mean Adam?"),
    (
        ["model._target_=no_such_module_here.Net"],
        "model._target_=no_such_module_here.Net: there is no module no_such_module_here",
    ),
    (["train.epochs=0"], "train.epochs=0: must be at least 1"),
    (["train.batch_size=-64"], "train.batch_size=-64: must be at least 1"),
    (
        ["train.validation=1.5"],
        "train.validation=1.5: must be a fraction from 0 to below 1, or a whole number of samples",
    ),
    (
        ["train.validation=-0.1"],
        "train.validation=-0.1: must be a fraction from 0 to below 1, or a whole number of samples",
    ),
    (
        ["train.validation=nan"],
        "train.validation=nan: must be a fraction from 0 to below 1, or a whole number of samples",
    ),
    (["train.device=gpu"], "train.device=gpu: must be auto, cpu, cuda, mps or cuda:N"),
    (["train.device=cuda:-1"], "train.device=cuda:-1: must be auto, cpu, cuda, mps or cuda:N"),
    (["train.early_stopping.metric=loss"], "train.early_stopping.metric=loss: must be one of val_loss, val_accuracy"),
    (
        ["train.early_stopping.patience=2", "train.validation=0"],
        "train.early_stopping.patience=2: there is no validation metric to watch; hold out samples: "
        "train.validation=0.1",
    ),
    (
        ["parallel.name=zero"],
        "parallel.name=zero: must be one of auto, single, ddp, fsdp, hsdp, tp, tp_sp, ddp_tp, fsdp_tp, hsdp_tp, pp, "
        "pp_tp, pp_fsdp",
    ),
    (["parallel.pp=0"], "parallel.pp=0: must be at least 1, or -1 for the rest of the ranks"),
    (["parallel.tp=0"], "parallel.tp=0: must be at least 1, or -1 for the rest of the ranks"),
    (
        ["parallel=tp", "parallel.dp_replicate=-1"],
        "parallel.tp=-1: only one axis can be -1, here parallel.dp_replicate and parallel.tp are",
    ),
    (
        ["parallel.plan.fc=diagonal"],
        "parallel.plan.fc=diagonal: must be one of colwise, rowwise, replicate, sequence, rowwise_scatter, gather, "
        "head, sharded",
    ),
    (["launcher.nodes=0"], "launcher.nodes=0: must be at least 1"),
    (
        ["launcher.time=soon"],
        "launcher.time=soon: 'soon' is not a time limit; write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
    ),
    (
        ["launcher.time=0"],
        "launcher.time=0: a time limit of zero; write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
    ),
    (["run.name=a/b"], "run.name=a/b: must be the name of a directory: not empty, without /"),
    (["run.name=.."], "run.name=..: must be the name of a directory: not empty, without /"),
    (["run.name="], "run.name=: must be the name of a directory: not empty, without /"),
    (["seed=-1"], "seed=-1: must be from 0 to 2^63 - 1"),
    (["~model._target_"], "model._target_: is not given; type model._target_=FILE.NAME"),
    (
        ["model._target_=collections"],
        "model._target_=collections: 'collections' names no module; type FILE.collections for collections in FILE.py",
    ),
    (["model._target_=Net"], "model._target_=Net: 'Net' names no module; type FILE.Net for Net in FILE.py"),
    (["model._target_=a-b.Net"], "model._target_=a-b.Net: 'a-b.Net' is not a dotted name such as my_file.MyNet"),
    (
        ["train.callbacks.mine.x=1"],
        "train.callbacks.mine._target_: is not given; type train.callbacks.mine._target_=FILE.NAME",
    ),
    (
        ["data.split=3x", "data.rot=1"],
        "data.rot=1: slurm_train.data.fashion_mnist.FashionMNIST has no argument rot; did you mean root? it "
        "takes split, root, download",
    ),
    (["run.dir="], "run.dir=: must be a directory"),
    (["train.grad_clip=0"], "train.grad_clip=0: must be above 0"),
    (["train.start_timeout=0"], "train.start_timeout=0: must be above 0"),
    (["train.workers=-1"], "train.workers=-1: must be at least 0"),
    (["train.keep_checkpoints=-2"], "train.keep_checkpoints=-2: must be at least 0"),
    (
        ["parallel=fsdp", "parallel.dp_shard=-2"],
        "parallel.dp_shard=-2: must be at least 1, or -1 for the rest of the ranks",
    ),
    (
        ["parallel=pp", "parallel.tp=-1"],
        "parallel.tp=-1: only one axis can be -1, here parallel.pp and parallel.tp are",
    ),
    (["launcher=pbs"], "launcher=pbs: launcher has no pbs; options of launcher: auto, inline, local, slurm"),
    (["launcher.tasks_per_node=0"], "launcher.tasks_per_node=0: must be at least 1"),
    (["launcher.gpus_per_node=-1"], "launcher.gpus_per_node=-1: must be at least 0"),
    (["model.width.x=3"], "model.width.x=3: model.width is a value and has no keys; did you mean model.width?"),
    (["train.callbacks=x"], "train.callbacks=x: must be a mapping such as {key: value}"),
    (["run=fast"], "run=fast: must be a mapping such as {key: value}"),
    (
        ["optim._target_=torch.nn.functional"],
        "optim._target_=torch.nn.functional: torch.nn.functional is a module; name a class or function in it",
    ),
]


@pytest.mark.parametrize(("overrides", "line"), BAD, ids=[" ".join(overrides) or "empty" for overrides, _ in BAD])
def test_each_bad_command_line_gets_one_line(overrides: list[str], line: str) -> None:
    assert lines(lambda: compose(overrides)) == [line]


def test_all_faults_are_told_at_once_in_the_order_typed() -> None:
    typed = ["modle=cnn", "train.epochs=abc", "+experiment=fmnst", "train.batch_size=-1", "optim.lrr=1"]
    with pytest.raises(ConfigError) as told:
        compose(typed)
    assert [fault.key for fault in told.value.faults] == typed[:4]  # optim hangs on the unknown experiment


def test_arguments_of_a_choice_that_failed_are_not_judged() -> None:
    assert len(lines(lambda: compose(["model=cnnn", "model.channels=8"]))) == 1


ODD = [
    "a=b",
    "x y",
    "7%",
    "été",
    "日本",
    "a,b",
    "a\nb",
    "~/data",
    "it's",
    'say "x"',
    "a#b;c",
    "${x}",
    "(1)",
    "[a",
    "\\",
]


@pytest.mark.parametrize("text", ODD)
def test_quoted_values_arrive_unchanged(text: str) -> None:
    quoted = QuotedString(text.replace("${", "\\${"), Quote.single).with_quotes()
    assert compose([f"data.root={quoted}", f"run.dir={quoted}"]).config.data.root == text


@pytest.mark.parametrize("text", ["a=b", "x y", "7%", "été", "日本", "a\nb", "~/data", "a#b;c", "/a/b:c", "a=b=c"])
def test_plain_values_need_no_quotes(text: str) -> None:
    assert compose([f"data.root={text}"]).config.data.root == text


@pytest.mark.parametrize("text", ["1e3", "007", "1_000", "3", "true", "1.50"])
def test_a_text_is_the_letters_typed(text: str) -> None:
    assert compose([f"run.name={text}"]).config.run.name == text


GOOD: list[tuple[list[str], dict[str, Any]]] = [
    ([], {"model._target_": "slurm_train.models.mlp.MLP", "train.epochs": 5, "parallel.dp_replicate": -1}),
    (
        ["+experiment=fmnist"],
        {"run.experiment": "fmnist", "train.batch_size": 64, "optim._target_": "torch.optim.AdamW"},
    ),
    (["experiment=fmnist_cnn"], {"model.channels": 16, "train.epochs": 3}),
    (["++experiment=linear_regression"], {"train.loss._target_": "torch.nn.MSELoss", "train.validation": 0.0}),
    (["+experiment=fmnist", "model=cnn"], {"model._target_": "slurm_train.models.cnn.CNN"}),
    (["+model=cnn", "train=default"], {"model.channels": 16}),
    (["parallel=tp", "parallel.tp=2"], {"parallel.name": "tp", "parallel.tp": 2, "parallel.dp_replicate": 1}),
    (["+train.epochs=3", "++seed=4"], {"train.epochs": 3, "seed": 4}),
    (["train={epochs: 3, batch_size: 8}"], {"train.epochs": 3, "train.batch_size": 8}),
    (["train.epochs=3", "train.epochs=4"], {"train.epochs": 4}),
    (["train.max_steps=null"], {"train.max_steps": None}),
    (["run.name=${run.experiment}-${model.width}"], {"run.name": "run-512"}),
    (["run.name=${hydra:runtime.choices.model}"], {"run.name": "mlp"}),
    (["run.name=${oc.env:RUN_OWNER}"], {"run.name": "ada"}),
    (["train.batch_size=${model.width}"], {"train.batch_size": 512}),
    (["parallel.plan.block.0.fc1=colwise"], {"parallel.plan": {"block.0.fc1": "colwise"}}),
    (["train.callbacks.mine={_target_: a.B, x: [1,2]}"], {"train.callbacks.mine.x": [1, 2]}),
    (["train.callbacks.mine.x=[1,2]", "train.callbacks.mine.x.1=5"], {"train.callbacks.mine.x": [1, 5]}),
    (["~model.dropout"], {"model.dropout": None}),
    (["launcher.time=90"], {"launcher.time": "90"}),
    (["launcher=local", "launcher.time=1:30:00"], {"launcher.name": "local", "launcher.time": "1:30:00"}),
    (["hydra.job.name=x", "run.name=${hydra:job.name}"], {"run.name": "x"}),
]


@pytest.mark.parametrize(("overrides", "values"), GOOD, ids=[" ".join(overrides) or "none" for overrides, _ in GOOD])
def test_good_command_lines(overrides: list[str], values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_OWNER", "ada")
    composed = compose(overrides)
    assert composed.overrides == tuple(overrides)
    assert {key: plain(composed, key) for key in values} == values


def plain(composed: Composed, key: str) -> Any:
    value = OmegaConf.select(composed.config, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


@pytest.mark.parametrize("experiment", ["fmnist", "fmnist_cnn", "linear_regression", "lm"])
@pytest.mark.parametrize("parallel", LAYOUTS.split(", "))
def test_every_built_in_choice_passes_the_checks(experiment: str, parallel: str) -> None:
    composed = compose([f"+experiment={experiment}", f"parallel={parallel}"])
    assert check(composed.config) == []
    assert composed.choices["experiment"] == experiment
    assert "hydra" not in composed.config


def test_a_target_typed_drops_the_arguments_of_the_old_one() -> None:
    config = compose(["model.width=3", "model._target_=my_file.Net", "model.depth=2"]).config
    assert config.model == {"_target_": "my_file.Net", "width": 3, "depth": 2}
    assert compose(["model={_target_: my_file.Net}"]).config.model == {"_target_": "my_file.Net"}
    assert compose(["model._target_=slurm_train.models.mlp.MLP"]).config.model.width == 512


def test_hydra_is_left_as_it_was() -> None:
    compose(["+experiment=fmnist"])
    assert not GlobalHydra.instance().is_initialized()
    assert HydraConfig.instance().cfg is None


def test_apply_changes_a_saved_config() -> None:
    saved = compose(["+experiment=fmnist", "parallel=ddp", "train.epochs=2"]).config
    changed = apply(saved, ["parallel=tp", "launcher=local", "train.epochs=9"])
    assert changed.config.parallel.name == "tp"
    assert changed.config.train.epochs == 9
    assert changed.config.run.experiment == "fmnist"
    assert changed.choices == {"parallel": "tp", "launcher": "local"}
    assert saved.parallel.name == "ddp"
    assert apply(saved, []).config == saved


def test_apply_tells_all_faults() -> None:
    saved = compose(["+experiment=fmnist"]).config
    told = lines(lambda: apply(saved, ["+experiment=fmnist_cnn", "train.epoch=3", "model=cnnn"]))
    assert told == [
        "+experiment=fmnist_cnn: cannot be changed on a saved run; start a new run",
        "train.epoch=3: unknown key; did you mean train.epochs?",
        f"model=cnnn: model has no cnnn; did you mean cnn? options of model: {MODELS}",
    ]


def test_composing_imports_no_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from slurm_train.config.checks import check\n"
        "from slurm_train.config.compose import compose\n"
        "assert check(compose(['+experiment=fmnist']).config) == []\n"
        "unwanted = {'submitit', 'rich', 'typer'} & set(sys.modules)\n"
        "assert not unwanted, unwanted\n"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)
