"""The main job as a real Slurm job: its numbers, its places, its ends, and what Slurm refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import slurm_train.data
from tests.cluster.jobs import REPO, Cluster, slurm, wait_for_accounting, wait_for_job, wait_until
from tests.integration.runs import losses

SAMPLE = f"data.root={Path(slurm_train.data.__file__).parent / 'sample'}"
SHORT = ("+experiment=fmnist", SAMPLE, "train.max_steps=100", "train.validation=0")
FOUR = ("launcher.nodes=2", "launcher.tasks_per_node=2")


def command(
    *words: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """`python -m slurm_train` as a user types it."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "slurm_train", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def submit(*words: str, cwd: Path, env: dict[str, str] | None = None) -> tuple[str, Path]:
    """Submit a run; returns job id and run directory."""
    done = command(*words, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    job, run = re.search(r"job (\d+) submitted: .*\nrun directory:\n(.*)\nnext:\n", done.stdout, re.DOTALL).groups()
    return job, Path(run)


def ended(job: str, run: Path, timeout: float = 90) -> None:
    """The job completes; else its logs are the test's failure message."""
    state = wait_for_job(job, timeout)
    assert state == "COMPLETED", f"{state}\n{printed(run)}"


def printed(run: Path) -> str:
    """All that a run's ranks and its batch shell wrote."""
    logs = sorted(run.glob("logs/*.err")) + sorted(run.glob("logs/*batch.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in logs)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    """The run's events of one kind."""
    lines = (run / "events.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == name]


@pytest.fixture(scope="session")
def one_process(shared_root: Path) -> dict[int, float]:
    """The losses of one process on this host."""
    work = shared_root / "one"
    work.mkdir(exist_ok=True)
    done = command(*SHORT, "launcher=local", "run.dir=run", cwd=work)
    assert done.returncode == 0, done.stderr
    return losses(work / "run")


LAYOUTS = {
    "ddp": ("parallel=ddp", *FOUR),
    "tp": ("parallel=tp", *FOUR),
    "uneven": ("parallel=ddp", "launcher.nodes=4", "launcher.tasks=8"),
}


def test_the_losses_are_those_of_one_process(shared_tmp: Path, one_process: dict[int, float]) -> None:
    jobs = {name: submit(*SHORT, *words, "launcher=slurm", cwd=shared_tmp) for name, words in LAYOUTS.items()}
    for name, (job, run) in jobs.items():
        ended(job, run, timeout=150)
        found = losses(run)
        assert found.keys() == one_process.keys() and len(found) == 100, name
        assert max(abs(found[step] / one_process[step] - 1) for step in found) < 1e-4, name
        assert events(run, "started")[0]["job"] == job
        text = (run / "logs" / f"{job}_0_log.out").read_text()
        assert "test accuracy 0." in text and f"\n{run}\n" in text
    wait_for_accounting(jobs["ddp"][0])
    run = jobs["uneven"][1]
    hosts = [path.read_text().count("hostname=n1") for path in sorted(run.glob("logs/*_log.out"))]
    assert (len(hosts), sum(hosts)) == (8, 5)


def test_any_letters_in_paths_and_values_arrive(shared_tmp: Path) -> None:
    work = shared_tmp / 'it\'s a "path" = 100%, #1 ü\nwith two lines'
    work.mkdir()
    (work / "mine.py").write_text(
        "import json, os, pathlib\n"
        "def loop(context, text, **rest):\n"
        "    pathlib.Path('seen.json').write_text(json.dumps([text, os.environ['TEXT'], os.getcwd()]))\n"
    )
    value = "a'b\"c =,%$HOME #ü\nx"
    quoted = "'" + value.replace("'", "\\'") + "'"
    job, run = submit(
        *SHORT,
        "train.loop._target_=mine.loop",
        f"+train.loop.text={quoted}",
        f"launcher.env.TEXT={quoted}",
        "run.name=a b=c,ü'\"%x",
        "launcher=slurm",
        cwd=work,
    )
    ended(job, run)
    assert json.loads((work / "seen.json").read_text()) == [value, value, str(work)]
    assert run.parent == work / "runs" / "fmnist" and run.name == "a b=c,ü'\"%x"


PROBE = """
import json, os, pathlib, stat, slurm_train.topology.device as device
def loop(context):
    opened = []
    for number in (0, 1):
        try:
            os.close(os.open(f"{os.environ['DEVICES']}/gpu{number}", os.O_RDONLY))
            opened.append(number)
        except PermissionError:
            pass
        except OSError:  # a stand-in: allowed, but nothing is behind it
            opened.append(number)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    info = context.world.info
    choice = device.choose_device(
        "auto", cuda_devices=len(visible), mps=False, local_rank=info.local_rank, local_world_size=info.local_world_size
    )
    found = {"visible": visible, "opened": opened, "choice": choice, "node": os.uname().nodename}
    pathlib.Path(f"rank{info.rank}.json").write_text(json.dumps(found))
"""


def test_each_rank_has_its_gpu(shared_tmp: Path, own_cluster: Cluster, limits: None) -> None:
    devices = f"launcher.env.DEVICES={own_cluster.directory}/dev"
    cases = {
        "alone": ("launcher.gpus_per_task=1", "launcher.gpu_type=a100", "launcher.tasks_per_node=2"),
        "all": ("launcher.gpus_per_node=2", "launcher.gpu_type=1g.10gb"),
        "bound": ("launcher.gpus_per_node=2", "launcher.sbatch.gpu-bind=single:1"),
    }
    jobs = {}
    for name, words in cases.items():
        work = shared_tmp / name
        work.mkdir()
        (work / "mine.py").write_text(PROBE)
        shared = ("train.loop._target_=mine.loop", "launcher=slurm", devices, "train.device=cpu")
        jobs[name] = submit(*SHORT, *words, *shared, cwd=work)
    seen = {}
    for name, (job, run) in jobs.items():
        ended(job, run)
        seen[name] = [json.loads((shared_tmp / name / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [found["choice"] for found in seen["alone"]] == ["cuda:0", "cuda:0"]
    assert sorted(found["opened"] for found in seen["alone"]) == [[0], [1]]
    assert {found["node"] for found in seen["alone"]} <= {"n1", "n2"}
    assert [found["choice"] for found in seen["all"]] == ["cuda:0", "cuda:1"]
    assert [found["opened"] for found in seen["all"]] == [[0, 1], [0, 1]]
    assert {found["node"] for found in seen["all"]} <= {"n3", "n4"}
    assert [len(found["visible"]) for found in seen["bound"]] == [1, 1]
    assert [found["choice"] for found in seen["bound"]] == ["cuda:0", "cuda:0"]


REFUSED = {
    "launcher.partition=nope": "launcher.partition=nope: ",
    "launcher.account=nobody": "launcher.account=nobody: ",
    "launcher.qos=nope": "launcher.qos=nope: ",
    "launcher.constraint=nope": "launcher.constraint=nope: ",
    "launcher.nodes=8": "launcher.nodes=8: ",
    "launcher.mem=900G": "launcher.mem=900G: ",
    "launcher.partition=short launcher.time=10": "launcher.time=10: ",
    "launcher.exclude=nope": "launcher.exclude=nope: ",
    "launcher.reservation=nope": "launcher.reservation=nope: ",
    "launcher.sbatch.foo=1": "launcher.sbatch.foo=1: unrecognized option",
    "launcher.gpus_per_node=1 launcher.gpu_type=h100": "launcher.gpus_per_node=1: ",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_slurm_refuses_is_told_by_its_key_and_leaves_nothing(
    typed: str, shared_tmp: Path, own_cluster: Cluster
) -> None:
    done = command(*SHORT, "launcher=slurm", *typed.split(), cwd=shared_tmp)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {REFUSED[typed]}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(shared_tmp.iterdir()) == []


def test_without_a_cluster(shared_tmp: Path, tmp_path: Path) -> None:
    done = command(*SHORT, "launcher=slurm", cwd=shared_tmp, env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (
        2,
        "error: launcher=slurm: there is no sbatch on PATH; "
        "submit on a login node of the cluster; the verb plan works without Slurm\n",
    )
    plan = command("plan", *SHORT, "launcher=slurm", cwd=shared_tmp, env={"PATH": str(tmp_path)})
    assert plan.returncode == 0 and "#SBATCH --nodes=1" in plan.stdout
    assert list(shared_tmp.iterdir()) == []


def test_the_controller_is_down(shared_tmp: Path, own_cluster: Cluster, tmp_path: Path) -> None:
    assert own_cluster.directory is not None
    conf = tmp_path / "slurm.conf"
    text = (own_cluster.directory / "slurm.conf").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("SlurmctldPort")]
    conf.write_text("\n".join([*lines, "SlurmctldPort=1", "MessageTimeout=2", ""]))
    done = command(*SHORT, "launcher=slurm", cwd=shared_tmp, env={"SLURM_CONF": str(conf)})
    assert done.returncode == 2
    assert "Unable to contact slurm controller" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(shared_tmp.iterdir()) == []


def test_a_run_directory_that_the_nodes_do_not_share(shared_tmp: Path, tmp_path: Path) -> None:
    done = command(*SHORT, "launcher=slurm", f"run.dir={tmp_path}/run", cwd=shared_tmp)
    assert done.returncode == 0
    assert done.stderr.splitlines()[0].startswith(f"note: run.dir: {tmp_path}/run lies in /tmp")
    job = done.stdout.split()[1]
    assert wait_for_job(job) == "FAILED"
    wait_for_accounting(job)
    told = command("status", f"{tmp_path}/run", cwd=shared_tmp)
    assert "share" in told.stdout, told.stdout


def test_a_python_that_the_nodes_lack(shared_tmp: Path, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    site = next(path for path in sys.path if path.endswith("site-packages"))
    environment = {**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{site}"}
    words = [str(python), "-m", "slurm_train", *SHORT, "launcher=slurm"]
    done = subprocess.run(words, cwd=shared_tmp, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    job, run = done.stdout.split()[1], Path(done.stdout.splitlines()[2])
    assert wait_for_job(job) == "FAILED"
    assert f"{python}: No such file" in printed(run)


def test_a_setup_line_that_fails_ends_the_job(shared_tmp: Path) -> None:
    job, run = submit(*SHORT, "launcher=slurm", "launcher.setup=[cd /no/such/place,touch went_on]", cwd=shared_tmp)
    assert wait_for_job(job) == "FAILED"
    assert "/no/such/place" in printed(run)
    assert not (shared_tmp / "went_on").exists()


def test_a_failing_rank_ends_the_job_and_says_why(shared_tmp: Path) -> None:
    (shared_tmp / "mine.py").write_text(
        "def loop(context):\n"
        "    if context.world.info.rank == 3:\n"
        "        raise ValueError('a bad sample')\n"
        "    context.world.barrier()\n"
    )
    job, run = submit(*SHORT, *FOUR, "launcher=slurm", "train.loop._target_=mine.loop", cwd=shared_tmp)
    assert wait_for_job(job) == "FAILED"
    outcome = json.loads((run / "logs" / f"{job}_3.outcome.json").read_text())
    assert (outcome["rank"], outcome["exit_code"], outcome["kind"]) == (3, 1, "ValueError")
    assert "rank 3" in command("status", job, cwd=shared_tmp).stdout


LONG = ("+experiment=fmnist", SAMPLE, "train.epochs=500", "train.log_seconds=0.1")


def running(run: Path, started: int = 1) -> None:
    """The run has started so many times and has done its first steps since."""
    wait_until(lambda: len(events(run, "started")) >= started, 90, f"start {started} of {run}")
    size = (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0
    wait_until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > size, 60, "steps")


def test_saved_requeued_resumed_and_evaluated_in_one_run_directory(shared_tmp: Path) -> None:
    job, run = submit(*LONG, *FOUR, "launcher=slurm", "launcher.restarts=0", cwd=shared_tmp)
    running(run)
    second = command("resume", job, cwd=shared_tmp)
    assert second.returncode == 2 and f"job {job} of this run is RUNNING" in second.stderr

    slurm("scontrol", "requeue", job)  # the ranks get SIGTERM and save
    wait_until(lambda: slurm("squeue", "-h", "-j", job, "-o", "%T") == "PENDING", 60, "the requeue")
    stopped = events(run, "saved")[-1]["step"]
    wait_until(lambda: not subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"]).returncode, 30, "go")
    running(run, started=2)
    assert events(run, "resumed")[-1]["step"] == stopped

    slurm("scancel", "--signal=USR2", job)  # as Slurm sends it before the time limit
    assert wait_for_job(job) == "FAILED"  # not COMPLETED: it has more to do
    step = events(run, "saved")[-1]["step"]
    assert step > stopped

    files = {path.name: path.read_text() for path in run.iterdir() if path.suffix in (".yaml", ".sh", ".json")}
    refused = command("resume", job, "launcher.partition=nope", cwd=shared_tmp)
    assert refused.returncode == 2 and refused.stderr.startswith("error: launcher.partition=nope: ")
    assert {path.name: path.read_text() for path in run.iterdir() if path.suffix in (".yaml", ".sh", ".json")} == files

    limit = f"train.max_steps={step + 20}"
    done = command("resume", job, limit, "launcher.tasks_per_node=1", cwd=shared_tmp)
    assert done.returncode == 0, done.stderr
    ended(done.stdout.split()[1], run)
    assert events(run, "done")[-1]["steps"] == step + 20
    assert sorted(losses(run)) == list(range(1, step + 21))

    config = (run / "config.yaml").read_text()
    again = command("evaluate", str(run), "train.eval_batch_size=500", cwd=shared_tmp)
    assert again.returncode == 0, again.stderr
    ended(again.stdout.split()[1], run)
    assert events(run, "evaluated")[-1]["test_accuracy"] == events(run, "done")[-1]["test_accuracy"]
    assert (run / "config.yaml").read_text() == config


def test_a_job_submitted_from_inside_a_job(shared_tmp: Path) -> None:
    inner = [sys.executable, "-m", "slurm_train", *SHORT, "launcher=slurm", *FOUR, "run.dir=inner"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    words = ["srun", "-N1", "-n1", "--cpu-bind=none", *inner]
    done = subprocess.run(words, cwd=shared_tmp, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    job = next(line for line in done.stdout.splitlines() if line.startswith("job ")).split()[1]
    ended(job, shared_tmp / "inner")
    assert events(shared_tmp / "inner", "started")[0]["world_size"] == 4


def test_a_sweep_is_a_job_a_point(shared_tmp: Path) -> None:
    words: Sequence[str] = ("-m", *SHORT, "train.max_steps=2", "optim.lr=1e-3,1e-2", "launcher=slurm", "run.name=s")
    done = command(*words, cwd=shared_tmp)
    assert done.returncode == 0, done.stderr
    jobs = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("job ")]
    for number, job in enumerate(jobs):
        ended(job, shared_tmp / "runs" / "fmnist" / f"s_{number}")
    assert len(jobs) == 2
