"""What a checkpoint costs the training loop, written by itself or in the background, and what a restart costs.

    python benchmarks/saving.py [--model lm_small] [--ranks 2] [--rounds 3] [--json FILE]

Trains the language model with a save every few steps, once each way, and once without, in turns. "held" is how long the
loop stood still in a save, as the run's `saved` events tell; "slower" is what the run's training took longer than
without saves, a save, which also counts what the writing takes from the steps beside it. "first step" is the time from
the command to the first new step: of a fresh start, and of a resume of the same run from a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from throughput import markdown, run, scratch

WAYS = ("no saves", "synchronous", "background")
STEPS = 60
EVERY = 20


def command(model: str, ranks: int, folder: Path, *words: str) -> list[str]:
    """A run of the benchmark."""
    typed = [sys.executable, "-m", "slurm_train", "+experiment=lm", f"model={model}", f"run.dir={folder / 'run'}"]
    typed += [f"launcher.tasks_per_node={ranks}", "train.threads=1", "train.batch_size=8", "data.length=64"]
    typed += [f"train.max_steps={STEPS}", "train.validation=0", "data.test=0.0001", "train.log_seconds=0.2"]
    return [*typed, *words]


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    """Lines of a file of the run."""
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def measure(model: str, ranks: int, way: str, folder: Path) -> dict[str, float]:
    """Seconds: of training, held by the saves in the middle, from the command to the first step and, resumed, again."""
    saves = [] if way == "no saves" else [f"train.save_steps={EVERY}"]
    since = time.time()
    run(command(model, ranks, folder, *saves, f"train.async_save={str(way == 'background').lower()}"))
    events = records(folder, "events.jsonl")
    held = [event["held"] for event in events if event["event"] == "saved" and event["step"] < STEPS]
    losses = [record["time"] for record in records(folder, "metrics.jsonl") if "loss" in record]
    resumed = time.time()
    run([sys.executable, "-m", "slurm_train", "resume", str(folder / "run"), f"train.max_steps={STEPS + 4}"])
    again = [record["time"] for record in records(folder, "metrics.jsonl") if record["step"] > STEPS]
    return {
        "training": next(event["seconds"] for event in events if event["event"] == "done"),
        "held": sum(held) / max(len(held), 1),
        "first step": losses[0] - since,
        "first step resumed": again[0] - resumed,
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lm_small")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as parent:
        for _ in range(options.rounds):
            for way in WAYS:
                with scratch(Path(parent)) as folder:
                    found[way].append(measure(options.model, options.ranks, way, folder))
    middle = {way: {name: median(row[name] for row in rows) for name in rows[0]} for way, rows in found.items()}
    saves = STEPS // EVERY - 1
    for way in WAYS:
        middle[way]["slower"] = (middle[way]["training"] - middle["no saves"]["training"]) / saves
    names = ("training", "held", "slower", "first step", "first step resumed")
    rows = [[way, *(f"{middle[way][name]:.3f}" for name in names)] for way in WAYS]
    print(markdown([["seconds", *names], *rows]))
    share = middle["background"]["held"] / middle["synchronous"]["held"]
    resumed = median(middle[way]["first step resumed"] / middle[way]["first step"] for way in WAYS)
    print(f"held in the background / synchronous: {share:.3f}   first step resumed / fresh: {resumed:.2f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
