"""A plan as text, for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slurm_train.launch.plan import LaunchPlan
from slurm_train.models.layers import SHARDED_SIZE, pattern
from slurm_train.report.summary import bytes_text, duration

SHOWN_RANKS = 16
"""Larger worlds are shown by their first and last ranks."""


def show(plan: LaunchPlan) -> str:
    """The plan, a line or a table for each thing that it settles."""
    rows = [*_run(plan), *_geometry(plan), *_resources(plan), *_work(plan)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    lines += ["", *_ranks(plan)]
    if plan.costs:
        lines += ["", "costs of a step, estimated", *_costs(plan, plan.costs)]
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
    whole = plan.epochs * (plan.steps_per_epoch or 0)
    ends = "" if plan.total_steps in (None, whole) else f", ends after {plan.total_steps:,} steps (train.max_steps)"
    yield "epochs", f"{plan.epochs}{steps}{ends}"


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


def _costs(plan: LaunchPlan, costs: Mapping[str, Any]) -> Iterable[str]:
    """Memory and communication are those of the rank that needs most."""
    rows = []
    held = costs["rank_parameters"]
    if held is not None:
        rows.append(["parameters", f"{held:,} a rank, of {costs['parameters']:,}"])
    if costs["micro_batches"] > 1:
        idle = f", a rank waits {costs['idle']:.0%} of the time" if plan.grid["pp"] > 1 else ""
        rows.append(["micro-batches", f"{costs['micro_batches']} of {costs['micro_batch']} samples{idle}"])
    rows.append(["arithmetic", f"{costs['flops']:.3g} FLOPs over all ranks"])
    if costs["memory"]:
        known = {kind: size for kind, size in costs["memory"].items() if size}
        unknown = "".join(f", {kind} not known" for kind, size in costs["memory"].items() if size is None)
        terms = " + ".join(f"{kind} {bytes_text(size)}" for kind, size in known.items())
        rows.append(["memory", f"{bytes_text(sum(known.values()))} a rank{unknown}:"])
        rows.append(["", terms])
        if costs["offload"]:
            rows.append(["", "of these weights, gradients and optimizer in the host's memory"])
    for axis, size in costs["traffic"].items():
        rows.append([f"along {axis}", f"{bytes_text(size)} sent a rank"])
    return _table(rows)


def _layers(plan: LaunchPlan) -> Iterable[str]:
    """One row for all blocks where a layer is alike in each."""
    tp = plan.grid["tp"]
    alike: dict[tuple[str, ...], list[str]] = {}
    for layer in plan.layers:
        sizes = {side: layer[side] for side in ("in_features", "out_features")}
        divided = SHARDED_SIZE.get(layer["style"])
        held = {side: size // tp if side == divided else size for side, size in sizes.items()}
        row = tuple(" x ".join(map(str, pair.values())) for pair in (sizes, held))
        alike.setdefault((pattern(layer["name"]), row[0], layer["style"], row[1]), []).append(layer["name"])
    rows = [["layer", "in x out", "style", "a rank holds"]]
    for (common, size, style, held_size), names in alike.items():
        name = names[0] if len(names) == 1 else f"{common} ({len(names)})"
        rows.append([name, size, style, held_size])
    return _table(rows)


def _table(rows: list[list[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
