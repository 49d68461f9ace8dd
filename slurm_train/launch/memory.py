"""Bytes of memory that one rank needs, as far as they follow from the model and the layout."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from omegaconf import DictConfig, ListConfig

from slurm_train.launch.stages import Part
from slurm_train.models.layers import ModelFacts
from slurm_train.topology.grid import Grid

FP32 = 4


def compute_bytes(precision: str) -> int:
    """Bytes of a number in the passes: 4 in fp32, 2 in the other formats."""
    return FP32 if precision == "fp32" else 2


def residual_bytes(precision: str) -> int:
    """Bytes of a number between the blocks: autocast (bf16, fp16) adds up what the blocks give in fp32."""
    return 2 if precision == "bf16_pure" else FP32


def is_sharded(train: DictConfig, grid: Grid) -> bool:
    """Whether fully_shard wraps the model: the rule of slurm_train.train.parallel.is_sharded."""
    replicas_of_parts = grid.data_ranks > 1 and (grid.tp > 1 or grid.pp > 1)
    return grid.dp_shard > 1 or replicas_of_parts or train.precision == "bf16_pure" or bool(train.offload)


def state_memory(config: DictConfig, part: Part, grid: Grid, parts: int) -> dict[str, int | None]:
    """Bytes of what a rank keeps for each parameter that it holds; dp_shard divides all of it.

    weights: 4 a parameter; under bf16_pure these are the fp32 master copy.
    gathered: what fully_shard has whole at a time, 4 a parameter, or 2 under bf16_pure: the parameters outside the
        blocks and two blocks, the one at work and the next; all of a stage's under a pipeline. At most.
    gradients: 4 a parameter; not divided by dp_shard while several micro-batches are added up, for shards are
        exchanged once a step.
    optimizer: 4 for each number that the optimizer keeps of a parameter; None for an optimizer that is not known.
    ema: 4 a parameter.

    Args:
        config: the whole configuration.
        part: what the rank's pipeline stages hold.
        grid: sizes of the axes.
        parts: micro-batches of a step.
    """
    train = config.train
    whole = part.parameters(grid.tp)
    held = -(-whole // grid.dp_shard)
    sharded = is_sharded(train, grid)
    numbers = optimizer_numbers(config.optim)
    block = part.largest_block(grid.tp)
    at_once = min(whole, whole - len(part.blocks) * block + 2 * block) if block and grid.pp == 1 else whole
    return {
        "weights": FP32 * held,
        "gathered": (2 if train.precision == "bf16_pure" else FP32) * at_once if sharded else 0,
        "gradients": FP32 * (whole if sharded and parts > 1 else held),
        "optimizer": None if numbers is None else FP32 * numbers * held,
        "ema": FP32 * held if train.ema is not None else 0,
    }


def optimizer_numbers(optim: DictConfig) -> int | None:
    """Numbers that an optimizer keeps for each parameter: Adam and AdamW two moments (with amsgrad their maximum too),
    SGD its momentum; None for another optimizer."""
    target = str(optim.get("_target_")).removeprefix("torch.optim.")
    if target in ("Adam", "AdamW"):
        return 3 if optim.get("amsgrad") else 2
    return int(bool(optim.get("momentum"))) if target == "SGD" else None


def activation_memory(
    config: DictConfig, model: ModelFacts, part: Part, grid: Grid, place: int, parts: int, tokens: int
) -> int | None:
    """Bytes of what the forward pass keeps for the backward pass; None for a model that is no transformer of ours.

    After Korthikanti et al. 2022 (arXiv:2205.05198, section 4), whose layer keeps 34 + 5 heads length / width bytes a
    token and feature. A block of ours keeps of each token, w being the width, k that of keys and of values, h the
    hidden features of the gated layers:

    - 2 w inputs of the norms, in the format between the blocks;
    - 2 w inputs of the projections, which are what the norms give; under autocast 5 w, a copy for each projection;
    - 2 w + 2 k queries, keys, values and what the attention gives (the scores are not kept: fused attention);
    - 4 h: gate, silu(gate), up and their product;
    - 2 w bytes of dropout masks, with dropout.

    tp divides the third and fourth; the first and last too under parallel.sequence. The inputs of the projections are
    gathered and kept whole. Autocast keeps 2 bytes for each weight of a projection besides. The head keeps its input,
    the norm's, the log-softmax of the scores (fp32) and their gradient; with loss_parallel tp divides these two. A
    recomputed block keeps its input alone, and one is whole while it is computed again. A pipeline rank keeps several
    micro-batches (see `in_flight`).

    Args:
        config: the whole configuration.
        model: the model.
        part: what the rank's pipeline stages hold.
        grid: sizes of the axes.
        place: the rank's place along pp.
        parts: micro-batches of a step.
        tokens: tokens of a micro-batch.
    """
    chosen = recomputed(config.train.recompute, range(model.blocks))
    if not model.width or chosen is None:
        return None
    again = chosen & {*part.blocks}
    train, parallel, width = config.train, config.parallel, model.width
    size, between = compute_bytes(train.precision), residual_bytes(train.precision)
    autocast = size < between
    apart = grid.tp if parallel.sequence else 1
    stream = tokens * width * between / apart  # one tensor between the blocks
    masks = tokens * width / apart if config.model.get("dropout") else 0
    block = 0.0
    by_name = {layer.name.rpartition(".")[2]: layer for layer in part.layers if layer.block is not None}
    if by_name:
        inside = 2 * width + 2 * by_name["k"].out_features + 4 * by_name["gate"].out_features
        block = 2 * stream + tokens * size * ((5 if autocast else 2) * width + inside / grid.tp) + 2 * masks
        block += size * (part.largest_block(grid.tp) - part.block_parameters) if autocast else 0
    kept = len(again) * stream + (len(part.blocks) - len(again)) * block + masks * part.first
    total = in_flight(parallel, grid.pp, place, parts) * kept + (block if again else 0)
    if part.last:
        head = part.layers[-1]
        scores = head.out_features * (size + FP32) / (grid.tp if parallel.loss_parallel else 1)
        total += stream + tokens * (width * size + scores)
        total += size * head.in_features * head.out_features / grid.tp if autocast else 0
    return round(total)


def recomputed(what: object, blocks: Sequence[int]) -> set[int] | None:
    """Which of these blocks of ours train.recompute computes again; None where it names modules inside blocks, or none
    of them."""
    if what is None:
        return set()
    if isinstance(what, ListConfig):
        found = {block for block in blocks if any(fnmatchcase(f"layers.{block}", wanted) for wanted in what)}
        inside = any(str(wanted).count(".") > 1 for wanted in what)
        return None if inside or not found else found
    step = 1 if what == "all" else int(str(what))
    return {block for block in blocks if block % step == 0}


def in_flight(parallel: DictConfig, pp: int, place: int, parts: int) -> float:
    """Micro-batches whose activations a pipeline rank keeps at a time, of all its stages.

    1F1B: as many as there are ranks from it to the last. Interleaved, with v stages a rank: (v - 1) pp + 2 (pp - 1 -
    place) + 1 passes of one stage, on the first rank 1 + (pp - 1) / (pp v) times those of 1F1B (Korthikanti et al.,
    section 4.2.3).
    """
    if parallel.schedule != "interleaved" or pp == 1:
        return min(pp - place, parts)
    passes = (int(parallel.virtual) - 1) * pp + 2 * (pp - 1 - place) + 1
    return min(passes / int(parallel.virtual), parts)
