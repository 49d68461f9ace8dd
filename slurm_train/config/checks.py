"""What can be known to be wrong with a configuration without looking at the environment, all faults at once.

Types are the schema's business (`compose`); here are ranges, choices, and the open groups against the signature of
their `_target_`. The grid against the ranks, divisibility and files are checked by the plan.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from slurm_train.config.launcher_checks import launcher_faults
from slurm_train.config.names import near
from slurm_train.config.signature import Missing, Parameter, Signature, Unknown, signature
from slurm_train.errors import Fault, UserError
from slurm_train.topology.hostlist import expand
from slurm_train.topology.limits import parse_memory, parse_time

_HYDRA_KEYS = {"_target_", "_args_", "_convert_", "_recursive_", "_partial_"}  # of hydra.utils.instantiate
_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
_LAYOUTS = ("auto", "single", "ddp", "tp")
_LAUNCHERS = ("auto", "local", "inline", "slurm")
_STYLES = ("colwise", "rowwise")

Rule = Callable[[Any], str]
"""From a value to what is wrong with it: "" for a good one."""


def check(config: DictConfig, search: Sequence[str] = ()) -> list[Fault]:
    """All faults of a resolved config; the fault's key is `key=value`.

    Args:
        config: typed by the schema.
        search: further directories for the Python files of targets, after the working directory and before sys.path.
    """
    return [
        *_rule_faults(config),
        *_axis_faults(config),
        *launcher_faults(config.launcher),
        *target_faults(config, search),
    ]


def unchecked(config: DictConfig, search: Sequence[str] = ()) -> list[str]:
    """A note for each target that cannot be read without importing it, such as "model._target_: not checked: ..."."""
    places = [os.getcwd(), *search]
    answers = [(key, signature(str(node["_target_"]), places)) for key, node, _ in _targets(config)]
    return [f"{key}._target_: not checked: {answer.reason}" for key, answer in answers if isinstance(answer, Unknown)]


def _typed(key: str, value: Any) -> str:
    """A setting as it would be typed."""
    text = "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return f"{key}={text.lower() if isinstance(value, bool) else text}"


def _at_least(least: float, word: str = "") -> Rule:
    return lambda value: "" if value >= least else word or f"must be at least {least:g}"


def _above(bound: float) -> Rule:
    return lambda value: "" if value > bound else f"must be above {bound:g}"


def _one_of(choices: Sequence[str]) -> Rule:
    def rule(value: Any) -> str:
        return "" if value in choices else f"must be one of {', '.join(choices)}"

    return rule


def _validation(value: float) -> str:
    good = 0 <= value < 1 or (value >= 1 and float(value).is_integer())
    return "" if good else "must be a fraction from 0 to below 1, or a whole number of samples"


def _device(value: str) -> str:
    good = re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9]\d*))?", value)
    return "" if good else "must be auto, cpu, cuda, mps or cuda:N"


def _rate(value: Any) -> str:
    if isinstance(value, str | bool):
        return "must be a number"
    return "must be at least 0" if isinstance(value, int | float) and not value >= 0 else ""


def _time(value: str) -> str:
    try:
        parse_time(value)
    except UserError as error:
        return str(error)
    return ""


def _memory(value: str) -> str:
    try:
        parse_memory(value)
    except UserError as error:
        return str(error)
    return ""


def _line(value: str) -> str:
    return "" if value.strip() and not re.search(r"[\0\r\n]", value) else "must be a text in one line"


def _gpu_type(value: str) -> str:
    return "" if re.fullmatch(r"[\w.-]+", value) else "must be a name such as a100"


def _node_list(value: str) -> str:
    try:
        return "" if expand(value) else "names no node"
    except UserError as error:
        return error.faults[0].message


def _directory_name(value: str) -> str:
    if value in {"", ".", ".."} or "/" in value or "\0" in value:
        return "must be the name of a directory: not empty, without /"
    return "is too long for a directory's name" if len(value.encode()) > 200 else ""


def _path(value: str) -> str:
    return "" if value.strip() and "\0" not in value else "must be a directory"


_RULES: dict[str, Rule] = {
    "seed": lambda value: "" if 0 <= value < 2**63 else "must be from 0 to 2^63 - 1",
    "run.experiment": _directory_name,
    "run.name": _directory_name,
    "run.dir": _path,
    "train.epochs": _at_least(1),
    "train.max_steps": _at_least(1),
    "train.batch_size": _at_least(1),
    "train.eval_batch_size": _at_least(1),
    "train.validation": _validation,
    "train.device": _device,
    "train.threads": _at_least(1),
    "train.workers": _at_least(0),
    "train.grad_clip": _above(0),
    "train.log_seconds": _at_least(0),
    "train.start_timeout": _above(0),
    "train.timeout": _above(0),
    "train.keep_checkpoints": _at_least(0),
    "train.early_stopping.patience": _at_least(0),
    "train.early_stopping.metric": _one_of(("val_loss", "val_accuracy")),
    "train.early_stopping.min_delta": _at_least(0),
    "optim.lr": _rate,
    "parallel.name": _one_of(_LAYOUTS),
    "launcher.name": _one_of(_LAUNCHERS),
    "launcher.nodes": _at_least(1),
    "launcher.tasks_per_node": _at_least(1),
    "launcher.tasks": _at_least(1),
    "launcher.cpus_per_task": _at_least(1),
    "launcher.gpus_per_node": _at_least(0),
    "launcher.gpus_per_task": _at_least(1),
    "launcher.gpu_type": _gpu_type,
    "launcher.mem": _memory,
    "launcher.mem_per_cpu": _memory,
    "launcher.mem_per_gpu": _memory,
    "launcher.time": _time,
    "launcher.signal_seconds": lambda value: "" if 0 < value <= 65535 else "must be from 1 to 65535",
    "launcher.partition": _line,
    "launcher.account": _line,
    "launcher.qos": _line,
    "launcher.constraint": _line,
    "launcher.exclude": _node_list,
    "launcher.reservation": _line,
}


def _rule_faults(config: DictConfig) -> Iterator[Fault]:
    for key, rule in _RULES.items():
        value = OmegaConf.select(config, key)
        problem = rule(value) if value is not None else ""
        if problem:
            yield Fault(_typed(key, value), problem)
    stopping = config.train.early_stopping
    if stopping.patience > 0 and config.train.validation == 0:
        key = f"train.early_stopping.patience={stopping.patience}"
        yield Fault(key, "there is no validation metric to watch", "hold out samples: train.validation=0.1")
    for name, style in config.parallel.plan.items():
        if style not in _STYLES:
            yield Fault(f"parallel.plan.{name}={style}", f"must be one of {', '.join(_STYLES)}")


def _axis_faults(config: DictConfig) -> Iterator[Fault]:
    """The axes of the mesh, each by itself: their product is checked against the ranks by the plan."""
    parallel = config.parallel
    rest = [axis for axis in _AXES if parallel[axis] == -1]
    for axis in _AXES:
        key, size = f"parallel.{axis}={parallel[axis]}", parallel[axis]
        if size < 1 and size != -1:
            yield Fault(key, "must be at least 1, or -1 for the rest of the ranks")
        elif axis in ("pp", "dp_shard") and size != 1:
            yield Fault(key, "not in this version", f"type parallel.{axis}=1")
    if len(rest) > 1:
        keys = " and ".join(f"parallel.{axis}" for axis in rest)
        yield Fault(f"parallel.{rest[-1]}=-1", f"only one axis can be -1, here {keys} are")


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
        if name not in names and name not in _HYDRA_KEYS and not found.open:
            takes = f"it takes {', '.join(names)}" if names else "it takes none"
            remedy = near(name, names)
            yield Fault(
                _typed(f"{key}.{name}", node[name]), f"{target} has no argument {name}", f"{remedy} {takes}".strip()
            )
    if "_args_" in node or node.get("_partial_"):
        return
    for parameter in parameters:
        if parameter.required and parameter.name not in node and parameter.name not in given:
            remedy = f"type {key}.{parameter.name}=VALUE"
            yield Fault(f"{key}.{parameter.name}", f"{target} needs this argument", remedy)
