"""The launch plan: everything that a run will be, computed whole before anything is started. Needs no torch."""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from slurm_train.config.checks import check, file_faults, unchecked
from slurm_train.config.compose import Composed
from slurm_train.data.facts import DataFacts, data_facts
from slurm_train.errors import ConfigError, Fault, GridError, SlurmTrainError
from slurm_train.launch import fit, request
from slurm_train.launch.costs import costs
from slurm_train.launch.script import Script
from slurm_train.launch.stages import pipeline_faults
from slurm_train.launch.world import PlannedWorld, plan_world, rank_environment, threads
from slurm_train.models.facts import model_facts
from slurm_train.models.layers import ModelFacts
from slurm_train.report.rundir import RunDirectory
from slurm_train.topology.grid import AXES, Grid, solve
from slurm_train.topology.jobs import restart_count, run_identity
from slurm_train.topology.limits import parse_time

T = TypeVar("T")

NAMING_KEYS = ("parallel.cuts", "parallel.blocks", "train.recompute")
"""What may be a list of names of modules, which only the model itself can tell."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs and what it is in the grid."""

    rank: int
    node: str
    local_rank: int
    coordinates: Mapping[str, int]


@dataclass(frozen=True)
class LaunchPlan:
    """A run, ready to be started. All of it is plain data: see `to_json`."""

    verb: str
    """train, evaluate, generate or verify."""

    launcher: str
    """local, inline or slurm."""

    launcher_reason: str
    run_id: str
    run_dir: str
    """Absolute path of the run directory."""

    continues: bool
    """Whether the run directory is there already and the run goes on in it."""

    cwd: str
    """Working directory of the submission: targets are imported from there."""

    config_dirs: tuple[str, ...]
    nodes: int
    tasks_per_node: int
    world_size: int
    grid: Mapping[str, int]
    data_ranks: int
    batch_size: int
    local_batch: int
    """Samples per step of one data rank."""

    threads: int
    threads_reason: str
    device: str
    gpus_per_node: int | None
    gpus_per_task: int | None
    time_seconds: int | None
    """Time limit; None for none."""

    environment: Mapping[str, str]
    """Variables set for the ranks."""

    epochs: int
    steps_per_epoch: int | None
    total_steps: int | None
    """Optimizer steps of the whole run; None where the data set is not known and train.max_steps is not set."""

    parameters: int | None
    """Number of parameters; None where the model is not known."""

    layers: tuple[Mapping[str, Any], ...]
    """Tensor-parallel layers: name, in_features, out_features, style."""

    data: Mapping[str, Any] | None
    """Source, number of samples, shape; None where the data set is not known."""

    costs: Mapping[str, Any] | None = None
    """What a step costs (see slurm_train.launch.costs.Costs); None where the model is not known."""

    ranks: tuple[RankPlace, ...] = ()
    unchecked: tuple[str, ...] = ()
    """What could not be checked, a line each."""

    warnings: tuple[str, ...] = ()
    """What is allowed but seldom meant, a line each."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of generate or verify."""

    script: str = ""
    """Slurm: the whole text of submission.sh."""

    sbatch_keys: Mapping[str, str] = field(default_factory=dict)
    """Slurm: option of the job -> what sets it, such as mem -> launcher.mem=2.5GB."""

    sbatch_words: tuple[str, ...] = ()
    """Slurm: options that only the command line of sbatch can hold."""

    sbatch_defaults: Mapping[str, str] = field(default_factory=dict)
    """Slurm: variables of the environment, such as SBATCH_ACCOUNT, that are options of the job too."""

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass
class _Findings:
    """Collects faults, so that all are told at once."""

    faults: list[Fault] = field(default_factory=list)

    def trying(self, step: Callable[..., T], *arguments: Any) -> T | None:
        """The step's result; None if it met a fault, which is noted."""
        try:
            return step(*arguments)
        except SlurmTrainError as error:
            self.note(error.faults)
            return None

    def note(self, faults: Iterable[Fault]) -> None:
        """Note faults, each once."""
        self.faults += [fault for fault in faults if fault not in self.faults]


def make_plan(
    composed: Composed,
    env: Mapping[str, str],
    verb: str = "train",
    existing: RunDirectory | None = None,
    options: Mapping[str, Any] | None = None,
) -> LaunchPlan:
    """Plan a run. Makes, starts and imports nothing.

    Args:
        composed: the configuration.
        env: the environment of this process.
        verb: train, evaluate, generate or verify.
        existing: the run directory to go on in; None for a new run.
        options: arguments of the verb, such as the prompt of generate.

    Raises:
        ConfigError: all faults.
    """
    config = composed.config
    before = json.loads(existing.plan.read_text(encoding="utf-8")) if existing else {}
    cwd = before.get("cwd", os.getcwd())
    config_dirs = tuple(dict.fromkeys([*composed.config_dirs, *before.get("config_dirs", ())]))
    findings = _Findings(check(config, (cwd, *config_dirs)))
    sound = not findings.faults

    world = findings.trying(plan_world, config, env) if sound else None
    grid = findings.trying(_solve, config, world) if world else None
    if grid:
        findings.note(fit.layout_faults(config.parallel, grid))
        findings.note(fit.batch_faults(config.train, grid))
    data = findings.trying(data_facts, config.data)
    if data and sound:
        findings.note(fit.sample_faults(config.train, data))
    model = findings.trying(_model_facts, config) if sound else None
    if model and grid:
        findings.note(fit.tp_faults(config.parallel, model, grid.tp, fit.sequence_length(model, data)))
    if model and data:
        findings.note(fit.data_faults(config.data._target_, model, data))
    if grid:
        findings.note(pipeline_faults(config, grid, model))
    place = findings.trying(_place, config, env, world.launcher if world else "", existing)
    if sound and place and not place[2]:
        findings.note(file_faults(config, cwd))
    count = findings.trying(threads, config, env, world) if world else None
    environment = findings.trying(rank_environment, config, env, world) if world else None
    if world and world.launcher == "slurm":
        findings.note(request.gpu_faults(config, world))
    limit = findings.trying(parse_time, config.launcher.time) if config.launcher.time and sound else None
    if findings.faults:
        raise ConfigError(findings.faults)
    # without faults each step has a result
    if world is None or grid is None or place is None or count is None or environment is None:
        raise AssertionError("a step of the plan failed without a fault")
    steps = fit.total_steps(config.train, data)
    script, warned = Script(""), [*fit.schedule_warnings(config.train, steps)]
    if world.launcher == "slurm":
        script = request.job_script(config, world, environment, str(place[1]), cwd, verb == "train")
        warned += request.warnings(config, world, grid, str(place[1]), cwd, env)
    return LaunchPlan(
        verb=verb,
        options=dict(options or {}),
        launcher=world.launcher,
        launcher_reason=world.reason,
        run_id=place[0],
        run_dir=str(place[1]),
        continues=place[2],
        cwd=cwd,
        config_dirs=config_dirs,
        nodes=world.nodes,
        tasks_per_node=world.tasks_per_node,
        world_size=world.size,
        grid=grid.axes(),
        data_ranks=grid.data_ranks,
        batch_size=config.train.batch_size,
        local_batch=config.train.batch_size // grid.data_ranks,
        threads=count[0],
        threads_reason=count[1],
        device=config.train.device,
        gpus_per_node=config.launcher.gpus_per_node,
        gpus_per_task=config.launcher.gpus_per_task,
        time_seconds=limit,
        environment=environment,
        epochs=config.train.epochs,
        steps_per_epoch=fit.steps_per_epoch(config.train, data) if data else None,
        total_steps=steps,
        parameters=model.parameters if model else None,
        layers=_layers(config, model, grid) if model else (),
        data=_data(data) if data else None,
        costs=asdict(costs(config, model, grid, data)) if model else None,
        ranks=tuple(_ranks(world, grid)),
        unchecked=tuple(_notes(config, (cwd, *config_dirs), model, data)),
        warnings=tuple(warned),
        script=script.text if script.command else "",
        sbatch_keys=request.keys(config, script.options, env) if script.command else {},
        sbatch_words=tuple(script.words),
        sbatch_defaults=request.defaults(config, env) if script.command else {},
    )


def _solve(config: DictConfig, world: PlannedWorld) -> Grid:
    if config.parallel.name == "single" and world.size > 1:
        remedy = "use parallel=ddp or parallel=tp"
        raise GridError(f"is for one rank, but there are {world.size} ranks", "parallel=single", remedy)
    return solve(world.size, **{axis: config.parallel[axis] for axis in AXES})


def _model_facts(config: DictConfig) -> ModelFacts | None:
    try:
        return model_facts(config.model)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError([Fault("model", f"its arguments do not fit: {error}")]) from None


def _place(
    config: DictConfig, env: Mapping[str, str], launcher: str, existing: RunDirectory | None
) -> tuple[str, Path, bool]:
    """Run id, run directory, and whether the run goes on in it."""
    if existing:
        return existing.path.name, existing.path, True
    # A job submitted from inside another one is a run of its own.
    given, job = config.run.name, run_identity(env) if launcher != "slurm" else None
    run_id = given or job or new_run_id()
    path = _absolute(config.run.dir) if config.run.dir else Path.cwd() / "runs" / config.run.experiment / run_id
    if launcher != "slurm" and restart_count(env) and (path / "config.yaml").is_file():
        return run_id, path, True
    if job and not given and not config.run.dir:  # several runs of one job
        names = (f"{job}-{number}" for number in range(2, 10_000))
        while path.exists():
            run_id = next(names)
            path = path.with_name(run_id)
    key = f"run.dir={config.run.dir}" if config.run.dir else f"run.name={given}" if given else "run.dir"
    if problem := _path_problem(path, launcher) or RunDirectory.problem(path):
        used = (path / "config.yaml").is_file()
        raise ConfigError([Fault(key, problem, f"choose another one{', or go on with it by the verb resume' * used}")])
    return run_id, path, False


def new_run_id() -> str:
    """A run id of the date, the time and four random hex digits."""
    return f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _path_problem(path: Path, launcher: str) -> str:
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        return f"{str(path)!r} is not valid UTF-8"
    if launcher in ("local", "slurm") and (found := re.search("%[jtAa]", str(path))):
        return f"{path} contains {found[0]}, which submitit replaces"
    if launcher == "slurm" and "\\" in str(path):
        return f"{path} contains a backslash, with which Slurm writes its logs elsewhere"
    return ""


def _layers(config: DictConfig, model: ModelFacts, grid: Grid) -> tuple[Mapping[str, Any], ...]:
    plan = fit.tp_plan(config.parallel, model) if grid.tp > 1 else {}
    return tuple(asdict(layer) for layer in fit.planned(model, plan))


def _data(data: DataFacts) -> Mapping[str, Any]:
    return asdict(data) | {"sample_shape": list(data.sample_shape)}


def _ranks(world: PlannedWorld, grid: Grid) -> Iterable[RankPlace]:
    even = world.nodes * world.tasks_per_node == world.size
    for rank in range(world.size):
        node, local_rank = divmod(rank, world.tasks_per_node) if even else (-1, -1)
        name = world.hosts[node] if 0 <= node < len(world.hosts) else str(node) if even else "?"
        yield RankPlace(rank, name, local_rank, grid.coordinates(rank))


def _notes(
    config: DictConfig, search: tuple[str, ...], model: ModelFacts | None, data: DataFacts | None
) -> Iterable[str]:
    if model is None:
        yield f"model {config.model._target_}: its size, and whether tp divides its layers (plan --deep looks)"
    if data is None:
        yield f"data {config.data._target_}: its number of samples"
    lists = {key: OmegaConf.select(config, key) for key in NAMING_KEYS}
    if naming := [key for key, value in lists.items() if isinstance(value, ListConfig) and value]:
        yield f"{', '.join(naming)}: names of modules (plan --deep looks)"
    yield from unchecked(config, search)
