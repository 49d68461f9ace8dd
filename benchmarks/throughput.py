"""Training throughput of this project beside other tools, as a table of ratios.

    python benchmarks/throughput.py [--rounds 5] [--only mlp64,mlp256,cnn,ddp] [--json FILE]

Needs the `bench` extra. One thread per rank. Every measurement is a process of its own (see peers.py for how the
peers are set up); the measurements take turns, round after round, and the medians count. This project is measured
through its real entry, `python -m slurm_train +experiment=...`, with logging, progress, validation and checkpoints
on. Throughput is training samples per second over all ranks; start-up, validation and the first epoch do not count.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slurm_train.data.fashion_mnist import FashionMNIST

HERE = Path(__file__).parent
OURS = "slurm_train"
LONGEST_SECONDS = 300  # for one measurement; they take about ten
TITLES = {
    OURS: "slurm_train",
    "lightning": "Lightning",
    "accelerate": "accelerate",
    "per_item": "DataLoader, per item",
    "tensor_dataset": "DataLoader, TensorDataset",
    "limit": "one fixed batch (limit)",
}


@dataclass(frozen=True)
class Work:
    """One line of the table: what is trained, and beside whom.

    Attributes:
        samples: how many of the training images are used.
        epochs: how many epochs this project runs; a few seconds beyond the first one.
        batch: samples per step over all ranks.
    """

    title: str
    model: str
    experiment: str
    batch: int
    samples: int
    epochs: int
    ranks: int = 1
    peers: tuple[str, ...] = ("lightning", "accelerate", "per_item", "tensor_dataset", "limit")


WORKS = {
    "mlp64": Work("MLP 784-512-10, batch 64", "mlp", "fmnist", 64, 60_000, 6),
    "mlp256": Work("MLP 784-512-10, batch 256", "mlp", "fmnist", 256, 60_000, 8),
    "cnn": Work("CNN 16/32, batch 64", "cnn", "fmnist_cnn", 64, 6_000, 4),
    "ddp": Work(
        "MLP 784-512-10, 2 DDP ranks, batch 256",
        "mlp",
        "fmnist",
        256,
        60_000,
        5,
        ranks=2,
        peers=("lightning", "accelerate", "per_item", "tensor_dataset"),
    ),
}


class Failed(RuntimeError):
    """A measurement ended with an error."""


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write a uint8 array as a gzipped idx file."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes(), compresslevel=1))


def write_data(folder: Path, samples: int) -> Path:
    """A directory of Fashion-MNIST with the first `samples` training images, as far as there are so many."""
    root = folder / f"fashion-mnist-{samples}"
    if not root.exists():
        root.mkdir()
        for split, prefix, count in (("train", "train", samples), ("test", "t10k", 1000)):
            data = FashionMNIST(split, download=False)
            write_idx(root / f"{prefix}-images-idx3-ubyte.gz", data.inputs[:count, 0].numpy())
            write_idx(root / f"{prefix}-labels-idx1-ubyte.gz", data.targets[:count].numpy().astype(np.uint8))
    return root


def run(command: list[str]) -> None:
    """Run a measurement with one thread per process.

    Raises:
        Failed: with the end of its output.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    try:
        subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
            timeout=LONGEST_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        raise Failed(f"exit code {error.returncode} of {' '.join(command)}\n{error.stdout[-3000:]}") from None
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {LONGEST_SECONDS} s: {' '.join(command)}") from None


def measure_ours(work: Work, root: Path, folder: Path) -> float:
    """Samples per second of this project: the median of its epochs but the first."""
    run_directory = folder / "run"
    command = [sys.executable, "-m", "slurm_train", f"+experiment={work.experiment}", f"run.dir={run_directory}"]
    command += [f"data.root={root}", f"train.batch_size={work.batch}", f"train.epochs={work.epochs}", "train.threads=1"]
    if work.ranks > 1:
        command += ["parallel=ddp", f"launcher.tasks_per_node={work.ranks}"]
    run(command)
    events = [json.loads(line) for line in (run_directory / "events.jsonl").read_text().splitlines()]
    return statistics.median([event["samples_per_s"] for event in events if event["event"] == "epoch"][1:])


def measure_peer(peer: str, work: Work, root: Path, folder: Path, seconds: float) -> float:
    """Samples per second of another tool."""
    out = folder / "result"
    start = [sys.executable]
    if work.ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={work.ranks}"]
    batch = work.batch // work.ranks
    run([*start, str(HERE / "peers.py"), peer, work.model, str(batch), str(root), str(seconds), str(out)])
    return float(out.read_text())


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A fresh directory for one measurement."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


def measure(works: list[Work], rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Samples per second by work and tool, one number a round; the tools take turns."""
    measured: dict[str, dict[str, list[float]]] = {work.title: {} for work in works}
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            for work in works:
                root = write_data(Path(name), work.samples)
                for tool in (OURS, *work.peers):
                    with scratch(Path(name)) as folder:
                        if tool == OURS:
                            rate = measure_ours(work, root, folder)
                        else:
                            rate = measure_peer(tool, work, root, folder, seconds)
                    measured[work.title].setdefault(tool, []).append(rate)
                    print(f"round {number + 1}/{rounds}  {work.title}  {TITLES[tool]}: {rate:,.0f}", file=sys.stderr)
    return measured


def tables(measured: dict[str, dict[str, list[float]]]) -> str:
    """Two Markdown tables: medians in samples per second, and this project over each tool."""
    tools = [tool for tool in TITLES if any(tool in rates for rates in measured.values())]
    medians = {
        title: {tool: statistics.median(values) for tool, values in rates.items()} for title, rates in measured.items()
    }
    rates = [["samples/s", *(TITLES[tool] for tool in tools)]]
    ratios = [["slurm_train over", *(TITLES[tool] for tool in tools if tool != OURS)]]
    for title, row in medians.items():
        rates.append([title, *(f"{row[tool]:,.0f}" if tool in row else "" for tool in tools)])
        others = [tool for tool in tools if tool != OURS]
        ratios.append([title, *(f"{row[OURS] / row[tool]:.2f}" if tool in row else "" for tool in others)])
    return f"{markdown(rates)}\n\n{markdown(ratios)}"


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is the head."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|---" + "|---:" * (len(rows[0]) - 1) + "|"
    return "\n".join([head, rule, *body])


def main() -> None:
    """Measure, print the tables, and keep every number if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind (default 5)")
    parser.add_argument("--only", default=",".join(WORKS), help=f"which of {','.join(WORKS)} (default all)")
    parser.add_argument("--seconds", type=float, default=2.5, help="least seconds to measure a peer (default 2.5)")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(WORKS):
        parser.error(f"--only: {', '.join(sorted(unknown))}; take of {','.join(WORKS)}")
    measured = measure([WORKS[name] for name in names], options.rounds, options.seconds)
    print(tables(measured))
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
