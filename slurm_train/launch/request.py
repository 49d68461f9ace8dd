"""What a Slurm job of a run asks for: from the configuration to the script that is submitted (Slurm manual, sbatch)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from omegaconf import DictConfig

from slurm_train.config.launcher_checks import OWN_KEYS, option_name
from slurm_train.errors import Fault
from slurm_train.launch.queue import comment
from slurm_train.launch.script import ALWAYS, CPUS, EXCLUDE, PREFLIGHT, STEP, Script, pattern, quote, restarting
from slurm_train.launch.world import PlannedWorld
from slurm_train.topology.grid import Grid
from slurm_train.topology.limits import parse_memory

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Directories that are each node's own nearly everywhere."""


def job_script(
    config: DictConfig,
    world: PlannedWorld,
    environment: Mapping[str, str],
    run_dir: str,
    cwd: str,
    trains: bool = True,
) -> Script:
    """The script that submits a run.

    Args:
        config: checked.
        world: its ranks.
        environment: variables for the ranks.
        run_dir: the run directory, absolute.
        cwd: the working directory of the ranks.
        trains: whether there is something to go on with after an early end.
    """
    logs = str(Path(run_dir, "logs"))
    log = pattern(logs)
    streams = f"--output={quote(f'{log}/%j_%t_log.out')} --error={quote(f'{log}/%j_%t_log.err')}"
    # Slurm 22.05 forgets the limit to its own device for a task whose GPU has a type; without it srun knows.
    gpus = f" --gpus-per-task={config.launcher.gpus_per_task}" if config.launcher.gpus_per_task else ""
    python = f"{quote(sys.executable)} -u -m submitit.core._submit {quote(logs)}"
    command = f"{STEP} --kill-on-bad-exit=1 {CPUS}{gpus} {streams} {python}"
    again = trains and config.launcher.restarts
    return Script(
        command=restarting(command, quote(sys.executable), f"resume {quote(run_dir)}") if again else command,
        options={
            "job-name": config.run.experiment,
            **_size(config.launcher, world),
            **_place(config.launcher),
            "signal": f"USR2@{config.launcher.signal_seconds}",
            **ALWAYS,
            "chdir": cwd,
            "output": f"{log}/%j_batch.log",
            "comment": comment(run_dir),
            **_other(config.launcher),
        },
        environment={"SUBMITIT_EXECUTOR": "slurm", **environment},
        setup=tuple(config.launcher.setup),
        before=_preflight(config, world, run_dir) if config.launcher.preflight else (),
    )


def _preflight(config: DictConfig, world: PlannedWorld, run_dir: str) -> tuple[str, ...]:
    """The lines that try the nodes. What leaves a bad one out takes the place of the batch shell, for the shell would
    end at the first sign of the requeue."""
    launcher = config.launcher
    even = world.nodes * world.tasks_per_node == world.size
    devices = launcher.gpus_per_node or (launcher.gpus_per_task or 0) * world.tasks_per_node * even
    gpus = f" --gpus={devices}" if devices and config.train.device != "cpu" else ""
    python, run = quote(sys.executable), quote(run_dir)
    return (
        "# each node is tried first; a bad one is left out, once",
        f"{python} -u -m {PREFLIGHT} {run}{gpus} ||",
        f'  exec {python} -u -m {EXCLUDE} {run} "$0"',
    )


def _size(launcher: DictConfig, world: PlannedWorld) -> dict[str, str]:
    """How much: nodes, tasks, CPUs, GPUs and memory."""
    options = {"nodes": str(world.nodes)}
    if launcher.tasks:
        options["ntasks"] = str(launcher.tasks)
    if launcher.tasks_per_node or not launcher.tasks:
        options["ntasks-per-node"] = str(world.tasks_per_node)
    if launcher.cpus_per_task:
        options["cpus-per-task"] = str(launcher.cpus_per_task)
    for name in ("gpus_per_node", "gpus_per_task"):
        if launcher[name]:
            kind = f"{launcher.gpu_type}:" if launcher.gpu_type else ""
            options[option_name(name)] = f"{kind}{launcher[name]}"
    for name in ("mem", "mem_per_cpu", "mem_per_gpu"):
        if launcher[name] is not None:
            options[option_name(name)] = f"{parse_memory(launcher[name])}M"
    return options


def _place(launcher: DictConfig) -> dict[str, str]:
    """How long and where."""
    names = ("time", "partition", "account", "qos", "constraint", "exclude", "reservation")
    return {name: str(launcher[name]) for name in names if launcher[name] is not None}


def _other(launcher: DictConfig) -> dict[str, str]:
    """The options of launcher.sbatch."""
    named = {option_name(str(name)): value for name, value in launcher.sbatch.items()}
    return {name: "" if value is True else str(value) for name, value in named.items() if value is not False}


def keys(config: DictConfig, options: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Option -> the configuration's key and value that set it, such as mem -> launcher.mem=2.5GB.

    Options that no key sets are left out.

    Args:
        config: as composed.
        options: of the script.
        env: the environment of the submission, whose SBATCH_* may count too.
    """
    found = {_option_of(name): f"{name}={value}" for name, value in defaults(config, env).items()}
    for option, value in options.items():
        if option in OWN_KEYS:
            own = config.launcher[OWN_KEYS[option]]
            found[option] = f"launcher.{OWN_KEYS[option]}={value if own is None else own}"
    for name, value in config.launcher.sbatch.items():
        found[option_name(str(name))] = f"launcher.sbatch.{name}={str(value).lower() if value is True else value}"
    return found


def gpu_faults(config: DictConfig, world: PlannedWorld) -> Iterator[Fault]:
    """The ranks of a node against its GPUs: NCCL refuses two ranks on one device."""
    gpus, ranks = config.launcher.gpus_per_node, world.tasks_per_node
    if gpus and config.launcher.tasks_per_node and ranks > gpus and config.train.device != "cpu":
        yield Fault(
            f"launcher.tasks_per_node={ranks}",
            f"more ranks than the {gpus} GPU{'s' * (gpus > 1)} of a node",
            f"use launcher.tasks_per_node={gpus}, or train.device=cpu",
        )


def warnings(
    config: DictConfig, world: PlannedWorld, grid: Grid, run_dir: str, cwd: str, env: Mapping[str, str]
) -> list[str]:
    """What is allowed but seldom meant, a line each."""
    found = []
    ranks, gpus = world.tasks_per_node, config.launcher.gpus_per_node
    even = world.nodes * ranks == world.size
    if grid.tp > 1 and world.nodes > 1 and (not even or ranks % grid.tp):
        where = f"{ranks} ranks a node" if even else "nodes with different numbers of ranks"
        found.append(
            f"parallel.tp={grid.tp}: with {where} a tensor-parallel group spans nodes, and every layer waits for the "
            "network; better let tp divide the ranks of a node"
        )
    if gpus and even and ranks < gpus:
        found.append(f"launcher.gpus_per_node={gpus}: {gpus - ranks} of them idle with {ranks} ranks a node")
    needed = {"run.dir": run_dir, "the working directory": cwd, "Python": sys.executable}
    for what, path in needed.items():
        if local := next((place for place in NODE_LOCAL if Path(path).is_relative_to(place)), ""):
            found.append(f"{what}: {path} lies in {local}, which each node usually has for itself; the job would fail")
    found += [f"{name}={value} in the environment counts too" for name, value in defaults(config, env).items()]
    return found


_VARIABLES = {
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_JOB_NAME": "job-name",
    "SBATCH_NO_REQUEUE": "requeue",
    "SBATCH_EXPORT": "export",
    "SBATCH_GPUS": "gpus",
}
"""Variables of sbatch whose names are not their option's."""

_SAME = (
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres"},
)
"""Options that say the same thing in different ways: one that is typed keeps out the variables of the others."""

_NEVER = {
    "requeue",
    "open-mode",
    "signal",
    "array",
    "wait",
    "export",
    "chdir",
    "output",
    "error",
    "job-name",
    "comment",
}
"""Options that a variable must not change: see launcher_checks."""


def defaults(config: DictConfig, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of sbatch (SBATCH_ACCOUNT, SBATCH_PARTITION ...) that count, since no key here says otherwise.

    sbatch itself lets such a variable win over the script (manual, "Input environment variables"); here what was typed
    wins.
    """
    if "SLURM_JOB_ID" in env:  # these are of the job around us
        return {}
    launcher = config.launcher
    typed = {option_name(str(name)) for name in launcher.sbatch}
    typed |= {option_name(name) for name in launcher if launcher[name] not in (None, {}, [])}
    for same in _SAME:
        typed |= same if same & typed else set()
    names = sorted(name for name in env if name.startswith("SBATCH_"))
    return {name: env[name] for name in names if _option_of(name) not in typed | _NEVER}


def _option_of(variable: str) -> str:
    """The option of sbatch that a variable gives."""
    return _VARIABLES.get(variable, option_name(variable.removeprefix("SBATCH_").lower()))
