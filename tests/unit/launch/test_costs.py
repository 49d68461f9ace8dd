"""What a layout is said to cost, against numbers worked out by hand and against the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from slurm_train.config.schema import typed
from slurm_train.data.batches import bounds
from slurm_train.launch.costs import Costs, costs, rank_parts, step_flops
from slurm_train.launch.memory import activation_memory, in_flight, optimizer_numbers, recomputed
from slurm_train.launch.stages import parts
from slurm_train.models.facts import cnn_facts, mlp_facts
from slurm_train.models.layers import ModelFacts
from slurm_train.models.transformer import Transformer
from slurm_train.models.transformer_facts import transformer_facts
from slurm_train.report.summary import bytes_text
from slurm_train.topology.grid import Grid

ADAMW = {"_target_": "torch.optim.AdamW"}
SMALL = transformer_facts(vocabulary=64, width=32, depth=4, heads=4, kv_heads=2, hidden=96, length=16)
BLOCK = 2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96  # norms; q and o; k and v; gate, up and down
TABLE = 64 * 32  # the embedding, and the head


def config(*settings: str, optim: dict[str, Any] = ADAMW, **model: Any) -> DictConfig:
    made = OmegaConf.merge(typed(), {"model": model, "optim": optim, "data": {}}, OmegaConf.from_dotlist([*settings]))
    assert isinstance(made, DictConfig)
    return made


def small(grid: Grid, *settings: str) -> Costs:
    return costs(config("train.batch_size=16", *settings), SMALL, grid, None)


def test_one_rank_has_it_all() -> None:
    found = small(Grid())
    whole = 4 * BLOCK + 2 * TABLE + 32
    assert found.parameters == found.rank_parameters == whole == 53_536
    assert found.memory["weights"] == found.memory["gradients"] == 4 * whole
    assert (found.memory["optimizer"], found.memory["gathered"], found.memory["ema"]) == (8 * whole, 0, 0)
    assert (found.micro_batches, found.micro_batch, found.idle, found.traffic) == (1, 16, 0, {})


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", [SMALL, mlp_facts(depth=3, width=64), cnn_facts()])
def test_the_ranks_together_hold_the_whole(model: ModelFacts, stages: int, tp: int) -> None:
    pp = stages if model.blocks else 1
    held = rank_parts(config(), model, Grid(pp=pp, tp=tp))
    shared = sum(part.parameters(tp) for part in held) * tp - model.parameters
    whole_on_each = model.other_parameters + sum(
        layer.parameters for part in held for layer in part.layers if not layer.style
    )
    biases = sum(layer.out_features for layer in model.layers if layer.style == "rowwise")
    assert shared == (tp - 1) * (whole_on_each + biases)


@pytest.mark.parametrize(("pp", "stages"), [(2, 2), (3, 3), (2, 4), (3, 6)])
def test_stages_are_those_that_the_model_is_cut_into(pp: int, stages: int) -> None:
    model = transformer_facts(depth=7)
    held = parts(model, model.layers, pp, stages)
    for rank, part in enumerate(held):
        cut = [block for stage in range(rank, stages, pp) for block in range(*bounds(7, stage, stages))]
        assert list(part.blocks) == cut
    assert [layer.name for layer in held[0].layers if layer.block is None] == ["embed"]
    assert [layer.name for layer in held[-1].layers if layer.block is None] == ["head"]
    assert sum(part.parameters(1) for part in held) == model.parameters


def test_each_axis_takes_its_part() -> None:
    sharded_block = (BLOCK - 64) // 2 + 64
    assert small(Grid(tp=2)).rank_parameters == 4 * sharded_block + TABLE + 32
    assert small(Grid(dp_shard=4)).rank_parameters == 53_536 // 4
    assert small(Grid(dp_replicate=4)).rank_parameters == 53_536
    assert small(Grid(pp=2)).rank_parameters == 2 * BLOCK + TABLE + 32
    assert small(Grid(pp=2, dp_shard=2, tp=2)).rank_parameters == -(-(2 * sharded_block + TABLE // 2 + 32) // 2)


def test_memory_of_sharded_weights() -> None:
    found = small(Grid(dp_shard=4), "train.ema=0.9").memory
    assert found["weights"] == found["gradients"] == found["ema"] == 53_536
    assert found["gathered"] == 4 * (2 * BLOCK + 2 * TABLE + 32)
    accumulated = small(Grid(dp_shard=4), "train.micro_batch=1").memory
    assert accumulated["gradients"] == 4 * 53_536
    pure = small(Grid(), "train.precision=bf16_pure").memory
    assert (pure["weights"], pure["gathered"]) == (4 * 53_536, 2 * (2 * BLOCK + 2 * TABLE + 32))
    assert small(Grid(dp_replicate=2)).memory["gathered"] == 0
    staged = small(Grid(pp=2, dp_shard=2)).memory
    assert staged["gathered"] == 4 * (2 * BLOCK + TABLE)  # of the first stage, which keeps more activations


@pytest.mark.parametrize(
    ("optim", "numbers"),
    [
        (ADAMW, 2),
        ({"_target_": "torch.optim.Adam", "amsgrad": True}, 3),
        ({"_target_": "torch.optim.SGD", "lr": 0.1}, 0),
        ({"_target_": "torch.optim.SGD", "momentum": 0.9}, 1),
        ({"_target_": "mine.Lion"}, None),
        ({"_target_": "mine.AdamW"}, None),
    ],
)
def test_numbers_of_an_optimizer(optim: dict[str, Any], numbers: int | None) -> None:
    assert optimizer_numbers(OmegaConf.create(optim)) == numbers


# Features of a token that a block of SMALL keeps: norms' inputs, projections' inputs, sharded ones.
BETWEEN, INPUTS, INSIDE = 2 * 32, 2 * 32, 2 * 32 + 2 * 16 + 4 * 96


def kept(grid: Grid, *settings: str, place: int = 0, dropout: float = 0.0) -> int | None:
    made = config(*settings, dropout=dropout)
    return activation_memory(made, SMALL, rank_parts(made, SMALL, grid)[place], grid, place, parts=8, tokens=1)


def test_activations_of_one_rank() -> None:
    scores = 64 * (4 + 4)
    assert kept(Grid()) == 4 * 4 * (BETWEEN + INPUTS + INSIDE) + 4 * 2 * 32 + scores
    assert kept(Grid(), dropout=0.1) == (kept(Grid()) or 0) + (4 * 2 + 1) * 32
    cast = 2 * (4 * (BLOCK - 64) + TABLE)  # the weights of the projections and the head
    autocast = 4 * (4 * BETWEEN + 2 * (5 * 32 + INSIDE)) + 4 * 32 + 2 * 32 + 64 * (2 + 4) + cast
    assert kept(Grid(), "train.precision=bf16") == kept(Grid(), "train.precision=fp16") == autocast
    pure = 4 * 2 * (BETWEEN + INPUTS + INSIDE) + 2 * 2 * 32 + 64 * (2 + 4)
    assert kept(Grid(), "train.precision=bf16_pure") == pure


def test_activations_under_tensor_and_sequence_parallelism() -> None:
    scores = 64 * (4 + 4)
    assert kept(Grid(tp=2)) == 4 * 4 * (BETWEEN + INPUTS + INSIDE // 2) + 4 * 2 * 32 + scores
    apart = 4 * 4 * (BETWEEN // 2 + INPUTS + INSIDE // 2) + 4 * (16 + 32) + scores
    assert kept(Grid(tp=2), "parallel.sequence=true") == apart
    assert kept(Grid(tp=2), "parallel.sequence=true", "parallel.loss_parallel=true") == apart - scores // 2


def test_activations_with_recomputation() -> None:
    block, end = 4 * (BETWEEN + INPUTS + INSIDE), 4 * 2 * 32 + 64 * (4 + 4)
    assert kept(Grid(), "train.recompute=all") == 4 * 4 * 32 + block + end
    assert kept(Grid(), "train.recompute=2") == 2 * 4 * 32 + 2 * block + block + end
    listed = OmegaConf.create({"what": ["layers.[01]"]}).what
    assert recomputed(listed, (0, 1, 2, 3)) == {0, 1}
    assert recomputed(3, (3, 4, 5)) == {3}  # numbers of the whole model's blocks
    assert recomputed(OmegaConf.create({"what": ["layers.*.mlp"]}).what, (0, 1)) is None


def test_recomputed_blocks_of_another_pipeline_rank() -> None:
    block, end = 4 * (BETWEEN + INPUTS + INSIDE), 4 * 2 * 32 + 64 * (4 + 4)
    first = "train.recompute=[layers.0,layers.1]"
    assert kept(Grid(pp=2), first) == 2 * 2 * 4 * 32 + block  # two micro-batches in flight
    assert kept(Grid(pp=2), first, place=1) == 2 * block + end
    for elsewhere in ("layers.*.mlp", "layers.9"):
        assert kept(Grid(pp=2), f"train.recompute=[{elsewhere}]") is None


def test_activations_of_pipeline_ranks() -> None:
    block, end = 4 * (BETWEEN + INPUTS + INSIDE), 4 * 2 * 32 + 64 * (4 + 4)
    assert kept(Grid(pp=4)) == 4 * block
    assert kept(Grid(pp=4), place=3) == block + end
    one = config().parallel
    assert [in_flight(one, 4, place, 8) for place in range(4)] == [4, 3, 2, 1]
    assert in_flight(one, 4, 0, 2) == 2
    two = config("parallel.schedule=interleaved", "parallel.virtual=2").parallel
    assert in_flight(two, 4, 0, 8) == 4 * (1 + 3 / (4 * 2))  # Korthikanti et al.


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_what_autograd_keeps(precision: str) -> None:
    """One block more keeps what is said of a block. On a CPU the norms keep what they normalised as well (2 w), and the
    attention's outputs are copied (w), where a GPU has kernels that need no copy."""
    sizes: dict[str, Any] = {"vocabulary": 64, "width": 128, "heads": 4, "kv_heads": 2, "hidden": 384, "length": 128}
    told, kept = [], []
    for depth in (1, 2):
        made, facts = config(f"train.precision={precision}"), transformer_facts(depth=depth, **sizes)
        told.append(activation_memory(made, facts, rank_parts(made, facts, Grid())[0], Grid(), 0, 1, 2 * 128))
        kept.append(kept_by_autograd(Transformer(depth=depth, **sizes), torch.zeros(2, 128, dtype=torch.int64), made))
    block = (told[1] or 0) - (told[0] or 0)
    assert block <= kept[1] - kept[0] <= 1.02 * block + 256 * 128 * (2 * 4 + (4 if precision == "fp32" else 2))


def kept_by_autograd(model: Transformer, tokens: torch.Tensor, config: DictConfig) -> int:
    """Bytes of the tensors that a forward pass keeps for the backward pass, but for the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            found[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=config.train.precision == "bf16"):
            scores = model(tokens)
        torch.nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens.flatten())
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def test_activations_of_other_models_are_not_known() -> None:
    found = costs(config(), mlp_facts(), Grid(), None)
    assert found.memory["activations"] is None and found.memory["weights"] == 4 * 407_050


def test_arithmetic() -> None:
    assert step_flops(mlp_facts(784, 512, 1, 10), 64, 1) == 64 * 6 * (784 * 512 + 512 * 10)
    convolutions = 28 * 28 * 9 * 16 + 14 * 14 * 9 * 16 * 32
    assert step_flops(cnn_facts(), 2, 1) == 2 * 6 * (convolutions + 32 * 49 * 128 + 128 * 10)
    weights = 4 * (BLOCK - 64) + TABLE
    assert small(Grid()).flops == 16 * 16 * (6 * weights + 12 * 4 * 32 * 16)
    seven = transformer_facts(32000, 4096, 32, 32, hidden=11008, length=4096)
    assert step_flops(seven, 1, 4096) / 4096 == pytest.approx(6 * 6.6e9 + 12 * 32 * 4096 * 4096, rel=0.01)


def test_data_parallel_traffic() -> None:
    assert small(Grid(dp_replicate=4)).traffic == {"dp_replicate": 2 * 3 * 53_536}
    assert small(Grid(dp_shard=4)).traffic == {"dp_shard": 3 * 3 * 53_536}
    assert small(Grid(dp_shard=4), "train.micro_batch=2").traffic == {"dp_shard": 3 * 5 * 53_536}
    assert small(Grid(dp_shard=4), "train.precision=bf16_pure").traffic == {"dp_shard": 3 * 2 * 53_536}
    assert small(Grid(dp_replicate=2, dp_shard=2)).traffic == {"dp_replicate": 2 * 53_536, "dp_shard": 6 * 53_536}


def test_tensor_parallel_traffic() -> None:
    tokens, ring = 16 * 16, 1 / 2
    reduces = 4 * 4 + 2  # four a block, one for the embedding's outputs, one for the gradient of the head's input
    sent = tokens * 4 * ring * (2 * reduces * 32 + 64)
    assert small(Grid(tp=2)).traffic == {"tp": sent}
    assert small(Grid(tp=2), "parallel.sequence=true", "train.micro_batch=4").traffic == {"tp": sent}
    assert small(Grid(tp=2), "parallel.loss_parallel=true").traffic == {"tp": sent - tokens * 4 * ring * 64}
    again = tokens * 4 * ring * 2 * 4 * 2 * 32
    assert small(Grid(tp=2), "train.recompute=all").traffic == {"tp": sent + again}
    mlp = costs(config("train.batch_size=64"), mlp_facts(), Grid(tp=4), None).traffic
    assert mlp == {"tp": 2 * 3 / 4 * 64 * 10 * 4}  # one all-reduce of the scores


def test_pipeline_traffic() -> None:
    once = 16 * 16 * 32 * 4
    assert small(Grid(pp=2)).traffic == {"pp": once}
    assert small(Grid(pp=4)).traffic == {"pp": 2 * once}
    assert small(Grid(pp=2), "parallel.schedule=interleaved").traffic == {"pp": 3 * once}
    assert small(Grid(pp=2), "train.precision=bf16_pure").traffic == {"pp": once // 2}
    assert small(Grid(pp=2, tp=2), "parallel.sequence=true").traffic["pp"] == once // 2


def test_how_long_a_pipeline_waits() -> None:
    found = small(Grid(pp=4))
    assert (found.micro_batches, found.micro_batch, found.idle) == (8, 2, pytest.approx(3 / 11))
    assert small(Grid(pp=2), "parallel.schedule=interleaved").idle == pytest.approx(1 / (2 * 4 + 1))


@pytest.mark.parametrize(("asked", "count", "largest"), [(12, 2, 8), (16, 1, 16), (5, 4, 4), (6, 3, 6)])
def test_micro_batches_are_as_even_as_can_be(asked: int, count: int, largest: int) -> None:
    found = small(Grid(), f"train.micro_batch={asked}")
    assert (found.micro_batches, found.micro_batch) == (count, largest)
    edges = [bounds(16, part, count) for part in range(count)]  # as slurm_train.train.step cuts a share
    assert max(high - low for low, high in edges) == largest


def test_a_pipeline_of_unknown_stages() -> None:
    found = costs(config("parallel.cuts=[head]"), mlp_facts(), Grid(pp=2), None)
    assert (found.rank_parameters, found.memory, found.traffic) == (None, {}, {})
    assert found.flops and found.parameters == 407_050
    own = small(Grid(pp=2), "parallel.blocks=[layers.0,layers.1]")
    assert (own.rank_parameters, own.memory, own.traffic) == (None, {}, {})


def test_the_largest_block_counts() -> None:
    part = rank_parts(config(), SMALL, Grid())[0]
    assert (part.largest_block(1), part.largest_block(2)) == (BLOCK, (BLOCK - 64) // 2 + 64)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1000, "1000 bytes"), (1536, "1.5 KiB"), (1023 * 1024, "1023 KiB"), (3 * 2**40, "3 TiB")],
)
def test_bytes_in_words(size: int, text: str) -> None:
    assert bytes_text(size) == text
