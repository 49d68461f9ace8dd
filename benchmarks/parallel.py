"""Training on several ranks beside hand-written loops and Lightning, and this project's own CPU time by world size.

    python benchmarks/parallel.py [--rounds 5] [--only ddp-2,fsdp-4,...] [--epochs 4] [--json FILE]
    python benchmarks/parallel.py --growth [--ranks 1,2,4,8,16] [--rounds 5] [--json FILE]

Needs the `bench` extra. One thread per rank, gloo. Every measurement is processes of its own; the tools take turns,
round after round, and the medians count. This project is measured through its real entry with logging, validation and
checkpoints on; see parallel_peers.py for how the others are set up. Throughput is training samples per second over all
ranks; start-up, validation and the first epoch do not count.

With --growth: what this project's own code costs a step and rank under DDP, the batch of a rank being constant: calls
of functions, and CPU time in microseconds. Many processes on few cores slow each other down, whatever they do; so a
world of 16 is compared to 8 worlds of 2 that run side by side, which are as many processes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from parallel_peers import BATCH, CLIP, DECAY, EVAL_BATCH, HELD_OUT, LENGTH, MODEL, RATE, STEPS, TEST
from throughput import HERE, OURS, markdown, run, scratch

ROWS = ("ddp-2", "ddp-4", "fsdp-2", "fsdp-4", "tp-2", "tp-4")
TITLES = {OURS: "slurm_train", "by_hand": "by hand", "lightning": "Lightning"}
WORLDS = (1, 2, 4, 8, 16)
PAIR = 2
ONE, PAIRS = "one world", "pairs"
WHO = ("rank 0", "others")
WARM_UP, COUNTED, CALLS = 10, 50, 10  # steps of a measurement of growth
RANK_BATCH, SHORT = 4, 32  # its sequences a rank and step, and their tokens
Measured = dict[str, dict[str, list[float]]]


def write_text(folder: Path, sequences: int, length: int) -> Path:
    """A text of so many sequences, always the same, and what is held for test beside them."""
    characters = round(sequences / (1 - TEST)) * length + 1
    path = folder / f"{characters}.txt"
    if not path.exists():
        path.write_text("".join(random.Random(0).choices(string.ascii_lowercase + " ", k=characters)))
    return path


def entry(layout: str, ranks: int, text: Path, folder: Path) -> list[str]:
    """The command of a run of this project."""
    command = [sys.executable, "-m", "slurm_train", "+experiment=lm", f"parallel={layout}", f"data.path={text}"]
    command += [f"launcher.tasks_per_node={ranks}", f"run.dir={folder / 'run'}", f"data.test={TEST}"]
    return [*command, "train.threads=1", "train.device=cpu", "train.schedule.name=constant", "train.schedule.warmup=0"]


def speed(tool: str, row: str, epochs: int, folder: Path) -> float:
    """Samples per second of a tool: the median of its epochs but the first."""
    layout, ranks = row.split("-")
    text = write_text(folder.parent, BATCH * STEPS + HELD_OUT, LENGTH)
    if tool != OURS:
        out = folder / "result"
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        run([*start, str(HERE / "parallel_peers.py"), tool, layout, str(text), str(epochs), str(out)])
        return float(out.read_text())
    command = entry(layout, int(ranks), text, folder)
    command += [f"model.{name}={value}" for name, value in MODEL.items()]
    command += [f"data.length={LENGTH}", f"train.batch_size={BATCH}", f"train.eval_batch_size={EVAL_BATCH}"]
    command += [f"train.validation={HELD_OUT}", f"train.epochs={epochs}", "train.max_steps=null"]
    command += [f"optim.lr={RATE}", f"optim.weight_decay={DECAY}", f"train.grad_clip={CLIP}"]
    run(command)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return statistics.median([event["samples_per_s"] for event in events if event["event"] == "epoch"][1:])


def own(ranks: int, processes: int, folder: Path) -> dict[str, float]:
    """This project's own CPU time in microseconds per step, and its calls, of rank 0 and of the others: medians.

    Args:
        ranks: of a world.
        processes: of all worlds of that size, side by side.
        folder: an empty directory.
    """
    batch, steps = RANK_BATCH * ranks, WARM_UP + COUNTED + CALLS
    text = write_text(folder.parent, batch * steps, SHORT)
    ends = ["model.width=64", "model.depth=2", f"data.length={SHORT}", f"train.batch_size={batch}"]
    ends += ["train.validation=0", f"train.max_steps={steps}", "train.start_timeout=240"]
    # By its clock the log would write once in so many seconds, and so more often the slower the steps.
    ends += ["train.log_seconds=1e-6", "train.loop._target_=benchmarks.own_time.train"]
    ends += [f"train.loop.folder={folder}", f"train.loop.warm_up={WARM_UP}", f"train.loop.counted={COUNTED}"]
    ends += [f"train.loop.processes={processes}"]
    commands = [[*entry("ddp", ranks, text, folder / str(world)), *ends] for world in range(processes // ranks)]
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(run, commands))
    figures = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    found = {}
    for who in WHO:
        wanted = [f for f in figures if (f["rank"] == 0) == (who == "rank 0")] or figures
        found[f"{who}, time"] = statistics.median(f["own"] * 1e6 for f in wanted)
        found[f"{who}, calls"] = statistics.median(f["calls"] for f in wanted)
    return found


def growth(processes: int, folder: Path) -> dict[str, float]:
    """The same in one world of so many ranks, and in as many processes in worlds of PAIR ranks."""
    figures = {}
    for world, ranks in ((ONE, processes), (PAIRS, min(processes, PAIR))):
        (folder / world).mkdir()
        figures |= {f"{name}, {world}": value for name, value in own(ranks, processes, folder / world).items()}
    return figures


def speed_table(measured: Measured) -> str:
    """Medians in samples per second, and this project over the others."""
    others = [tool for tool in TITLES if tool != OURS]
    head = ["samples/s", *TITLES.values(), *(f"over {TITLES[tool]}" for tool in others)]
    body = []
    for row, rates in measured.items():
        median = {tool: statistics.median(values) for tool, values in rates.items()}
        ratios = [f"{median[OURS] / median[tool]:.3f}" for tool in others]
        layout, ranks = row.split("-")
        body.append([f"{layout}, {ranks} ranks", *(f"{median[tool]:,.1f}" for tool in TITLES), *ratios])
    return markdown([head, *body])


def growth_table(measured: Measured) -> str:
    """Medians per step and rank, and how one world compares to pairs; one line a world size."""
    head, body = ["processes"], []
    for who in WHO:
        head += [f"{who}: calls", "µs", "µs in pairs", "ratio"]
    for processes, figures in measured.items():
        line: list[object] = [processes]
        for who in WHO:
            calls, world, pairs = (
                statistics.median(figures[f"{who}, {name}"])
                for name in (f"calls, {ONE}", f"time, {ONE}", f"time, {PAIRS}")
            )
            line += [f"{calls:,.0f}", f"{world:,.0f}", f"{pairs:,.0f}", f"{world / pairs:.2f}"]
        body.append(line)
    return markdown([head, *body])


def measure(
    rows: list[str], tools: list[str], rounds: int, one: Callable[[str, str, Path], dict[str, float]]
) -> Measured:
    """What `one` gives for each row and tool by name, a number a round; the tools take turns."""
    measured: Measured = {row: {} for row in rows}
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            for row in rows:
                for tool in tools:
                    with scratch(Path(name)) as folder:
                        figures = one(tool, row, folder)
                    for key, value in figures.items():
                        measured[row].setdefault(key, []).append(value)
                        print(f"round {number + 1}/{rounds}  {row}  {key}: {value:,.1f}", file=sys.stderr)
    return measured


def main() -> None:
    """Measure, print a table, and keep every number if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growth", action="store_true", help="own CPU time by world size, instead of throughput")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind (default 5)")
    parser.add_argument("--only", default=",".join(ROWS), help=f"which of {','.join(ROWS)} (default all)")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of each, the first uncounted (default 4)")
    parser.add_argument("--ranks", default=",".join(map(str, WORLDS)), help="world sizes of --growth (default all)")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    options = parser.parse_args()
    rows = (options.ranks if options.growth else options.only).split(",")
    if unknown := set() if options.growth else set(rows) - set(ROWS):
        parser.error(f"--only: {', '.join(sorted(unknown))}; take of {','.join(ROWS)}")
    if options.epochs < 2:
        parser.error("--epochs: the first one is not counted, so take at least 2")
    if options.growth:
        measured = measure(rows, [OURS], options.rounds, lambda _, row, folder: growth(int(row), folder))
        print(growth_table(measured))
    else:
        tools = list(TITLES)
        measured = measure(
            rows, tools, options.rounds, lambda tool, row, folder: {tool: speed(tool, row, options.epochs, folder)}
        )
        print(speed_table(measured))
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
