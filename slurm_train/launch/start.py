"""What the verbs do, from the words of the command line to the last line of a run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from slurm_train.config.compose import Composed, apply, compose
from slurm_train.config.saved import dump, load
from slurm_train.data.facts import FASHION_MNIST
from slurm_train.data.sources import settle
from slurm_train.errors import EXIT_OK, Interrupted, Saved, SlurmTrainError, UserError
from slurm_train.launch import queue
from slurm_train.launch.children import ask
from slurm_train.launch.plan import LaunchPlan, make_plan, new_run_id
from slurm_train.launch.runs import extends, find_run, is_finished, one_at_a_time
from slurm_train.launch.state import attempt_state
from slurm_train.launch.sweep import points
from slurm_train.report.fence import holder
from slurm_train.report.position import position
from slurm_train.report.rundir import RunDirectory, parsed
from slurm_train.report.summary import summary
from slurm_train.report.trust import require_trusted
from slurm_train.task import Settings, Task
from slurm_train.topology.jobs import job_id
from slurm_train.topology.ranks import ranks


def train(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> None:
    """Plan a new run and do it.

    Args:
        overrides: as typed.
        config_dirs: the user's config directories.

    Raises:
        SlurmTrainError: whatever the run ends with; so do the others here.
    """
    composed = compose(overrides, config_dirs)
    _go(make_plan(composed, os.environ), composed)


def resume(name: str, overrides: Sequence[str], config_dirs: Sequence[str] = (), after: str = "") -> None:
    """Go on with a run in its directory; say so when it is finished.

    Args:
        name: the run.
        overrides: as typed.
        config_dirs: the user's config directories.
        after: the job of the run that ends with this call, in whose batch shell this is; "" for none.
    """
    run, composed = _saved(name, overrides, config_dirs)
    plan = make_plan(composed, os.environ, existing=run)
    if after:  # inside a job SBATCH_* are no longer those of the user's shell
        plan = replace(plan, sbatch_defaults=parsed(run.plan.read_text(encoding="utf-8")).get("sbatch_defaults", {}))
    with one_at_a_time(run) if plan.launcher == "slurm" else nullcontext():
        if _is_main(plan):  # as one rank of several: others may see that the first has begun already
            _refuse_while_active(run)
        if is_finished(run) and not extends(load(run.config), composed.config):
            _say(plan, f"{run.path} is finished, there is nothing to do; to train longer add e.g. train.epochs=20")
        else:
            _go(plan, composed, after)


def evaluate(name: str, overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> None:
    """Evaluate the newest checkpoint of a run on the test data. The run's own files stay as they are."""
    run, composed = _saved(name, overrides, config_dirs)
    _go(make_plan(composed, os.environ, verb="evaluate", existing=run), composed)


def generate(
    name: str, overrides: Sequence[str], config_dirs: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> None:
    """Let the newest checkpoint of a language model go on with a text. The run's own files stay as they are.

    Args:
        name: the run.
        overrides: as typed, such as another layout.
        config_dirs: the user's config directories.
        options: prompt, tokens, temperature, top_k, seed; see slurm_train.train.generate.
    """
    run, composed = _saved(name, overrides, config_dirs)
    _go(make_plan(composed, os.environ, "generate", run, options), composed)


def verify(overrides: Sequence[str], config_dirs: Sequence[str] = (), steps: int = 10) -> None:
    """Compare a layout with one process; see slurm_train.train.verify.

    Args:
        overrides: as typed.
        config_dirs: the user's config directories.
        steps: optimizer steps.
    """
    composed = compose(overrides, config_dirs)
    _go(make_plan(composed, os.environ, "verify", options={"steps": steps}), composed)


def export(name: str, output: str, ema: bool = False, checkpoint: str = "") -> str:
    """Write the weights of a run to one file; returns a line about it.

    Args:
        name: the run.
        output: a new file: .safetensors, .pt or .pth.
        ema: the averaged weights.
        checkpoint: name of one, such as step_000100; "" for the newest.
    """
    question = {"run": str(find_run(name).path), "output": output, "ema": ema, "checkpoint": checkpoint}
    return str(ask("slurm_train.train.export", question, "the checkpoint")["line"])


def sweep(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> int:
    """Do the points of a sweep one after the other, each in its own run directory <run id>_<n>.

    All points are planned first, so that a fault of the user's is told before any is run. One that fails does not stop
    the others, unless its input is at fault.

    Returns:
        the exit code: 0 when all are done, else that of the last one that failed.
    """
    base, plans = new_run_id(), []
    for number, point in enumerate(points(overrides)):
        composed = compose(point, config_dirs)
        run = composed.config.run
        if run.dir:
            run.dir = f"{run.dir.rstrip('/')}_{number}"
        else:
            run.name = f"{run.name or base}_{number}"
        plans.append((" ".join(point), composed, make_plan(composed, os.environ)))
    if any(plan.launcher == "inline" and plan.world_size > 1 for _, _, plan in plans):
        raise UserError("several ranks cannot sweep together", "-m", "start the sweep from one process")
    code, results = EXIT_OK, []
    for number, (name, composed, plan) in enumerate(plans, 1):
        print(f"[{number}/{len(plans)}] {name}", flush=True)
        try:
            results.append(_go(plan, composed))
        except (UserError, Saved, Interrupted):
            raise
        except SlurmTrainError as error:
            code = error.exit_code
            results.append(f"failed: {error}")
            print(f"error: {error}", file=sys.stderr, flush=True)
    print("sweep:")
    for (name, _, _), result in zip(plans, results, strict=True):
        print(f"  {name}   {result}")
    return code


def planned(
    overrides: Sequence[str],
    config_dirs: Sequence[str] = (),
    *,
    deep: bool = False,
    config: bool = False,
    as_json: bool = False,
) -> str:
    """The plan of a new run as text.

    Args:
        overrides: as typed.
        config_dirs: the user's config directories.
        deep: import the model and count it, in a process of its own.
        config: add the whole configuration.
        as_json: give JSON and nothing else.
    """
    from slurm_train.launch.deep import look
    from slurm_train.launch.show import show

    composed = compose(overrides, config_dirs)
    plan = make_plan(composed, os.environ)
    if deep:
        plan = look(plan, composed.config)
    if not _is_main(plan):
        return ""
    if as_json:
        return plan.to_json().rstrip()
    return f"{show(plan)}\n\n{dump(composed.config).rstrip()}" if config else show(plan)


def composed_text(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> str:
    """The composed configuration as yaml text."""
    return dump(compose(overrides, config_dirs).config)


def _saved(name: str, overrides: Sequence[str], config_dirs: Sequence[str]) -> tuple[RunDirectory, Composed]:
    """A run that is there, and its configuration with some things changed."""
    run = find_run(name)
    for line in require_trusted(run.path):
        print(f"note: {line}", file=sys.stderr, flush=True)
    kept = parsed(run.plan.read_text(encoding="utf-8")).get("config_dirs", [])
    directories = dict.fromkeys([*config_dirs, *(place for place in kept if os.path.isdir(place))])
    config = load(run.config)
    if config.launcher.name == "slurm" and "SLURM_STEP_ID" in os.environ:
        # A step of a job goes on with the run itself, unless launcher=slurm is typed: it has what the run needs.
        config.launcher.name = "auto"
    return run, apply(config, overrides, list(directories))


def _refuse_while_active(run: RunDirectory) -> None:
    """Two attempts must not train in one run directory.

    Raises:
        UserError: a process trains there; or a job of the run is still in the queue, and this process is no part of
            it; or Slurm does not answer.
    """
    place = position(run)
    attempt, own = place.training, job_id(os.environ)
    # Slurm speaks for its jobs: a requeued one is not to wait for its own tasks on a node that is cut off.
    if (attempt is None or not attempt.job or attempt.launcher == "local") and (who := holder(run.path)):
        raise UserError(f"{who} trains in this run directory", str(run.path), "wait for it, or press Ctrl-C there")
    if attempt is None or not attempt.job or attempt.job == own or shutil.which("squeue") is None:
        return
    found = attempt_state(place, attempt, queue.jobs([attempt.job]))
    if found.going and found.job:
        remedy = f"wait for it, or type: python -m slurm_train cancel {attempt.job}"
        raise UserError(f"job {attempt.job} of this run is {found.job.state}", str(run.path), remedy)


def _go(plan: LaunchPlan, composed: Composed, after: str = "") -> str:
    """Do what is planned, or submit it; returns what came of it in one line."""
    for warning in plan.warnings if _is_main(plan) else ():
        print(f"note: {warning}", file=sys.stderr, flush=True)
    if plan.launcher == "inline":
        _go_inline(plan, dump(composed.config))
        return summary(RunDirectory(plan.run_dir)).splitlines()[0]
    _settle_data(composed.config)
    text = dump(composed.config)
    settings = Settings(text, plan.to_json()) if plan.continues else None
    task = Task(plan.run_dir, plan.verb, settings, live=plan.launcher == "slurm", options=plan.options)
    if plan.launcher == "slurm":
        return f"job {_submit(plan, text, task, after)}"
    directory = _directory(plan, text)
    # Late: submitit takes a tenth of a second to import, and a plan does not need it.
    from slurm_train.launch import local

    local.run(plan, directory, task)
    text = summary(directory)
    print(text, flush=True)
    return text.splitlines()[0]


def _settle_data(config: DictConfig) -> None:
    """Find or download the data before any rank starts, and keep in the configuration which they are."""
    if config.data._target_ != FASHION_MNIST:
        return
    config.data.root, why = settle(config.data.get("root"), config.data.get("download", True))
    if why:
        print(f"note: {why}", flush=True)


def _directory(plan: LaunchPlan, text: str) -> RunDirectory:
    """The run directory, new or with what the run goes on with; an evaluation leaves it as it is."""
    if not plan.continues:
        return RunDirectory.create(plan.run_dir, text, plan.to_json(), plan.script)
    directory = RunDirectory.open(plan.run_dir)
    if plan.verb == "train":
        directory.replace(text, plan.to_json(), plan.script)
    return directory


def _submit(plan: LaunchPlan, text: str, task: Task, after: str) -> str:
    """Submit the job and say what to type next. One that is refused leaves nothing behind, and changes no run."""
    from slurm_train.launch import slurm

    directory = RunDirectory.open(plan.run_dir) if plan.continues else _directory(plan, text)
    try:
        job = slurm.submit(plan, directory, task, after)
    except UserError:
        if not plan.continues:
            directory.discard()
        raise
    if plan.continues:
        _directory(plan, text)  # the job carries these settings with it, so that it may be faster
    nodes = f"{plan.nodes} node{'s' * (plan.nodes != 1)}"
    print(f"job {job} submitted: {plan.world_size} rank{'s' * (plan.world_size != 1)} on {nodes}")
    print(f"run directory:\n{directory.path}")
    print("next:")
    for words in ("status", "logs --follow", "cancel"):
        print(f"  python -m slurm_train {words} {job}")
    return job


def _go_inline(plan: LaunchPlan, text: str) -> None:
    from slurm_train.launch import inline

    if plan.continues and plan.verb == "train" and _is_main(plan):
        directory = RunDirectory.open(plan.run_dir)
        directory.replace(text, plan.to_json())
        directory.append_event("submitted", launcher="inline", world_size=plan.world_size, verb=plan.verb)
    inline.run(plan, text)


def _is_main(plan: LaunchPlan) -> bool:
    return plan.launcher != "inline" or ranks(os.environ).rank == 0


def _say(plan: LaunchPlan, text: str) -> None:
    """Print, on the one process that speaks for all."""
    if _is_main(plan):
        print(text, flush=True)
