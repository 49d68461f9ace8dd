"""What a layout costs: parameters, memory, arithmetic and communication, estimated before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from omegaconf import DictConfig

from slurm_train.data.facts import DataFacts
from slurm_train.launch.fit import planned, sequence_length, tp_plan
from slurm_train.launch.memory import activation_memory, state_memory
from slurm_train.launch.stages import Part, parts, stage_count, step_parts
from slurm_train.launch.traffic import data_traffic, pipeline_traffic, tensor_traffic
from slurm_train.models.layers import ModelFacts
from slurm_train.topology.grid import Grid


@dataclass(frozen=True)
class Costs:
    """Estimates for one optimizer step; bytes are those of the rank that needs most."""

    parameters: int
    """Parameters of the whole model."""

    rank_parameters: int | None
    """The most that one rank holds; None where it is not known what a pipeline rank holds."""

    micro_batches: int
    """Micro-batches of a step and data rank."""

    micro_batch: int
    """Samples of the largest micro-batch: a share is cut into parts that are as even as can be."""

    idle: float
    """The part of a step's time in which a pipeline rank waits: (pp - 1) / (virtual x micro-batches + pp - 1)
    (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""

    flops: int
    """Floating-point operations of a step over all ranks, without recomputation."""

    offload: bool
    """Whether weights, gradients and optimizer state are in the host's memory."""

    memory: Mapping[str, int | None] = field(default_factory=dict)
    """Bytes by kind (see slurm_train.launch.memory); None where not known; without the work space of kernels and
    communication."""

    traffic: Mapping[str, int] = field(default_factory=dict)
    """Axis -> bytes sent (see slurm_train.launch.traffic)."""


def costs(config: DictConfig, model: ModelFacts, grid: Grid, data: DataFacts | None) -> Costs:
    """The costs of a layout that fits the model.

    Args:
        config: the whole configuration.
        model: the model.
        grid: sizes of the axes.
        data: where its sequences' length is known, it counts instead of the longest that the model takes.
    """
    share = config.train.batch_size // grid.data_ranks
    count = step_parts(config, grid)
    micro = -(-share // count)
    length = sequence_length(model, data) or 1
    stages = stage_count(config.parallel, grid.pp)
    busy = stages // grid.pp * count
    found = Costs(
        parameters=model.parameters,
        rank_parameters=None,
        micro_batches=count,
        micro_batch=micro,
        idle=(grid.pp - 1) / (busy + grid.pp - 1),
        flops=step_flops(model, config.train.batch_size, length),
        offload=bool(config.train.offload),
    )
    if grid.pp > 1 and (config.parallel.cuts or config.parallel.blocks or not model.blocks):
        return found
    held = rank_parts(config, model, grid)
    memories: list[dict[str, int | None]] = [
        state_memory(config, part, grid, count)
        | {"activations": activation_memory(config, model, part, grid, place, count, micro * length)}
        for place, part in enumerate(held)
    ]
    sent = {"dp_replicate": 0, "dp_shard": 0, "tp": 0, "pp": pipeline_traffic(config, model, grid, share * length)}
    for part in held:
        along = data_traffic(config, part, grid, count)
        along["tp"] = tensor_traffic(config, model, part, grid, share * length)
        sent |= {axis: max(size, sent[axis]) for axis, size in along.items()}
    return replace(
        found,
        rank_parameters=max(-(-part.parameters(grid.tp) // grid.dp_shard) for part in held),
        memory=max(memories, key=lambda memory: sum(size or 0 for size in memory.values())),
        traffic={axis: sent[axis] for axis, size in grid.axes().items() if size > 1},
    )


def rank_parts(config: DictConfig, model: ModelFacts, grid: Grid) -> list[Part]:
    """What each pipeline rank holds of a model that has blocks, or that is not cut."""
    styles = {layer.name: layer.style for layer in planned(model, tp_plan(config.parallel, model))}
    layers = [replace(layer, style=styles.get(layer.name, "")) for layer in model.layers]
    return parts(model, layers, grid.pp, stage_count(config.parallel, grid.pp))


def step_flops(model: ModelFacts, samples: int, length: int) -> int:
    """Floating-point operations of a step: 6 for each weight that multiplies and each token, two in the forward and
    four in the backward pass (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), and 12 x blocks x width x length for
    each token's attention (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), which counts the masked half too.

    Args:
        model: the model; an embedding only looks up and does not count.
        samples: samples of the global batch.
        length: tokens of a sample; 1 for a model of single samples.
    """
    weights = sum(layer.in_features * layer.out_features for layer in model.layers if not layer.lookup)
    attention = 12 * model.blocks * model.width * length
    return samples * (length * (6 * weights + attention) + 6 * model.other_products)
