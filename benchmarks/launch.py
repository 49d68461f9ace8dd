"""What a launch costs beside what one would write by hand, on a real Slurm cluster.

    python benchmarks/launch.py [--rounds 10] [--partition NAME] [--directory DIR]

Two figures, each as a ratio of medians of rounds that take turns:
- submission: seconds from the command to the accepted job, against a bare script that imports hydra and submitit,
  composes the same configuration and submits (its jobs are held and cancelled; nothing runs);
- first step: seconds from the accepted job to the end of rank 0's first optimizer step on 2 nodes x 2 ranks, against a
  hand-written torchrun script in a hand-written sbatch file, which reads the same images.
DIR is a directory that the nodes see; by default runs/launch below the working directory.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST_SECONDS = 300
RUN = ("+experiment=fmnist", "launcher=slurm", "launcher.nodes=2", "launcher.tasks_per_node=2", "parallel=ddp")

BARE = """
import sys
from hydra import compose, initialize_config_dir
import submitit

def train(config):
    return config

with initialize_config_dir(sys.argv[1], version_base=None):
    config = compose("config", ["+experiment=fmnist"])
executor = submitit.AutoExecutor(folder=sys.argv[2], cluster="slurm")
extra = {"hold": True, "requeue": True, **({"partition": sys.argv[3]} if sys.argv[3] else {})}
executor.update_parameters(nodes=2, tasks_per_node=2, timeout_min=10, slurm_additional_parameters=extra)
print("job", executor.submit(train, config).job_id)
"""

BY_HAND = """
import gzip, os, sys, time
import numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def read(name, header):
    with gzip.open(os.path.join(sys.argv[1], name)) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)

torch.set_num_threads(1)
dist.init_process_group("gloo")
images = torch.from_numpy(read("train-images-idx3-ubyte.gz", 16).copy()).view(-1, 784).float().div_(255)
classes = torch.from_numpy(read("train-labels-idx1-ubyte.gz", 8).copy()).long()
data = TensorDataset(images, classes)
model = DistributedDataParallel(nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for inputs, targets in DataLoader(data, batch_size=16, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    break
if dist.get_rank() == 0:
    open(sys.argv[2], "w").write(str(time.time()))
dist.barrier()
dist.destroy_process_group()
"""

BY_HAND_SBATCH = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --output={here}/by_hand.log
{partition}
srun --cpus-per-task=2 {python} -m torch.distributed.run --nnodes=2 --nproc-per-node=2 \\
  --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29511 --rdzv-id=$SLURM_JOB_ID {here}/by_hand.py {data} {mark}
"""

MARK = """
import os, time

class Mark:
    def on_step(self, context):
        if context.position.step == 1 and context.world.is_main:
            open(os.environ["MARK"], "w").write(str(time.time()))
"""


def main() -> None:
    """Measures and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--partition", default="")
    parser.add_argument("--directory", type=Path, default=Path("runs/launch"))
    arguments = parser.parse_args()
    here = arguments.directory.absolute() / str(os.getpid())
    here.mkdir(parents=True)
    (here / "bare.py").write_text(BARE)
    shutil.copytree(ROOT / "conf", here / "conf")
    config = here / "conf" / "config.yaml"
    # the bare script has no schema
    config.write_text(re.sub(r"^  - config_schema.*\n", "", config.read_text(), flags=re.MULTILINE))
    (here / "by_hand.py").write_text(BY_HAND)
    (here / "marking.py").write_text(MARK)
    os.chdir(here)
    own = [f"launcher.partition={arguments.partition}"] if arguments.partition else []
    compare(
        "submission",
        {
            "slurm_train": lambda: submission(ours(*own, "launcher.time=10", "launcher.sbatch.hold=true")),
            "bare hydra + submitit": lambda: submission(
                [sys.executable, "bare.py", str(here / "conf"), "logs", arguments.partition]
            ),
        },
        arguments.rounds,
    )
    data = data_root()
    compare(
        "first step",
        {
            "slurm_train": lambda: first_step(
                ours(
                    *own,
                    f"data.root={data}",
                    "launcher.cpus_per_task=1",
                    "train.max_steps=5",
                    "train.callbacks.mark._target_=marking.Mark",
                    f"launcher.env.MARK={here / 'mark'}",
                )
            ),
            "torchrun by hand": lambda: first_step(["sbatch", str(sbatch_file(here, data, arguments.partition))]),
        },
        max(3, arguments.rounds // 2),
    )


def ours(*words: str) -> list[str]:
    """The command line of this project."""
    return [sys.executable, "-m", "slurm_train", *RUN, *words]


def data_root() -> str:
    """Where this project finds the images."""
    sys.path.insert(0, str(ROOT))
    from slurm_train.data.sources import settle

    return settle(None, True)[0]


def sbatch_file(here: Path, data: str, partition: str) -> Path:
    """The hand-written job."""
    text = BY_HAND_SBATCH.format(
        here=here,
        python=shlex.quote(sys.executable),
        data=data,
        mark=here / "mark",
        partition=f"#SBATCH --partition={partition}" if partition else "",
    )
    (here / "by_hand.sbatch").write_text(text)
    return here / "by_hand.sbatch"


def submission(command: list[str]) -> float:
    """Seconds that the command takes; its job is cancelled."""
    began = time.perf_counter()
    job = submitted(command)
    seconds = time.perf_counter() - began
    subprocess.run(["scancel", job], check=True)
    return seconds


def first_step(command: list[str]) -> float:
    """Seconds from the accepted job to the mark that rank 0 leaves after its first step."""
    mark = Path("mark")
    mark.unlink(missing_ok=True)
    job = submitted(command)
    began = time.time()
    wait(lambda: mark.exists() and mark.read_text() != "", f"job {job} left no mark")
    seconds = float(mark.read_text()) - began
    wait(lambda: not queued(job), f"job {job} does not end")
    return seconds


def submitted(command: list[str]) -> str:
    """Run a command that submits a job; returns the job id."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    # Installed packages are compiled already; where this is set, a clone would be compiled at every start.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed: {done.stderr}")
    return next(word for word in done.stdout.split() if word.isdecimal())


def queued(job: str) -> bool:
    """Whether Slurm has not ended the job yet."""
    done = subprocess.run(["squeue", "--noheader", "--jobs", job], capture_output=True, text=True)
    return bool(done.stdout.strip())


def wait(done: Callable[[], bool], complaint: str) -> None:
    """Look twenty times a second until it is done."""
    end = time.monotonic() + LONGEST_SECONDS
    while not done():
        if time.monotonic() > end:
            sys.exit(f"{complaint} within {LONGEST_SECONDS} s; see {Path.cwd()}")
        time.sleep(0.05)


def compare(title: str, ways: dict[str, Callable[[], float]], rounds: int) -> None:
    """Measure the ways in turn and print their medians and the ratio to the last."""
    for measure in ways.values():  # files and caches are warm for all
        measure()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, measure in ways.items():
            seconds[name].append(measure())
    base = statistics.median(seconds[next(reversed(ways))])
    print(f"\n| {title}, s | median | fastest | slowest | ratio |\n|---|---:|---:|---:|---:|")
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        print(f"| {name} | {middle:.2f} | {min(taken):.2f} | {max(taken):.2f} | {middle / base:.2f} |", flush=True)


if __name__ == "__main__":
    main()
