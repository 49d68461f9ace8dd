"""Whether a pipeline can be cut out of the model, and what each of its ranks holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from slurm_train.errors import Fault, UserError
from slurm_train.models.layers import Layer, ModelFacts
from slurm_train.topology.grid import AXES, REST, Grid
from slurm_train.topology.microbatches import microbatches


@dataclass(frozen=True)
class Part:
    """What one pipeline rank holds of a model; all of it where there is no pipeline."""

    layers: tuple[Layer, ...]
    """Its layers, each with the style by which it is sharded, "" for none."""

    blocks: tuple[int, ...]
    """Numbers of its blocks."""

    block_parameters: int
    """Parameters of each block that are in no layer."""

    other_parameters: int
    """Parameters outside the blocks that are in no layer."""

    first: bool
    last: bool

    def parameters(self, tp: int) -> int:
        """Parameters that one of `tp` tensor-parallel ranks holds: its shards, and all of what is not sharded."""
        held = sum(shard(layer, tp) for layer in self.layers)
        return held + len(self.blocks) * self.block_parameters + self.other_parameters

    def largest_block(self, tp: int) -> int:
        """The same of the largest block; 0 without blocks."""
        sizes = [sum(shard(layer, tp) for layer in self.layers if layer.block == block) for block in self.blocks]
        return max(sizes) + self.block_parameters if sizes else 0


def shard(layer: Layer, tp: int) -> int:
    """Parameters of a layer on each of `tp` ranks: a row-wise layer's bias is on all of them."""
    if not layer.style:
        return layer.parameters
    whole = layer.bias * layer.out_features if layer.style.startswith("rowwise") and not layer.tied else 0
    return (layer.parameters - whole) // tp + whole


def stage_count(parallel: DictConfig, pp: int) -> int:
    """Pipeline stages over all ranks."""
    return pp * (int(parallel.virtual) if parallel.schedule == "interleaved" and pp > 1 else 1)


def parts(model: ModelFacts, layers: Sequence[Layer], pp: int, stages: int) -> list[Part]:
    """What each pipeline rank holds, rank after rank: every pp-th stage, of consecutive blocks as even as can be.

    The layers before the blocks belong to the first stage, those after them to the last.

    Args:
        model: the model.
        layers: its layers, each with the style by which it is sharded.
        pp: pipeline ranks.
        stages: number of stages, a multiple of pp.
    """
    # The same bounds as slurm_train.data.batches.bounds, which the model is cut by.
    starts = [model.blocks * stage // stages for stage in range(stages + 1)]
    inside = [place for place, layer in enumerate(layers) if layer.block is not None]
    before = {layer.name for layer in layers[: inside[0] if inside else len(layers)]}
    found = []
    for rank in range(pp):
        first, last = rank == 0, rank == pp - 1
        blocks = {block for stage in range(rank, stages, pp) for block in range(starts[stage], starts[stage + 1])}
        held = [
            layer
            for layer in layers
            if (layer.block in blocks if layer.block is not None else (first if layer.name in before else last))
        ]
        others = model.other_parameters - model.blocks * model.block_parameters if last else 0
        found.append(Part(tuple(held), tuple(sorted(blocks)), model.block_parameters, others, first, last))
    return found


def pipeline_faults(config: DictConfig, grid: Grid, model: ModelFacts | None) -> Iterator[Fault]:
    """The number of stages against the model's blocks, and that of micro-batches against the batch.

    Args:
        config: the whole configuration.
        grid: sizes of the axes.
        model: None where the model is not known.
    """
    parallel, train, pp = config.parallel, config.train, grid.pp
    if pp == 1:
        return
    stages = stage_count(parallel, pp)
    shown = f"pp={pp} x virtual={parallel.virtual} = {stages}" if stages > pp else f"{stages}"
    if parallel.cuts and len(parallel.cuts) != stages - 1:
        problem = f"{shown} stages begin at {stages - 1} cuts, not at {len(parallel.cuts)}"
        yield Fault(f"parallel.cuts=[{','.join(parallel.cuts)}]", problem, f"name {stages - 1} modules")
    if model and not parallel.cuts and not parallel.blocks:
        yield from _block_faults(parallel, grid, model.blocks, stages, shown)
    if model and model.tied:
        yield Fault("model.tied=true", "a tied weight across pipeline stages", "use model.tied=false")
    if train.batch_size % grid.data_ranks == 0:
        try:
            step_parts(config, grid)
        except UserError as error:
            yield from error.faults


def _block_faults(parallel: DictConfig, grid: Grid, blocks: int, stages: int, shown: str) -> Iterator[Fault]:
    key = f"parallel.pp={parallel.pp}"
    if blocks == 0:
        remedy = "name the modules that start the second stage, the third, ...: parallel.cuts=[NAME]"
        yield Fault(key, "the model has no blocks to cut between", remedy)
    elif blocks < stages:
        most = blocks // (stages // grid.pp)
        shorter = _shorter(parallel, grid, most) if most > 1 else []
        yield Fault(
            key,
            f"{shown} stages, but the model has {blocks} block{'s' * (blocks > 1)}",
            f"use {', or '.join([*shorter, f'model.depth={stages}'])}",
        )


def _shorter(parallel: DictConfig, grid: Grid, most: int) -> list[str]:
    """What makes a pipeline of at most `most` ranks: fewer ranks, or data-parallel pipelines on all of them."""
    same = max(size for size in range(1, most + 1) if grid.pp % size == 0)
    open_axis = any(parallel[axis] == REST for axis in AXES if axis != "pp")
    beside = "" if open_axis else " parallel.dp_replicate=-1"
    fewer = f"parallel.pp={most} on {grid.world_size // grid.pp * most} ranks"
    return [fewer, f"parallel.pp={same}{beside}"] if same > 1 else [fewer]


def step_parts(config: DictConfig, grid: Grid) -> int:
    """Micro-batches of one step and data rank: equal in a pipeline, else as even as can be.

    Raises:
        UserError: a pipeline cannot have as many as asked for, or none fit.
    """
    train, parallel = config.train, config.parallel
    share = train.batch_size // grid.data_ranks
    if grid.pp == 1:
        return -(-share // train.micro_batch) if train.micro_batch else 1
    interleaved = parallel.schedule == "interleaved"
    return microbatches(share, grid.pp, parallel.microbatches, train.micro_batch, interleaved, grid.data_ranks)
