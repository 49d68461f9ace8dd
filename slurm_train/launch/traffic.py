"""Bytes that one rank sends in a step, axis by axis, with ring algorithms.

Among n ranks a ring sends (n - 1) / n of a tensor's bytes for an all-gather or a reduce-scatter, and twice that for an
all-reduce (Rajbhandari et al. 2020, arXiv:1910.02054, section 7).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from omegaconf import DictConfig

from slurm_train.launch.memory import FP32, compute_bytes, recomputed, residual_bytes
from slurm_train.launch.stages import Part, stage_count
from slurm_train.models.layers import Layer, ModelFacts
from slurm_train.topology.grid import Grid


def data_traffic(config: DictConfig, part: Part, grid: Grid, parts: int) -> dict[str, int]:
    """Gradients and gathered weights of data-parallel ranks.

    dp_replicate: one all-reduce of the rank's gradients in fp32, 2 (n - 1) / n x 4 bytes x parameters / dp_shard.
    dp_shard: one reduce-scatter of the gradients in fp32, (n - 1) / n x 4 bytes x parameters, and two all-gathers of
        the weights for each micro-batch, before the forward and the backward pass, of 4 bytes, under bf16_pure of 2.
        At most: what fully_shard keeps between them is not sent again.

    Args:
        config: the whole configuration.
        part: what the rank's pipeline stages hold.
        grid: sizes of the axes.
        parts: micro-batches of a step.
    """
    parameters = part.parameters(grid.tp)
    weight = 2 if config.train.precision == "bf16_pure" else FP32
    return {
        "dp_replicate": round(2 * ring(grid.dp_replicate) * FP32 * parameters / grid.dp_shard),
        "dp_shard": round(ring(grid.dp_shard) * parameters * (FP32 + 2 * parts * weight)),
    }


def tensor_traffic(config: DictConfig, model: ModelFacts, part: Part, grid: Grid, positions: int) -> int:
    """Activations along tp.

    Each row-wise layer all-reduces its outputs in the forward pass, and each input of column-wise layers (queries, keys
    and values share one) has its gradient all-reduced in the backward pass: four all-reduces of tokens x width in a
    block (Shoeybi et al. 2019, arXiv:1909.08053, section 3), six where it is recomputed. Under parallel.sequence each
    is an all-gather and a reduce-scatter, which send the same. Scores that are not left sharded are gathered too.

    Args:
        config: the whole configuration.
        model: the model.
        part: what the rank's pipeline stages hold.
        grid: sizes of the axes.
        positions: samples of a step and data rank, or their tokens.
    """
    if grid.tp == 1:
        return 0
    size = compute_bytes(config.train.precision)
    entering = residual_bytes(config.train.precision) if model.width else size
    again = recomputed(config.train.recompute, part.blocks) or set()
    plan = config.parallel.plan or model.tp_plan
    gathering = [wanted for wanted, style in plan.items() if style == "gather"]
    reduced, inputs = 0, dict[str, int]()
    for layer in part.layers:
        if layer.style.startswith("rowwise"):
            reduced += layer.out_features * size * (2 if layer.block in again else 1)
        elif layer.style and not layer.lookup and (model.other_products or layer.name != model.layers[0].name):
            # Token ids and a sample have no gradient; what convolutions give has one.
            shared = layer.name.rpartition(".")[0]
            owner = shared if any(fnmatchcase(shared, wanted) for wanted in gathering) else layer.name
            inputs[owner] = layer.in_features
    scores = 0 if config.parallel.loss_parallel else sum(_scores(layer) for layer in part.layers) * size
    return round(ring(grid.tp) * positions * (2 * (reduced + entering * sum(inputs.values())) + scores))


def _scores(layer: Layer) -> int:
    return layer.out_features if layer.style == "head" else 0


def pipeline_traffic(config: DictConfig, model: ModelFacts, grid: Grid, tokens: int) -> int:
    """Activations to the next stage and their gradients to the one before, of the rank that sends most.

    Every stage but the last sends tokens x width forward, every stage but the first as much backward; parallel.sequence
    leaves each tensor-parallel rank 1 / tp of it.

    Args:
        config: the whole configuration.
        model: the model.
        grid: sizes of the axes.
        tokens: tokens of a step and data rank.
    """
    if grid.pp == 1:
        return 0
    stages = stage_count(config.parallel, grid.pp)
    sends = [
        sum((stage < stages - 1) + (stage > 0) for stage in range(rank, stages, grid.pp)) for rank in range(grid.pp)
    ]
    apart = grid.tp if config.parallel.sequence else 1
    return max(sends) * tokens * model.width * residual_bytes(config.train.precision) // apart


def ring(ranks: int) -> float:
    """The part of a tensor that a rank sends in a ring's all-gather or reduce-scatter."""
    return (ranks - 1) / ranks
