"""What each value may be by itself, key by key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from slurm_train.errors import Fault, UserError
from slurm_train.topology.hostlist import expand
from slurm_train.topology.limits import parse_memory, parse_time

LAYOUTS = (
    *("auto", "single", "ddp", "fsdp", "hsdp", "tp", "tp_sp"),
    *("ddp_tp", "fsdp_tp", "hsdp_tp", "pp", "pp_tp", "pp_fsdp"),
)
STYLES = ("colwise", "rowwise", "replicate", "sequence", "rowwise_scatter", "gather", "head", "sharded")
LAUNCHERS = ("auto", "local", "inline", "slurm")

Rule = Callable[[Any], str]
"""From a value to what is wrong with it: "" for a good one."""


def rule_faults(config: DictConfig) -> Iterator[Fault]:
    """The faults of the values of a config that is typed by the schema, each by itself."""
    for key, rule in RULES.items():
        value = OmegaConf.select(config, key)
        problem = rule(value) if value is not None else ""
        if problem:
            yield Fault(typed(key, value), problem)
    for name, style in config.parallel.plan.items():
        if style not in STYLES:
            yield Fault(f"parallel.plan.{name}={style}", f"must be one of {', '.join(STYLES)}")


def typed(key: str, value: Any) -> str:
    """A setting as it would be typed."""
    text = "null" if value is None else f"{value:.15g}" if isinstance(value, float) else str(value)
    return f"{key}={text.lower() if isinstance(value, bool) else text}"


def _at_least(least: float) -> Rule:
    return lambda value: "" if value >= least else f"must be at least {least:g}"


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


def _recompute(value: Any) -> str:
    if isinstance(value, ListConfig):
        good = len(value) > 0 and all(isinstance(pattern, str) and pattern for pattern in value)
    else:
        good = value == "all" or (type(value) is int and value >= 1)
    return "" if good else "must be all, a number of at least 1 (every n-th block), or a list of names of modules"


def _path(value: str) -> str:
    return "" if value.strip() and "\0" not in value else "must be a directory"


RULES: dict[str, Rule] = {
    "seed": lambda value: "" if 0 <= value < 2**63 else "must be from 0 to 2^63 - 1",
    "run.experiment": _directory_name,
    "run.name": _directory_name,
    "run.dir": _path,
    "train.epochs": _at_least(1),
    "train.max_steps": _at_least(1),
    "train.batch_size": _at_least(1),
    "train.micro_batch": _at_least(1),
    "train.count": _one_of(("auto", "samples", "tokens")),
    "train.eval_batch_size": _at_least(1),
    "train.validation": _validation,
    "train.device": _device,
    "train.threads": _at_least(1),
    "train.workers": _at_least(0),
    "train.grad_clip": _above(0),
    "train.schedule.name": _one_of(("constant", "linear", "cosine")),
    "train.schedule.warmup": _at_least(0),
    "train.schedule.steps": _at_least(1),
    "train.schedule.floor": lambda value: "" if 0 <= value <= 1 else "must be from 0 to 1",
    "train.ema": lambda value: "" if 0 < value < 1 else "must be above 0 and below 1",
    "train.precision": _one_of(("fp32", "bf16", "bf16_pure", "fp16")),
    "train.recompute": _recompute,
    "train.profile": _at_least(0),
    "train.log_seconds": _at_least(0),
    "train.start_timeout": _above(0),
    "train.timeout": _above(0),
    "train.keep_checkpoints": _at_least(0),
    "train.keep_every": _at_least(1),
    "train.keep_best": _at_least(0),
    "train.export": _one_of(("safetensors", "pt")),
    "train.save_steps": _at_least(1),
    "train.early_stopping.patience": _at_least(0),
    "train.early_stopping.metric": _one_of(("val_loss", "val_accuracy")),
    "train.early_stopping.min_delta": _at_least(0),
    "optim.lr": _rate,
    "parallel.name": _one_of(LAYOUTS),
    "parallel.microbatches": _at_least(1),
    "parallel.schedule": _one_of(("1f1b", "interleaved")),
    "parallel.virtual": _at_least(1),
    "launcher.name": _one_of(LAUNCHERS),
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
    "launcher.restarts": lambda value: "" if value >= 0 else "must not be negative",
    "launcher.signal_seconds": lambda value: "" if 0 < value <= 65535 else "must be from 1 to 65535",
    "launcher.partition": _line,
    "launcher.account": _line,
    "launcher.qos": _line,
    "launcher.constraint": _line,
    "launcher.exclude": _node_list,
    "launcher.reservation": _line,
}
