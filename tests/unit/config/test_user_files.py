"""A user's own config files and targets, in their own directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.config.checks import check, unchecked
from slurm_train.config.compose import compose
from slurm_train.config.library import Library, conf_directory
from slurm_train.errors import ConfigError

MINE = [Path("mine")]


def told(overrides: list[str], config_dirs: list[Path]) -> str:
    with pytest.raises(ConfigError) as error:
        compose(overrides, config_dirs)
    return str(error.value)


def test_an_experiment_may_choose_every_group(user: Path) -> None:
    composed = compose(["+experiment=mine"], MINE)
    assert composed.config.model == {"_target_": "my_file.MyNet", "width": 8}
    assert composed.config.train.epochs == 100
    assert composed.config.launcher.name == "local"
    assert {name: composed.choices[name] for name in ("model", "optim", "parallel", "train")} == {
        "model": "mine",
        "optim": "sgd",
        "parallel": "ddp",
        "train": "long",
    }
    assert composed.config_dirs == (str(user / "mine"),)
    assert check(composed.config, composed.config_dirs) == []
    assert unchecked(composed.config, composed.config_dirs) == []


def test_the_command_line_wins_over_an_experiment(user: Path) -> None:
    composed = compose(["+experiment=mine", "model=cnn", "train.epochs=1", "parallel=tp"], MINE)
    assert composed.config.model.channels == 16
    assert composed.config.train.epochs == 1
    assert composed.config.parallel.tp == -1


def test_a_group_of_the_users_own_needs_no_plus(user: Path) -> None:
    for override in ("ablation=small", "+ablation=small"):
        assert compose([override], MINE).config.train.batch_size == 8


def test_an_experiment_may_build_on_a_built_in_one(user: Path) -> None:
    config = compose(["+experiment=inherit"], MINE).config
    assert (config.model.channels, config.train.epochs) == (16, 7)


def test_a_target_in_an_experiment_drops_the_arguments_of_the_group_file(user: Path) -> None:
    assert compose(["+experiment=inline"], MINE).config.model == {"_target_": "my_file.MyNet", "width": 9}
    assert compose(["+experiment=inline", "model=cnn"], MINE).config.model == {"_target_": "my_file.MyNet", "width": 9}
    assert compose(["+experiment=arguments"], MINE).config.model.depth == 1


def test_two_config_directories(user: Path) -> None:
    other = user / "with space, and comma's"
    (other / "optim").mkdir(parents=True)
    (other / "optim" / "slow.yaml").write_text("_target_: torch.optim.SGD\nlr: 1e-5\n")
    composed = compose(["model=mine", "optim=slow"], [*MINE, other])
    assert (composed.config.model.width, composed.config.optim.lr) == (8, 1e-5)


def test_options_of_the_user_are_listed(user: Path) -> None:
    assert told(["model=mien"], MINE) == "model=mien: model has no mien; did you mean mine? " + (
        "options of model: cnn, linear, lm_125m, lm_1b, lm_350m, lm_7b, lm_small, lm_tiny, mine, mlp, transformer"
    )


def test_a_missing_config_directory(user: Path) -> None:
    assert told([], [Path("nowhere")]) == "--config-dir nowhere: is not a directory"


def test_a_file_that_a_built_in_one_would_hide(user: Path) -> None:
    (user / "mine/model/mlp.yaml").write_text("_target_: my_file.MyNet\n")
    expected = "mine/model/mlp.yaml: hidden by the built-in file of this name; give it another name"
    assert told([], MINE) == expected
    (user / "mine/model/mlp.yaml").write_bytes((conf_directory() / "model/mlp.yaml").read_bytes())
    assert Library.of(MINE)[1] == []


BROKEN = [
    (
        "# @package _global_\ntrain:\n  epochs: 2\n  epoch: 3\n",
        "line 4: train.epoch: unknown key; did you mean train.epochs?",
    ),
    ("# @package _global_\ntrain:\n  epochs: many\n", "line 3: train.epochs: must be an integer"),
    ("# @package _global_\ntrain: 3\n", "line 2: train: must be a mapping such as {key: value}"),
    ("# @package _global_\nfoo: 3\n", "line 2: foo: unknown key"),
    (
        "# @package _global_\ntrain:\n  epochs: 2\n  epochs: 3\n",
        "line 4: is not valid yaml: found duplicate key epochs",
    ),
    ("# @package _global_\ntrain: [1\n  epochs: 2\n", "line 3: is not valid yaml: expected ',' or ']', but got ':'"),
    (
        "# @package _global_\ndefaults:\n  - override /model: nott\n",
        "line 3: model has no nott; options of model: cnn, linear, lm_125m, lm_1b, lm_350m, lm_7b, lm_small, lm_tiny, "
        "mine, mlp, transformer",
    ),
    (
        "# @package _global_\ndefaults:\n  - override /modell: mlp\n",
        "line 2: Could not override 'modell'. No match in the defaults list.",
    ),
    ("# @package _global_\ndefaults: mlp\n", "defaults must be a list"),
    ("# @package _global_\ndefaults:\n  - /model: cnn\n", "line 2: Multiple values for model."),
    ("# @package _global_\ndefaults:\n  - nothere\n", "line 3: experiment has no nothere; options of experiment: "),
    ("# @package _global_\ndefaults:\n  - test\n", "line 2: its defaults list leads back to itself"),
    ("# @package _global_\ndefaults:\n  - 3\n", "line 2: Unsupported type in defaults : int"),
    ("- a\n", "test.yaml: must be a mapping of keys, not a list"),
    ("\xff\x00", "test.yaml"),
    (
        "train:\n  epochs: 4\n",
        "its keys are placed below experiment; start the file with the line: # @package _global_",
    ),
    ("# @package\n", "Expected header format: KEY VALUE, got '@package'"),
]


@pytest.mark.parametrize(("text", "line"), BROKEN)
def test_a_broken_file_is_told_with_name_and_line(user: Path, text: str, line: str) -> None:
    (user / "mine/experiment/test.yaml").write_text(text, encoding="latin-1")
    first, second = told(["+experiment=test", "train.epochs=many"], MINE).splitlines()
    assert first == "train.epochs=many: must be an integer"
    assert second.startswith("mine/experiment/test.yaml")
    assert line in second


def test_a_broken_group_file(user: Path) -> None:
    expected = "mine/train/bad.yaml, line 2: train.batchsize: unknown key; did you mean train.batch_size?"
    assert told(["train=bad"], MINE) == expected


def test_a_broken_file_that_is_not_used_does_no_harm(user: Path) -> None:
    (user / "mine/experiment/unused.yaml").write_text("a: [\n")
    assert compose(["model=mine"], MINE).config.model.width == 8


TARGETS = [
    (["model._target_=my_file.MyNet", "model.width=3"], []),
    (["model._target_=my_file.MyNet"], ["model.width: my_file.MyNet needs this argument; type model.width=VALUE"]),
    (
        ["model._target_=my_file.MyNet", "model.width=3", "model.dept=1"],
        ["model.dept=1: my_file.MyNet has no argument dept; did you mean depth? it takes width, depth"],
    ),
    (
        ["model._target_=my_file.MyNett"],
        ["model._target_=my_file.MyNett: my_file.py has no MyNett; did you mean MyNet?"],
    ),
    (
        ["model._target_=my_fil.MyNet"],
        ["model._target_=my_fil.MyNet: there is no module my_fil; did you mean my_file?"],
    ),
    (["model._target_=broken.f"], ["model._target_=broken.f: broken.py, line 1: invalid syntax"]),
    (["model._target_=in_configs.make", "model.size=1"], []),
    (
        ["model.width={_target_: my_file.MyNet}"],
        ["model.width.width: my_file.MyNet needs this argument; type model.width.width=VALUE"],
    ),
    (["model._target_=torch.nn.Sequential", "model._args_=[]"], []),
]


@pytest.mark.parametrize(("overrides", "lines"), TARGETS)
def test_targets_of_the_user_against_their_source(user: Path, overrides: list[str], lines: list[str]) -> None:
    composed = compose(overrides, MINE)
    assert [str(fault) for fault in check(composed.config, composed.config_dirs)] == lines


def test_what_cannot_be_read_is_noted(user: Path) -> None:
    composed = compose(["train.loss._target_=torch.rand"], MINE)
    assert check(composed.config) == []
    assert unchecked(composed.config) == ["train.loss._target_: not checked: torch._C has no Python source"]
