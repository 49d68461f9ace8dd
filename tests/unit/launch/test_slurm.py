"""The plan of a Slurm job: its ranks, its options, what is warned of, and what its submission hands on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

import slurm_train
from slurm_train.cli import main
from slurm_train.config.compose import compose
from slurm_train.errors import ConfigError
from slurm_train.launch import slurm
from slurm_train.launch.plan import LaunchPlan, make_plan
from slurm_train.launch.refusal import refusal
from slurm_train.launch.show import show
from slurm_train.launch.slurm import submission_environment

SLURM = ("+experiment=fmnist", "launcher=slurm")
BATCH_SHELL = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}
STEP = BATCH_SHELL | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def planned(*overrides: str, env: Mapping[str, str] | None = None) -> LaunchPlan:
    return make_plan(compose([*SLURM, *overrides]), env or {})


def options(plan: LaunchPlan) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", plan.script, re.MULTILINE))


@pytest.mark.parametrize(
    ("overrides", "nodes", "tasks_per_node", "world"),
    [
        ((), 1, 1, 1),
        (("launcher.nodes=2",), 2, 1, 2),
        (("launcher.nodes=2", "launcher.tasks_per_node=2"), 2, 2, 4),
        (("parallel=tp", "parallel.tp=4", "launcher.nodes=2"), 2, 2, 4),
        (("launcher.nodes=2", "launcher.gpus_per_node=4"), 2, 4, 8),
        (("launcher.nodes=2", "launcher.gpus_per_node=4", "launcher.tasks_per_node=1"), 2, 1, 2),
        (("launcher.nodes=4", "launcher.tasks=8"), 4, 8, 8),
    ],
)
def test_the_ranks(overrides: tuple[str, ...], nodes: int, tasks_per_node: int, world: int) -> None:
    plan = planned(*overrides)
    assert (plan.launcher, plan.nodes, plan.tasks_per_node, plan.world_size) == ("slurm", nodes, tasks_per_node, world)
    found = options(plan)
    assert found["nodes"] == str(nodes)
    assert found.get("ntasks-per-node") == (None if "launcher.tasks=8" in overrides else str(tasks_per_node))
    assert found.get("ntasks") == ("8" if "launcher.tasks=8" in overrides else None)


def test_every_key_becomes_its_option() -> None:
    plan = planned(
        "launcher.cpus_per_task=6",
        "launcher.gpus_per_task=1",
        "launcher.gpu_type=1g.10gb",
        "launcher.mem_per_gpu=2.5GB",
        "launcher.time=1-12",
        "launcher.signal_seconds=120",
        "launcher.partition='a,b'",
        "launcher.account=physics",
        "launcher.qos=high",
        "launcher.constraint=a100&ib",
        "launcher.exclude=n[3-4]",
        "launcher.reservation=tonight",
        "launcher.sbatch={gpu_bind: closest, exclusive: true, overcommit: false, nice: 10}",
    )
    found = options(plan)
    assert {name: found[name] for name in found if name not in ("chdir", "output", "comment")} == {
        "job-name": "fmnist",
        "nodes": "1",
        "ntasks-per-node": "1",
        "cpus-per-task": "6",
        "gpus-per-task": "1g.10gb:1",
        "mem-per-gpu": "2560M",
        "time": "1-12",
        "signal": "USR2@120",
        "partition": "a,b",
        "account": "physics",
        "qos": "high",
        "constraint": "a100&ib",
        "exclude": "n[3-4]",
        "reservation": "tonight",
        "requeue": "",
        "open-mode": "append",
        "gpu-bind": "closest",
        "exclusive": "",
        "nice": "10",
    }


@pytest.mark.parametrize(
    ("typed", "megabytes"), [("4G", 4096), ("4000", 4000), ("512m", 512), ("0", 0), ("1.5T", 1572864), ("1K", 1)]
)
def test_memory_is_written_in_megabytes(typed: str, megabytes: int) -> None:
    assert options(planned(f"launcher.mem={typed}"))["mem"] == f"{megabytes}M"


def test_a_group_over_nodes_is_warned_of() -> None:
    spans = planned("parallel=tp", "launcher.nodes=2", "launcher.tasks_per_node=2")
    assert [warning.partition(",")[0] for warning in spans.warnings if "parallel.tp" in warning] == [
        "parallel.tp=4: with 2 ranks a node a tensor-parallel group spans nodes"
    ]
    assert all(f"note: {warning}" in show(spans) for warning in spans.warnings)
    inside = planned("parallel=tp", "launcher.nodes=1", "launcher.tasks_per_node=2")
    assert not [warning for warning in inside.warnings if "parallel.tp" in warning]


def test_idle_gpus_and_a_run_directory_of_the_node_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("launcher.gpus_per_node=4", "launcher.tasks_per_node=1", "run.dir=/tmp/mine")
    assert plan.warnings[:2] == (
        "launcher.gpus_per_node=4: 3 of them idle with 1 ranks a node",
        "run.dir: /tmp/mine lies in /tmp, which each node usually has for itself; the job would fail",
    )
    monkeypatch.chdir("/usr")
    assert planned("run.dir=/usr/mine").warnings == ()


def test_the_environment_of_the_submission() -> None:
    env = {"HOME": "/home", "SLURM_CONF": "/etc/x", "SBATCH_ACCOUNT": "mine", "SBATCH_PARTITION": "slow", "RANK": "0"}
    env |= {"SBATCH_TIMELIMIT": "5", "SBATCH_NO_REQUEUE": "1", "SBATCH_MEM_PER_NODE": "1G", "SLURM_NTASKS": "3"}
    env |= {"SBATCH_GPUS": "2", "SBATCH_GRES": "gpu:1"}
    env |= {"LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    typed = ("launcher.partition=fast", "launcher.time=10", "launcher.mem_per_cpu=1G", "launcher.gpus_per_node=1")
    plan = planned(*typed, env=env)
    kept = {"HOME": "/home", "SLURM_CONF": "/etc/x", "SBATCH_ACCOUNT": "mine"}
    assert submission_environment(plan, env) == kept
    assert "SBATCH_ACCOUNT=mine in the environment counts too" in plan.warnings
    assert plan.sbatch_keys["account"] == "SBATCH_ACCOUNT=mine"
    inside = planned(env=BATCH_SHELL | {"SBATCH_ACCOUNT": "outer"})
    assert submission_environment(inside, BATCH_SHELL | {"SBATCH_ACCOUNT": "outer"}) == {}


def test_a_job_of_a_job_is_a_run_of_its_own() -> None:
    plan = planned("launcher.nodes=2", env=BATCH_SHELL)
    assert (plan.launcher, plan.world_size) == ("slurm", 2)
    assert not plan.run_id.startswith("job-")
    with pytest.raises(ConfigError, match="launcher=slurm: each rank of this step would submit a job"):
        planned(env=STEP)


def test_the_variables_of_the_ranks_are_in_the_script() -> None:
    plan = planned("launcher.env.GLOO_SOCKET_IFNAME=ib0", "launcher.env.TEXT=it's $HOME", "launcher.env.YES=true")
    assert "export SUBMITIT_EXECUTOR=slurm\n" in plan.script
    assert "export GLOO_SOCKET_IFNAME=ib0\n" in plan.script
    assert "export YES=true\n" in plan.script
    assert "export TEXT='it'\"'\"'s $HOME'\n" in plan.script
    assert plan.environment["GLOO_SOCKET_IFNAME"] == "ib0"


def test_the_package_is_found_and_the_threads_are_those_planned() -> None:
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "/theirs"}
    plan = planned("launcher.cpus_per_task=4", "launcher.env.PYTHONPATH=/my/lib", env=env)
    assert plan.environment["PYTHONPATH"].split(":")[0] == "/my/lib"
    assert str(Path(slurm_train.__file__).parents[1]) in plan.environment["PYTHONPATH"].split(":")
    assert (plan.threads, plan.environment["OMP_NUM_THREADS"]) == (4, "4")
    assert planned(env=env).threads_reason == "OMP_NUM_THREADS=1"


def test_commas_are_part_of_a_partition_list_and_a_backslash_is_refused() -> None:
    assert options(planned("launcher.partition=gpu,spot", "launcher.exclude=n1,n[3-4]"))["partition"] == "gpu,spot"
    with pytest.raises(ConfigError, match="contains a backslash"):
        planned("run.dir='/shared/a\\\\b'")


FAKES = {
    "refused": ("echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1", 2, False),
    "in doubt": ("echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1", 1, True),
    "no name": ("exit 0", 1, True),
    "a note": ("echo 'sbatch: Warning: fewer nodes' >&2; echo 12", 0, True),
}


@pytest.mark.parametrize("name", FAKES)
def test_a_run_directory_goes_only_if_its_job_was_surely_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, code, stays = FAKES[name]
    monkeypatch.setattr(slurm, "SBATCH_SECONDS", 20)
    for command in ("sbatch", "srun"):
        path = tmp_path / "bin" / command
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n/bin/cat >/dev/null\n{answer}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert main([*SLURM, "launcher.qos=nope", "run.dir=run"]) == code
    told = capsys.readouterr().err
    assert (tmp_path / "run" / "config.yaml").exists() == stays, told
    assert ("it may be" in told or "may be in the queue" in told) == (name in ("in doubt", "no name"))
    assert ("note: sbatch: Warning: fewer nodes" in told) == (name == "a note")
    assert ("launcher.qos=nope: " in told) == (name == "refused")


def test_what_no_sbatch_line_can_hold_goes_to_the_command_line() -> None:
    plan = planned("run.dir=/shared/two\nlines 100%")
    assert plan.sbatch_words == ("--output=/shared/two\nlines 100%%/logs/%j_batch.log",)
    assert "output" not in options(plan)
    assert "comment" in options(plan)


KEYS = {
    "partition": "launcher.partition=nope",
    "nodes": "launcher.nodes=1",
    "mem": "launcher.mem=900G",
    "gpus-per-node": "launcher.gpus_per_node=2",
    "constraint": "launcher.constraint=x",
    "foo": "launcher.sbatch.foo=1",
    "time": "launcher.time=10",
    "account": "launcher.account=nobody",
    "qos": "launcher.qos=nope",
}
# As Slurm 22.05 and 23.11 say it.
REFUSALS = {
    "sbatch: error: invalid partition specified: nope\n"
    "sbatch: error: Batch job submission failed: Invalid partition name specified": "launcher.partition=nope",
    "sbatch: error: Batch job submission failed: Invalid feature specification": "launcher.constraint=x",
    "sbatch: error: Memory specification can not be satisfied\n"
    "sbatch: error: Batch job submission failed: Requested node configuration is not available": "launcher.mem=900G",
    "sbatch: error: Batch job submission failed: Requested node configuration is not available": (
        "launcher.gpus_per_node=2, launcher.mem=900G or launcher.constraint=x"
    ),
    "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified": (
        "launcher.account=nobody or launcher.partition=nope"
    ),
    "sbatch: error: Batch job submission failed: Invalid qos specification": "launcher.qos=nope",
    "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)": (
        "launcher.time=10"
    ),
    "sbatch: unrecognized option '--foo=1'\nTry \"sbatch --help\" for more information": "launcher.sbatch.foo=1",
    "sbatch: error: Unable to contact slurm controller (connect failure)": "launcher=slurm",
    "sbatch: error: something nobody has seen before": "launcher=slurm",
    "": "launcher=slurm",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_a_refusal_names_the_key_in_slurms_words(words: str) -> None:
    fault = refusal(words, KEYS).faults[0]
    assert fault.key == REFUSALS[words]
    last = words.splitlines()[0].removeprefix("sbatch: ").removeprefix("error: ") if words else "said nothing"
    assert last in fault.message
