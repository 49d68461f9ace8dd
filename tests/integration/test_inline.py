"""Being one rank of a world that torch's own launchers start, as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import SAMPLE, losses, run_on_rank

ROOT = Path(__file__).parents[2]
RUN = ["+experiment=fmnist", SAMPLE, "train.max_steps=5", "train.epochs=1"]
STARTERS = {
    "torchrun": ["torch.distributed.run", "--standalone"],
    "launch": ["torch.distributed.launch"],
    "launch --use-env": ["torch.distributed.launch", "--use-env"],
}


def start(launcher, words, ranks=2, **variables):
    """Start the module under a launcher of torch; what it printed and its exit code."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        *launcher,
        f"--nproc-per-node={ranks}",
        "-m",
        "slurm_train",
        *words,
    ]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)


@pytest.mark.parametrize("name", STARTERS)
def test_torchs_launchers_start_it_as_it_is(tmp_path, name):
    done = start(STARTERS[name], [*RUN, f"run.dir={tmp_path / 'run'}"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum("test accuracy" in line for line in lines) == 1
    assert lines[-2:] == ["run directory:", str(tmp_path / "run")]
    started = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["world_size"] for event in started if event["event"] == "started"] == [2]
    run_on_rank(RUN, str(tmp_path / "alone"))
    alone, together = losses(tmp_path / "alone"), losses(tmp_path / "run")
    assert all(abs(together[step] - alone[step]) <= 1e-4 * alone[step] for step in alone)


def test_a_fault_of_the_users_is_told_once(tmp_path):
    done = start(STARTERS["torchrun"], [*RUN, "train.batch_size=63", f"run.dir={tmp_path / 'run'}"])
    assert done.returncode != 0
    assert done.stderr.count("error: train.batch_size=63: the global batch is not divisible by the 2 data ranks") == 1
    assert not (tmp_path / "run").exists()


def test_a_fault_is_told_by_a_slower_rank_0_too(tmp_path):
    late = "import os, time\ntime.sleep(3 if os.environ.get('RANK') == '0' else 0)\n"
    (tmp_path / "sitecustomize.py").write_text(late)
    done = start(STARTERS["torchrun"], [*RUN, "train.batch_size=63"], PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert done.stderr.count("error: train.batch_size=63") == 1


def test_the_local_launcher_is_refused_inside_torchrun(tmp_path):
    done = start(STARTERS["torchrun"], [*RUN, "launcher=local", f"run.dir={tmp_path / 'run'}"])
    assert done.returncode != 0
    assert "launcher=local: this process was started as rank 0 of 2" in done.stderr


def test_a_fault_of_the_second_rank_alone_is_told(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\nfrom torch import nn\n\n\ndef net():\n"
        "    if os.environ['RANK'] == '1':\n        raise ValueError('no room here')\n    return nn.Linear(1, 1)\n"
    )
    words = [*RUN, "model._target_=mine.net", f"run.dir={tmp_path / 'run'}"]
    done = start(STARTERS["torchrun"], words, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "rank 1 on " in done.stderr and "mine.net raised ValueError: no room here" in done.stderr
