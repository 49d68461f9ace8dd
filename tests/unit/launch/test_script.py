"""The script that a submission hands to sbatch: whole files to compare with, and what a shell makes of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from submitit.slurm.slurm import SlurmExecutor

from slurm_train.config.compose import compose
from slurm_train.launch.lint import lint
from slurm_train.launch.request import job_script
from slurm_train.launch.script import Script
from slurm_train.launch.world import plan_world
from tests.golden.compare import GOLDEN, check_golden
from tests.unit.launch.batch_shell import run_batch

PYTHON = "/opt/venv/bin/python"
HOSTILE = '/data/my runs/it\'s "50%" a=b,c #1 $HOME grün\nnext'  # no backslash: Slurm would replace no %j

JOBS = {
    "plain": (
        "/data/runs/fmnist/first",
        ("launcher.nodes=2", "launcher.tasks_per_node=2", "launcher.time=30"),
    ),
    "everything": (
        "/data/runs/fmnist/second",
        (
            "launcher.nodes=2",
            "launcher.tasks_per_node=4",
            "launcher.cpus_per_task=6",
            "launcher.gpus_per_task=1",
            "launcher.gpu_type=a100",
            "launcher.mem_per_gpu=40G",
            "launcher.time=1-12:00:00",
            "launcher.signal_seconds=120",
            "launcher.partition='gpu,spot'",
            "launcher.account=physics",
            "launcher.qos=high",
            "launcher.constraint='a100&ib'",
            "launcher.exclude='n[3-4,7]'",
            "launcher.reservation=night shift",
            "launcher.sbatch={exclusive: true, gpu_bind: closest, mail-type: 'END,FAIL', overcommit: false}",
            "launcher.setup=['module load cuda', 'source \"$HOME/venv/bin/activate\"']",
            "launcher.env={NCCL_SOCKET_IFNAME: ib0, GREETING: 'it\\'s \"so\" $5'}",
        ),
    ),
    "preflight": (
        "/data/my runs/third",
        ("launcher.preflight=true", "launcher.nodes=2", "launcher.tasks_per_node=4", "launcher.gpus_per_task=2"),
    ),
    "hostile": (
        HOSTILE,
        ("launcher.sbatch={comment: 'it\\'s \"so\" #1, 50% = $5 \\ '}", "launcher.env={ODD: 'ü \\ $x `y` \"z\"'}"),
    ),
}


def made(name: str, monkeypatch: pytest.MonkeyPatch) -> Script:
    run_dir, overrides = JOBS[name]
    monkeypatch.setattr(sys, "executable", PYTHON)
    config = compose(["+experiment=fmnist", "launcher=slurm", *overrides]).config
    return job_script(config, plan_world(config, {}), dict(config.launcher.env), run_dir, str(Path(run_dir).parent))


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_golden_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden(GOLDEN / f"{name}.sbatch", made(name, monkeypatch).text)


def test_each_golden_file_belongs_to_a_job() -> None:
    assert {path.stem for path in GOLDEN.glob("*.sbatch")} == set(JOBS)


@pytest.mark.parametrize("name", JOBS)
def test_bash_and_the_lint_take_it(name: str) -> None:
    path = GOLDEN / f"{name}.sbatch"
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert lint(path.read_text(encoding="utf-8"), exists=lambda directory: True) == []


def test_what_srun_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = made("hostile", monkeypatch)
    ran = run_batch(script.text, tmp_path, env={"SLURM_CPUS_PER_TASK": "3"})
    log = HOSTILE.replace("%", "%%") + "/logs/%j_%t_log"
    assert (ran.code, ran.errors) == (0, "")
    assert ran.words == [
        "--export=ALL",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=3",
        f"--output={log}.out",
        f"--error={log}.err",
        PYTHON,
        "-u",
        "-m",
        "submitit.core._submit",
        f"{HOSTILE}/logs",
    ]
    assert ran.environment["ODD"] == 'ü \\ $x `y` "z"'
    assert ran.environment["SUBMITIT_EXECUTOR"] == "slurm"


def test_without_cpus_per_task_srun_is_told_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run_batch(made("plain", monkeypatch).text, tmp_path, env={})
    assert ran.words[2].startswith("--output=")


def test_what_follows_an_early_end_is_told_srun_s_exit_code_and_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >&2\nexit "$3"\n')
    python.chmod(0o755)
    text = made("plain", monkeypatch).text.replace("exec /opt/venv/bin/python", f"exec {python}")
    ran = run_batch(text, tmp_path / "saved", env={"SRUN_EXIT": "75"})
    assert (ran.code, ran.errors) == (75, "-m slurm_train.launch.restart 75 resume /data/runs/fmnist/first\n")
    ran = run_batch(text, tmp_path / "done", env={})
    assert (ran.code, ran.errors) == (0, "")


def test_a_setup_line_that_fails_ends_the_job(tmp_path: Path) -> None:
    script = Script("srun train", setup=("echo first >&2", "false", "echo second >&2"))
    ran = run_batch(script.text, tmp_path, env={})
    assert (ran.code, ran.errors, ran.words) == (1, "first\n", [])


@pytest.mark.parametrize("name", JOBS)
def test_the_command_is_submitit_s_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "srun"
    tool.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))  # submitit asks for an srun before it says anything
    script = made(name, monkeypatch)
    assert f" {SlurmExecutor(Path(JOBS[name][0], 'logs'))._submitit_command_str} ||\n" in script.command


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("", "#SBATCH --x"),
        ("1-12:00:00", "#SBATCH --x=1-12:00:00"),
        ("a&b|[c*2]", "#SBATCH --x=a&b|[c*2]"),
        ("%j/%%", "#SBATCH --x=%j/%%"),
        ("a b", "#SBATCH --x='a b'"),
        ("a#b", "#SBATCH --x='a#b'"),  # sbatch cuts a bare value off there
        ("it's", "#SBATCH --x='it'\"'\"'s'"),
        ("a\tb", "#SBATCH --x='a\tb'"),
        ("a\\b", "#SBATCH --x='a\\\\b'"),  # sbatch, unlike a shell, reads backslashes in single quotes
    ],
)
def test_an_option(value: str, line: str) -> None:
    script = Script("true", options={"x": value})
    assert script.text.splitlines()[1] == line
    assert script.words == []


def test_only_the_command_line_can_hold_a_newline() -> None:
    script = Script("true", options={"x": "a\nb", "y": "c"})
    assert script.words == ["--x=a\nb"]
    assert script.text == "#!/bin/bash\n#SBATCH --y=c\n\n# one task a rank\ntrue\n"


def comments(lines: Sequence[str]) -> list[str]:
    return Script("true", comments=lines).text.splitlines()[1 : 1 + len(lines)]


def test_comments() -> None:
    assert comments(["words", "", "##SBATCH --nodes=2"]) == ["# words", "#", "##SBATCH --nodes=2"]
