"""What can be known to be wrong with what a Slurm job asks for, key against key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from slurm_train.errors import Fault

OWN_KEYS = {
    "nodes": "nodes",
    "ntasks": "tasks",
    "ntasks-per-node": "tasks_per_node",
    "cpus-per-task": "cpus_per_task",
    "gpus-per-node": "gpus_per_node",
    "gpus-per-task": "gpus_per_task",
    "mem": "mem",
    "mem-per-cpu": "mem_per_cpu",
    "mem-per-gpu": "mem_per_gpu",
    "time": "time",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "exclude": "exclude",
    "reservation": "reservation",
}
"""Options of sbatch that have a key of their own, by which everything else here knows of them."""

_SET_BY_US = {
    "output": "the verb logs reads the files in the run directory",
    "error": "the verb logs reads the files in the run directory",
    "open-mode": "a requeued job must append to its log",
    "requeue": "it is always set: a run goes on when Slurm puts its job back into the queue",
    "no-requeue": "a run goes on when Slurm puts its job back into the queue",
    "chdir": "a run starts where it was submitted",
    "export": "the ranks need the environment that is made for them; add to it by launcher.env",
    "export-file": "the ranks need the environment that is made for them; add to it by launcher.env",
    "array": "one run is one job",
    "wrap": "the job's script is made from the plan",
    "parsable": "it changes what the submission prints",
    "test-only": "it submits nothing; see the verb plan",
    "wait": "a submission returns at once; follow it by the verb logs",
    "help": "it submits nothing",
    "usage": "it submits nothing",
    "version": "it submits nothing",
}

_RANK_NAMES = re.compile(r"(SLURM|SUBMITIT|TORCHELASTIC|GROUP|ROLE)_.*|(LOCAL_)?(RANK|WORLD_SIZE)|JOB_COMPLETION_INDEX")
_KEPT = {"SLURM_CONF"}


def launcher_faults(launcher: DictConfig) -> Iterator[Fault]:
    """The faults of the `launcher` group beyond those of single values."""
    yield from _one_of(launcher, "mem", "mem_per_cpu", "mem_per_gpu")
    yield from _one_of(launcher, "gpus_per_node", "gpus_per_task")
    if launcher.gpu_type and not launcher.gpus_per_node and not launcher.gpus_per_task:
        yield Fault(f"launcher.gpu_type={launcher.gpu_type}", "no GPU is asked for", "set launcher.gpus_per_node too")
    for name, value in launcher.sbatch.items():
        yield from _option_faults(str(name), value)
    for name, value in launcher.env.items():
        yield from _variable_faults(str(name), value)
    for number, line in enumerate(launcher.setup):
        if not line.strip() or "\0" in line:
            yield Fault(f"launcher.setup.{number}", "must be a shell line")


def option_name(name: str) -> str:
    """An option of sbatch as Slurm writes it: gpu_bind and --gpu-bind are gpu-bind."""
    return name.lstrip("-").replace("_", "-")


def _one_of(launcher: DictConfig, *names: str) -> Iterator[Fault]:
    given = [name for name in names if launcher[name] is not None]
    if len(given) > 1:
        others = " and ".join(f"launcher.{name}" for name in given[:-1])
        yield Fault(f"launcher.{given[-1]}={launcher[given[-1]]}", f"{others} is given too", "give one of them")


def _option_faults(name: str, value: Any) -> Iterator[Fault]:
    option = option_name(name)
    key = f"launcher.sbatch.{name}={str(value).lower() if isinstance(value, bool) else value}"
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9-]+", option):
        yield Fault(key, "is not the long name of an option of sbatch", "such as launcher.sbatch.gpu-bind=closest")
    elif option in OWN_KEYS:
        yield Fault(key, "has a key of its own", f"type launcher.{OWN_KEYS[option]}=VALUE")
    elif option == "signal":
        yield from _signal_faults(key, str(value))
    elif option in _SET_BY_US:
        yield Fault(key, "cannot be set", _SET_BY_US[option])
    elif value is None or OmegaConf.is_config(value) or "\0" in str(value):
        yield Fault(key, "must be a text, a number, or true for an option without a value")


def _signal_faults(key: str, value: str) -> Iterator[Fault]:
    if "B" in value.upper().partition(":")[0] and ":" in value:
        reason = "B: sends the signal to the batch shell alone, and no rank would save"
    else:
        reason = "the ranks listen to USR2"
    yield Fault(key, reason, "set how early it comes by launcher.signal_seconds=SECONDS")


def _variable_faults(name: str, value: str) -> Iterator[Fault]:
    key = f"launcher.env.{name}"
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        yield Fault(key, "is not the name of an environment variable")
    elif _RANK_NAMES.fullmatch(name) and name not in _KEPT:
        yield Fault(key, "the launcher sets it for each rank", "leave it out")
    elif value is None or "\0" in value:
        yield Fault(key, "must be a text")
