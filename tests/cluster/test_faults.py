"""Faults that hit a run on a real cluster: it goes on by itself to the weights of one that was left alone.

python -m pytest tests/cluster/test_faults.py -k preempted
python -m pytest tests/cluster/test_faults.py -k network
"""

from __future__ import annotations

import json
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.cluster.jobs import AS_ROOT, Cluster, slurm, wait_for_job, wait_until
from tests.cluster.test_launcher import SAMPLE, command, ended, events, printed, submit
from tests.faults.table import BITWISE, CLEAR, note
from tests.integration.runs import losses, weights

STEPS = 120
RUN = (
    "+experiment=fmnist",
    SAMPLE,
    "parallel=ddp",
    "launcher=slurm",
    "launcher.nodes=2",
    "train.batch_size=256",
    f"train.max_steps={STEPS}",
    "train.validation=0",
    "train.log_seconds=0.1",
    "launcher.time=5",
    "+train.callbacks.slow._target_=slow.Slow",
)
SLOW = """
import os, time
class Slow:
    def on_step(self, context):
        time.sleep(float(os.environ["PAUSE"]))
        if context.position.step == int(os.environ.get("FAILS_AT", 0)) and context.world.info.rank == 1:
            mark = os.environ["MARK"]
            if not os.path.exists(mark) or os.environ.get("ALWAYS"):
                open(mark, "w").close()
                if os.environ.get("MEMORY"):
                    self.block = bytearray(int(os.environ["MEMORY"])).replace(b"\\0", b"1")
                os.kill(os.getpid(), 9)
"""


def start(cwd: Path, *words: str, pause: float = 0.1) -> tuple[str, Path]:
    """Submit a run whose steps take a while."""
    (cwd / "slow.py").write_text(SLOW)
    return submit(*RUN, f"launcher.env.PAUSE='{pause}'", *words, cwd=cwd)


def stepped(run: Path, step: int = 10) -> None:
    """Wait until a run is at a step."""
    path = run / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_text().count('"loss"') >= step, 120, f"step {step}\n{printed(run)}")


@pytest.fixture(scope="module")
def left_alone(shared_root: Path) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing has happened to."""
    work = shared_root / "alone"
    work.mkdir()
    job, run = start(work, pause=0)
    ended(job, run)
    return weights(run)


def same(fault: str, run: Path, expected: dict[str, torch.Tensor], lost: int | None = None) -> None:
    """The run has done each step once, to the last bit as one that was left alone. Notes the fault."""
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    found = weights(run)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    began, steps = events(run, "started")[-1], (run / "metrics.jsonl").read_text().splitlines()
    first = min(record["time"] for record in map(json.loads, steps) if record["step"] > began["step"])
    stopped, resumed = events(run, "stopped"), events(run, "resumed")
    if lost is None:  # each start went on at the very step at which the one before has stopped
        assert [event["step"] for event in resumed] == [event["step"] for event in stopped]
    note(fault, BITWISE, lost or 0, first - (events(run, "requeued") or events(run, "submitted"))[-1]["time"])


@pytest.mark.parametrize("partition", ["scavenge", "spot"])
def test_preempted(partition: str, shared_tmp: Path, left_alone: dict[str, torch.Tensor]) -> None:
    """Slurm requeues what it preempts in `scavenge`, and kills it in `spot`."""
    job, run = start(shared_tmp, f"launcher.partition={partition}")
    stepped(run)
    slurm("sbatch", "-pdebug", "-N4", "--exclusive", "-t1", "--wrap=sleep 1", "-o/dev/null", cwd=shared_tmp)
    ended(job, run, 120)
    assert [event["why"] for event in events(run, "requeued")] == ["preempted"]
    same(f"Slurm: preempted ({partition})", run, left_alone)


def test_near_its_time_limit(shared_tmp: Path, left_alone: dict[str, torch.Tensor]) -> None:
    """The signal comes up to a minute early: with the shortest limit, in the first steps."""
    job, run = start(shared_tmp, "launcher.time=1", "launcher.signal_seconds=20", pause=0.4)
    ended(job, run, 240)
    assert {event["why"] for event in events(run, "requeued")} == {"near its time limit"}
    same("Slurm: time limit", run, left_alone)


def test_a_job_that_may_not_be_requeued_is_followed_by_another(
    shared_tmp: Path, left_alone: dict[str, torch.Tensor]
) -> None:
    job, run = start(shared_tmp)
    stepped(run)
    slurm("scontrol", "update", f"jobid={job}", "requeue=0")
    slurm("scancel", "--signal=USR2", job)
    assert wait_for_job(job, 60) == "FAILED"
    submitted = events(run, "submitted")
    assert [event.get("after") for event in submitted] == [None, job]
    ended(submitted[1]["job"], run, 120)
    same("Slurm: time limit, and the job may not be requeued", run, left_alone)


def test_cancelled_it_ends_and_goes_on_when_asked(shared_tmp: Path, left_alone: dict[str, torch.Tensor]) -> None:
    job, run = start(shared_tmp)
    stepped(run)
    done = command("cancel", job, cwd=shared_tmp)
    assert done.returncode == 0, done.stderr
    assert wait_for_job(job, 60) == "CANCELLED"
    assert events(run, "requeued") == []
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: command("resume", str(run), cwd=shared_tmp), range(2)))
    won, lost = sorted(both, key=lambda done: done.returncode)
    assert (won.returncode, lost.returncode) == (0, 2), both
    assert "of this run is" in lost.stderr or "by another resume" in lost.stderr
    ended(won.stdout.split()[1], run, 120)
    same("Slurm: cancelled, then resumed twice at a time", run, left_alone)


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(
    shared_tmp: Path, left_alone: dict[str, torch.Tensor]
) -> None:
    words = ("launcher.env.FAILS_AT='50'", f"launcher.env.MARK={shared_tmp}/killed", "train.save_steps=20")
    job, run = start(shared_tmp, *words, pause=0.05)
    ended(job, run, 120)
    assert [event["why"] for event in events(run, "requeued")] == ["failed"]
    assert [event["step"] for event in events(run, "resumed")] == [47]  # the end of the first epoch
    same("Slurm: rank 1 killed in a step", run, left_alone, lost=3)


def test_what_fails_twice_from_one_checkpoint_ends(shared_tmp: Path) -> None:
    words = ("launcher.env.FAILS_AT='30'", f"launcher.env.MARK={shared_tmp}/killed", "launcher.env.ALWAYS='1'")
    job, run = start(shared_tmp, *words, pause=0.05)
    assert wait_for_job(job, 150) == "FAILED"
    assert len(events(run, "requeued")) == 1
    told = "not started again: it has failed twice without a checkpoint; train.save_steps saves more often"
    assert told in (run / "logs" / f"{job}_batch.log").read_text()
    note("Slurm: a rank killed at the same step in each start", CLEAR)


@pytest.mark.slow
def test_a_node_off_the_network(shared_tmp: Path, own_cluster: Cluster, left_alone: dict[str, torch.Tensor]) -> None:
    """Its task lives on, and must write nothing beside the restarted job."""
    job, run = start(shared_tmp, "train.save_steps=10", pause=0.2)
    stepped(run, 25)
    node = slurm("squeue", "-h", "-j", job, "-o", "%N").replace("[", "").rstrip("]")[-1]
    assert own_cluster.call("cut", f"n{node}").returncode == 0
    try:
        wait_until(lambda: len(events(run, "started")) > 1, 150, f"the second start\n{printed(run)}")
        ended(job, run, 200)
    finally:
        assert own_cluster.call("mend", f"n{node}").returncode == 0
    again = 120 - events(run, "resumed")[-1]["step"]
    assert again > 0
    assert sorted(path.name for path in (run / "claims").iterdir()) == ["0001", "0002"]
    same("Slurm: a node off the network", run, left_alone, lost=10)


@pytest.mark.slow
def test_the_controller_restarts(shared_tmp: Path, own_cluster: Cluster, left_alone: dict[str, torch.Tensor]) -> None:
    job, run = start(shared_tmp, pause=0.2)
    stepped(run)
    assert own_cluster.directory is not None
    pid = (own_cluster.directory / "run" / "slurmctld.pid").read_text().strip()
    subprocess.run([*AS_ROOT, "kill", f"-{signal.SIGKILL.value}", pid], check=True)
    assert own_cluster.call("up").returncode == 0
    slurm("scancel", "--signal=USR2", job)
    ended(job, run, 200)
    same("Slurm: slurmctld killed and restarted, then time limit", run, left_alone)


@pytest.mark.slow
def test_out_of_memory(shared_tmp: Path, limits: None, left_alone: dict[str, torch.Tensor]) -> None:
    words = ("launcher.env.FAILS_AT='30'", f"launcher.env.MARK={shared_tmp}/killed", "launcher.env.MEMORY='3000000000'")
    job, run = start(shared_tmp, *words, "launcher.mem=1500M", "train.save_steps=20", pause=0.05)
    ended(job, run, 150)
    assert [event["why"] for event in events(run, "requeued")] == ["failed"]
    same("Slurm: rank 1 out of memory", run, left_alone, lost=10)


@pytest.mark.slow
def test_all_ranks_killed(shared_tmp: Path, left_alone: dict[str, torch.Tensor]) -> None:
    job, run = start(shared_tmp, "train.save_steps=10")
    stepped(run, 25)
    slurm("scancel", "--signal=KILL", f"{job}.0")
    ended(job, run, 150)
    same("Slurm: all ranks killed", run, left_alone, lost=10)
