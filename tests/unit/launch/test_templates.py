"""The sbatch templates: the files are the rendered ones; what they make of an allocation and of typed words."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_train.config.launcher_schema import LauncherConfig
from slurm_train.launch import templates
from slurm_train.launch.lint import lint
from slurm_train.topology.rendezvous import PORTS
from tests.golden.compare import check_golden
from tests.unit.launch.batch_shell import Ran, run_batch

COMMITTED = Path(__file__).parents[3] / "sbatch_templates"
NAMES = sorted(templates.templates())
TYPED = ("+experiment=fmnist", "run.name=a b", "x='it''s'", 'y="$HOME"', "*", "", "--config-dir", "a\nb")
SHELL = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "n1",
    "PYTHON": sys.executable,
}


def ran(name: str, directory: Path, *arguments: str, **changes: str | None) -> Ran:
    """A template, run in the batch shell of two nodes with two tasks each; a change to None takes a variable away."""
    env = {key: value for key, value in {**SHELL, **changes}.items() if value is not None}
    return run_batch(templates.templates()[name], directory, *arguments, env=env)


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_file_is_the_rendered_one(name: str) -> None:
    check_golden(COMMITTED / name, templates.templates()[name])


def test_all_of_them_are_committed_and_written(tmp_path: Path) -> None:
    templates.main([str(tmp_path / "new")])
    written = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "new").iterdir()}
    assert written == dict(templates.templates())
    assert {path.name for path in COMMITTED.iterdir()} == set(written)


@pytest.mark.parametrize("name", NAMES)
def test_bash_and_the_lint_take_it(name: str) -> None:
    text = templates.templates()[name]
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert lint(text) == []


@pytest.mark.parametrize("name", NAMES)
def test_what_is_to_be_edited_is_a_directive_of_its_own(name: str) -> None:
    edited = templates.templates()[name].replace("\n##SBATCH", "\n#SBATCH")
    assert edited.count("\n#SBATCH") == templates.templates()[name].count("\n#SBATCH") + 6
    assert lint(edited) == []


def test_they_differ_in_the_command_and_comments() -> None:
    def settings(text: str) -> list[str]:
        head = text[: text.index("\nset +e\n")]
        return [line for line in head.splitlines() if line.startswith("#SBATCH") or not line.startswith("#")]

    srun, torchrun = (settings(text) for text in templates.templates().values())
    assert srun == torchrun
    assert [line for line in srun if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=slurm_train",
        "#SBATCH --nodes=2",
        f"#SBATCH --signal=USR2@{LauncherConfig.signal_seconds}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_typed_words_arrive_as_they_are(name: str, tmp_path: Path) -> None:
    words = ran(name, tmp_path, *TYPED).words
    assert words[-len(TYPED) - 2 :] == ["-m", "slurm_train", *TYPED]


@pytest.mark.parametrize("name", NAMES)
def test_the_exit_code_is_that_of_srun(name: str, tmp_path: Path) -> None:
    saved = ran(name, tmp_path / "saved", "resume", "nothing", SRUN_EXIT="75", PYTHONPATH=str(COMMITTED.parent))
    assert saved.code == 75
    assert saved.errors.startswith("slurm_train: exit code 75; not started again: there is no run directory")
    assert ran(name, tmp_path / "done").code == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_python_that_is_missing_is_told(name: str, tmp_path: Path) -> None:
    missing = ran(name, tmp_path, PYTHON="/no/such/python")
    told = "there is no /no/such/python on n1; submit with PYTHON=/path/to/python sbatch ...\n"
    assert (missing.code, missing.errors, missing.words) == (2, told, [])


def test_srun_starts_one_task_a_rank(tmp_path: Path) -> None:
    assert ran("srun.sbatch", tmp_path / "a", "x=1", SLURM_CPUS_PER_TASK="3").words == [
        *("--export=ALL", "--kill-on-bad-exit=0", "--wait=30", "--cpus-per-task=3", "--label"),
        *(sys.executable, "-u", "-m", "slurm_train", "x=1"),
    ]
    assert ran("srun.sbatch", tmp_path / "b").value("cpus-per-task") == ""


@pytest.mark.parametrize(
    ("changes", "ranks", "cpus", "threads"),
    [
        ({}, "2", "2", "1"),
        ({"SLURM_CPUS_PER_TASK": "3"}, "2", "6", "3"),
        ({"SLURM_CPUS_PER_TASK": "3", "OMP_NUM_THREADS": "2"}, "2", "6", "2"),
        # neither -n nor --ntasks-per-node: Slurm says how many would fit, and starts one
        ({"SLURM_NTASKS": None, "SLURM_TASKS_PER_NODE": "8,6"}, "1", "1", "1"),
        ({"SLURM_NTASKS": None, "SLURM_NTASKS_PER_NODE": "3"}, "3", "3", "1"),
        # whole nodes: fewer tasks than would fit
        ({"SLURM_TASKS_PER_NODE": "8(x2)"}, "2", "2", "1"),
    ],
)
def test_torchrun_is_one_task_a_node(
    changes: Mapping[str, str | None], ranks: str, cpus: str, threads: str, tmp_path: Path
) -> None:
    found = ran("torchrun.sbatch", tmp_path, **changes)
    assert (found.code, found.errors) == (0, "")
    assert [found.value(name) for name in ("ntasks", "ntasks-per-node", "nnodes")] == ["2", "1", "2"]
    assert [found.value(name) for name in ("nproc-per-node", "cpus-per-task")] == [ranks, cpus]
    assert found.environment["OMP_NUM_THREADS"] == threads


def test_torchrun_hands_the_warning_on(tmp_path: Path) -> None:
    environment = ran("torchrun.sbatch", tmp_path).environment
    assert "SIGUSR2" in environment["PET_SIGNALS_TO_HANDLE"].split(",")
    assert 30 < int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < LauncherConfig.signal_seconds


def test_torchrun_sees_all_gpus_of_its_node(tmp_path: Path) -> None:
    names = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND")
    found = ran("torchrun.sbatch", tmp_path / "a", SLURM_GPUS_ON_NODE="4", **dict.fromkeys(names, "1"))
    assert not found.environment.keys() & set(names)
    assert found.value("gpus-per-node") == "4"
    assert "gpus" not in " ".join(ran("torchrun.sbatch", tmp_path / "b").words)


@pytest.mark.parametrize(
    ("nodes", "tasks", "spread"), [("4", "8", "5,1(x3)"), ("2", "4", "3,1"), ("2", "3", "2,1"), ("2", "3", "8(x2)")]
)
def test_torchrun_refuses_uneven_tasks(nodes: str, tasks: str, spread: str, tmp_path: Path) -> None:
    changes = {"SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": tasks, "SLURM_TASKS_PER_NODE": spread}
    refused = ran("torchrun.sbatch", tmp_path, **changes)
    words = f"torchrun needs as many ranks on each node, not {spread}; use --ntasks-per-node instead of -n\n"
    assert (refused.code, refused.errors, refused.words) == (2, words, [])


def test_torchrun_meets_on_the_first_node(tmp_path: Path) -> None:
    found = ran("torchrun.sbatch", tmp_path)
    assert (found.value("rdzv-backend"), found.value("rdzv-id")) == ("c10d", "1234")
    assert re.fullmatch(r"n1:\d+", found.value("rdzv-endpoint"))


def test_ports_are_below_the_ephemeral_ones_and_differ(tmp_path: Path) -> None:
    runs = [("1234", None), ("1234", "1"), ("1234", "2"), ("1235", None), ("19999", "12"), ("4294967295", "999")]
    ports = [
        int(
            ran("torchrun.sbatch", tmp_path / f"{job} {restarts}", SLURM_JOB_ID=job, SLURM_RESTART_COUNT=restarts)
            .value("rdzv-endpoint")
            .partition(":")[2]
        )
        for job, restarts in runs
    ]
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < 32768 and port not in PORTS for port in ports)
