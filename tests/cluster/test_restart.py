"""Runs that lose their job, on a real cluster: each goes on by itself to the weights of one that was left alone."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.cluster.jobs import job_state, slurm, wait_for_job, wait_until
from tests.cluster.test_launcher import SAMPLE, command, ended, events, printed, submit
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


def at_once(job: str) -> None:
    """Let a requeued job start without the wait that Slurm imposes."""
    wait_until(lambda: job_state(job) == "PENDING", 60, f"the requeue of {job}")
    wait_until(
        lambda: (
            job_state(job) != "PENDING"
            or not subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"]).returncode
        ),
        30,
        f"the start of {job}",
    )


@pytest.fixture(scope="module")
def left_alone(shared_root: Path) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing has happened to."""
    work = shared_root / "alone"
    work.mkdir()
    job, run = start(work, pause=0)
    ended(job, run)
    return weights(run)


def same(run: Path, expected: dict[str, torch.Tensor]) -> None:
    """The run has done each step once, to the last bit as one that was left alone."""
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    found = weights(run)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def no_step_again(run: Path) -> None:
    """Each start went on at the very step at which the one before has stopped."""
    assert [event["step"] for event in events(run, "resumed")] == [event["step"] for event in events(run, "stopped")]


@pytest.mark.parametrize("partition", ["scavenge", "spot"])
def test_preempted(partition: str, shared_tmp: Path, left_alone: dict[str, torch.Tensor]) -> None:
    """Slurm requeues what it preempts in `scavenge`, and kills it in `spot`."""
    job, run = start(shared_tmp, f"launcher.partition={partition}")
    stepped(run)
    slurm("sbatch", "-pdebug", "-N4", "--exclusive", "-t1", "--wrap=sleep 1", "-o/dev/null", cwd=shared_tmp)
    at_once(job)
    ended(job, run, 120)
    assert [event["why"] for event in events(run, "requeued")] == ["preempted"]
    no_step_again(run)
    same(run, left_alone)


def test_near_its_time_limit(shared_tmp: Path, left_alone: dict[str, torch.Tensor]) -> None:
    """The signal comes up to a minute early: with the shortest limit, in the first steps."""
    job, run = start(shared_tmp, "launcher.time=1", "launcher.signal_seconds=20", pause=0.4)
    ended(job, run, 240)
    assert {event["why"] for event in events(run, "requeued")} == {"near its time limit"}
    no_step_again(run)
    same(run, left_alone)


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
    no_step_again(run)
    same(run, left_alone)


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
    no_step_again(run)
    same(run, left_alone)


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(
    shared_tmp: Path, left_alone: dict[str, torch.Tensor]
) -> None:
    words = ("launcher.env.FAILS_AT='50'", f"launcher.env.MARK={shared_tmp}/killed", "train.save_steps=20")
    job, run = start(shared_tmp, *words, pause=0.05)
    at_once(job)
    ended(job, run, 120)
    assert [event["why"] for event in events(run, "requeued")] == ["failed"]
    assert [event["step"] for event in events(run, "resumed")] == [47]  # the end of the first epoch
    same(run, left_alone)


def test_what_fails_twice_from_one_checkpoint_ends(shared_tmp: Path) -> None:
    words = ("launcher.env.FAILS_AT='30'", f"launcher.env.MARK={shared_tmp}/killed", "launcher.env.ALWAYS='1'")
    job, run = start(shared_tmp, *words, pause=0.05)
    at_once(job)
    assert wait_for_job(job, 150) == "FAILED"
    assert len(events(run, "requeued")) == 1
    told = "not started again: it has failed twice without a checkpoint; train.save_steps saves more often"
    assert told in (run / "logs" / f"{job}_batch.log").read_text()
