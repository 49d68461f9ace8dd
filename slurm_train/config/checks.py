"""What can be known to be wrong with a configuration without looking at the environment, all faults at once.

Types are the schema's business (`compose`); here are ranges, choices, and the open groups against the signature of
their `_target_`. The grid against the ranks, divisibility and files are checked by the plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from slurm_train.config.launcher_checks import launcher_faults
from slurm_train.config.names import near
from slurm_train.config.rules import rule_faults, typed
from slurm_train.config.secrets import secret_faults
from slurm_train.config.signature import Missing, Parameter, Signature, Unknown, signature
from slurm_train.config.train_checks import axis_faults, train_faults
from slurm_train.errors import Fault

_HYDRA_KEYS = {"_target_", "_args_", "_convert_", "_recursive_", "_partial_"}  # of hydra.utils.instantiate
_INIT_FROM = "init_from"  # a key of every model's node that is no argument of its target


def check(config: DictConfig, search: Sequence[str] = ()) -> list[Fault]:
    """All faults of a resolved config; the fault's key is `key=value`.

    Args:
        config: typed by the schema.
        search: further directories for the Python files of targets, after the working directory and before sys.path.
    """
    return [
        *rule_faults(config),
        *train_faults(config),
        *axis_faults(config.parallel),
        *launcher_faults(config.launcher),
        *target_faults(config, search),
        *secret_faults(config),
    ]


def file_faults(config: DictConfig, directory: str) -> Iterator[Fault]:
    """The file that a new run's weights are to start from; a run that goes on needs it no more.

    Args:
        config: a config without other faults.
        directory: where a relative path begins.
    """
    path = config.model.get(_INIT_FROM)
    if path is None:
        return
    if not isinstance(path, str) or not os.path.isfile(os.path.join(directory, os.path.expanduser(path))):
        yield Fault(f"model.{_INIT_FROM}={path}", "is no file", "give a file of weights, as the verb export writes it")


def unchecked(config: DictConfig, search: Sequence[str] = ()) -> list[str]:
    """A note for each target that cannot be read without importing it, such as "model._target_: not checked: ..."."""
    places = [os.getcwd(), *search]
    answers = [(key, signature(str(node["_target_"]), places)) for key, node, _ in _targets(config)]
    return [f"{key}._target_: not checked: {answer.reason}" for key, answer in answers if isinstance(answer, Unknown)]


def _targets(config: DictConfig) -> list[tuple[str, DictConfig, set[str]]]:
    """The open nodes that have a `_target_`: key, node, and the arguments that the framework gives ("" the first)."""
    callbacks = [(f"train.callbacks.{name}", node, set[str]()) for name, node in config.train.callbacks.items()]
    nodes = [
        ("model", OmegaConf.select(config, "model"), set[str]()),
        ("data", OmegaConf.select(config, "data"), {"split"}),
        ("optim", OmegaConf.select(config, "optim"), {""}),
        ("train.loss", config.train.loss, set[str]()),
        ("train.loop", config.train.loop, {""}),
        *callbacks,
    ]
    return [(key, node, given) for key, node, given in nodes if isinstance(node, DictConfig) and _target(node)]


def _target(node: DictConfig) -> str:
    target = node.get("_target_")
    return target if isinstance(target, str) else ""


def target_faults(config: DictConfig, search: Sequence[str] = ()) -> Iterator[Fault]:
    """The faults of the open nodes: no target or one that does not exist, arguments that it does not take or lacks."""
    named = _targets(config)
    required = {"model", "data", "optim", "train.loss", "train.loop"}
    required |= {f"train.callbacks.{name}" for name in config.train.callbacks}
    for key in sorted(required - {key for key, _, _ in named}):
        yield Fault(f"{key}._target_", "is not given", f"type {key}._target_=FILE.NAME")
    for key, node, given in named:
        yield from _node_faults(key, node, given, [os.getcwd(), *search])


def _node_faults(key: str, node: DictConfig, given: set[str], places: Sequence[str]) -> Iterator[Fault]:
    target = _target(node)
    found = signature(target, places)
    if isinstance(found, Missing):
        yield Fault(f"{key}._target_={target}", found.reason, found.remedy)
    elif isinstance(found, Signature):
        yield from _argument_faults(key, node, given, found)
    for name, inner in cast("dict[str, Any]", node).items():
        if isinstance(inner, DictConfig) and _target(inner):
            yield from _node_faults(f"{key}.{name}", inner, set(), places)


def _argument_faults(key: str, node: DictConfig, given: set[str], found: Signature) -> Iterator[Fault]:
    target = _target(node)
    parameters: Sequence[Parameter] = found.parameters[1:] if "" in given else found.parameters
    names = [parameter.name for parameter in parameters]
    for name in cast("dict[str, Any]", node):
        ours = name in _HYDRA_KEYS or (key == "model" and name == _INIT_FROM)
        if name not in names and not ours and not found.open:
            takes = f"it takes {', '.join(names)}" if names else "it takes none"
            remedy = near(name, names)
            yield Fault(
                typed(f"{key}.{name}", node[name]), f"{target} has no argument {name}", f"{remedy} {takes}".strip()
            )
    if "_args_" in node or node.get("_partial_"):
        return
    for parameter in parameters:
        if parameter.required and parameter.name not in node and parameter.name not in given:
            remedy = f"type {key}.{parameter.name}=VALUE"
            yield Fault(f"{key}.{parameter.name}", f"{target} needs this argument", remedy)
