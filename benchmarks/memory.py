"""Peak memory of a rank under each layout, beside what `plan` says it needs.

    python benchmarks/memory.py [--model lm_1b] [--length 32] [--only single-1,fsdp-2,...] [--json FILE]

Trains two steps of AdamW in fp32 through the real entry and takes the peak of each rank's process from the run's
`done` event. The head is not tied to the embedding, for pipelines refuse that. What the interpreter and its libraries
take is measured under the same layout with a tiny model, and taken off. The largest of the ranks counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from throughput import Failed, markdown, run, scratch

LAYOUTS = ("single-1", "fsdp-2", "fsdp-4", "tp-2", "tp-4", "pp-2", "pp-4", "fsdp_tp-4")
GIB = 2**30
MICRO_BATCHES = 4


def measure(model: str, length: int, layout: str, folder: Path) -> tuple[int, dict[str, int]]:
    """Bytes at the peak of the rank that needed most, and the terms of the plan's estimate."""
    name, ranks = layout.split("-")
    directory = folder / "run"
    text = folder / "text.txt"
    text.write_text("To be trained on, for a step or two.\n" * 200)
    command = [sys.executable, "-m", "slurm_train", "+experiment=lm", f"model={model}", f"parallel={name}"]
    command += [f"launcher.tasks_per_node={ranks}", f"run.dir={directory}", f"data.path={text}"]
    command += [f"data.length={length}", f"train.batch_size={MICRO_BATCHES}", "train.eval_batch_size=1"]
    command += ["train.validation=0", "train.max_steps=2", "train.loop._target_=benchmarks.few_steps.few_steps"]
    command += ["train.threads=1", "model.tied=false"]
    run(command)
    events = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    peaks = next(event["peak_memory"] for event in events if event["event"] == "done")
    return max(peaks), json.loads((directory / "plan.json").read_text())["costs"]["memory"]


def rows(layouts: list[str], model: str, length: int) -> list[dict[str, Any]]:
    """One measurement a layout, in bytes; a layout that fails is told of, and left out."""
    found = []
    with tempfile.TemporaryDirectory() as parent:
        for layout in layouts:
            try:
                with scratch(Path(parent)) as folder:
                    base, _ = measure("lm_tiny", length, layout, folder)
                with scratch(Path(parent)) as folder:
                    peak, terms = measure(model, length, layout, folder)
            except Failed as error:  # as when this machine has too little memory for it
                print(f"{layout}: {error}", file=sys.stderr)
                continue
            found.append({"layout": layout, "base": base, "used": peak - base, "terms": terms})
            print(f"{layout}: {(peak - base) / GIB:.2f} GiB", file=sys.stderr)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """A Markdown table in GiB."""
    kinds = ["weights", "gathered", "gradients", "optimizer", "activations"]
    head = ["layout, ranks", *kinds, "plan", "used", "used/plan"]
    lines = []
    for row in found:
        terms = row["terms"]
        planned = sum(terms.values())
        sizes = [terms[name] for name in kinds] + [planned, row["used"]]
        ratio = f"{row['used'] / planned:.2f}"
        lines.append([row["layout"].replace("-", ", "), *(f"{size / GIB:.2f}" for size in sizes), ratio])
    return markdown([head, *lines])


def main() -> None:
    """Measure, print the table, and keep every number if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lm_1b", help="a config of conf/model (default lm_1b)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence (default 32)")
    parser.add_argument("--only", default=",".join(LAYOUTS), help="layouts, each with its number of ranks")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    options = parser.parse_args()
    found = rows(options.only.split(","), options.model, options.length)
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
