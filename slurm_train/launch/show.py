"""A plan as text, for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from slurm_train.launch.plan import LaunchPlan
from slurm_train.report.summary import duration

SHOWN_RANKS = 16
"""Larger worlds are shown by their first and last ranks."""


def show(plan: LaunchPlan) -> str:
    """The plan, a line or a table for each thing that it settles."""
    rows = [*_run(plan), *_geometry(plan), *_resources(plan), *_work(plan)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    lines += ["", *_ranks(plan)]
    if plan.layers:
        lines += ["", "tensor-parallel layers", *_layers(plan)]
    if plan.warnings:
        lines += ["", *(f"note: {warning}" for warning in plan.warnings)]
    if plan.unchecked:
        lines += ["", "not checked:", *(f"  {note.replace('not checked: ', '')}" for note in plan.unchecked)]
    if plan.script:
        lines += ["", f"submission.sh, for {' '.join(['sbatch', *map(shlex.quote, plan.sbatch_words)])}:"]
        lines += ["", *(f"  {line}".rstrip() for line in plan.script.splitlines())]
    return "\n".join(lines)


def _run(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    yield "run", f"{plan.run_id}{' (goes on)' * plan.continues}"
    yield "run directory", f"{plan.run_dir}{'' if plan.continues else ' (not made yet)'}"
    yield "launcher", f"{plan.launcher} ({plan.launcher_reason})"


def _geometry(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    even = plan.nodes * plan.tasks_per_node == plan.world_size
    nodes = f"{plan.nodes} node{'s' * (plan.nodes != 1)}"
    yield "ranks", f"{nodes} x {plan.tasks_per_node} = {plan.world_size}" if even else f"{plan.world_size} on {nodes}"
    axes = " x ".join(f"{axis}={size}" for axis, size in plan.grid.items())
    yield "grid", f"{axes} = {plan.world_size}"
    yield "batch", f"{plan.batch_size} global / {plan.data_ranks} data ranks = {plan.local_batch} a rank"


def _resources(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    yield "threads", f"{plan.threads} a rank ({plan.threads_reason})"
    gpus = "" if plan.gpus_per_node is None else f", {plan.gpus_per_node} GPUs a node"
    gpus += "" if plan.gpus_per_task is None else f", {plan.gpus_per_task} GPUs a rank"
    yield "device", f"{plan.device}{gpus}"
    none = "the partition's" if plan.launcher == "slurm" else "none"
    yield "time limit", none if plan.time_seconds is None else duration(plan.time_seconds)
    if plan.environment:
        yield "environment", " ".join(f"{name}={value}" for name, value in plan.environment.items())


def _work(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    if plan.parameters is not None:
        yield "model", f"{plan.parameters:,} parameters"
    if plan.data is not None:
        samples = f"{plan.data['train_samples']:,} + {plan.data['test_samples']:,} samples"
        yield "data", f"{samples}, {plan.data['source']}"
    steps = "" if plan.steps_per_epoch is None else f" x {plan.steps_per_epoch:,} steps"
    yield "epochs", f"{plan.epochs}{steps}"


def _ranks(plan: LaunchPlan) -> Iterable[str]:
    axes = [axis for axis, size in plan.grid.items() if size > 1]
    rows = [["rank", "node", "local rank", *axes]]
    for place in plan.ranks:
        local = "?" if place.local_rank < 0 else str(place.local_rank)
        rows.append([str(place.rank), place.node, local, *(str(place.coordinates[axis]) for axis in axes)])
    if len(plan.ranks) > SHOWN_RANKS:
        half = SHOWN_RANKS // 2
        rows = [*rows[: half + 1], ["..."] * len(rows[0]), *rows[-half:]]
    return _table(rows)


def _layers(plan: LaunchPlan) -> Iterable[str]:
    tp = plan.grid["tp"]
    rows = [["layer", "in x out", "style", "a rank holds"]]
    for layer in plan.layers:
        size_in, size_out = layer["in_features"], layer["out_features"]
        shard = (size_in, size_out // tp) if layer["style"] == "colwise" else (size_in // tp, size_out)
        rows.append([layer["name"], f"{size_in} x {size_out}", layer["style"], f"{shard[0]} x {shard[1]}"])
    return _table(rows)


def _table(rows: list[list[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
