"""The transformer against what it is said to compute, and what the layouts ask of it."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slurm_train.errors import UserError
from slurm_train.models.attention import Attention, rotary_angles, rotate
from slurm_train.models.token_loss import TokenCrossEntropy
from slurm_train.models.transformer import Block, RMSNorm, Transformer
from slurm_train.train.stages import keep_stage

SMALL: dict[str, Any] = {"vocabulary": 11, "width": 24, "depth": 3, "heads": 4, "kv_heads": 2, "length": 16}


def small(**more: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**SMALL | more)


def tokens(*shape: int) -> Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("length", [1, 7, 16])
def test_every_token_gets_scores(length: int) -> None:
    assert small()(tokens(2, length)).shape == (2, length, 11)


def test_a_token_changes_no_scores_before_it() -> None:
    model, ids = small(), tokens(1, 10)
    other = ids.clone()
    other[0, 6] = (other[0, 6] + 1) % 11
    before, after = model(ids), model(other)
    assert torch.equal(before[:, :6], after[:, :6])
    assert all(not torch.allclose(before[:, t], after[:, t]) for t in range(6, 10))


def test_the_order_of_earlier_tokens_matters() -> None:
    model = small()
    assert not torch.allclose(model(torch.tensor([[1, 2, 3]]))[:, -1], model(torch.tensor([[2, 1, 3]]))[:, -1])


def test_rotated_products_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 8)
    cos, sin = rotary_angles(40, 8, 100.0, torch.device("cpu"))
    turned_q, turned_k = rotate(q.expand(40, 8), cos, sin), rotate(k.expand(40, 8), cos, sin)
    products = turned_q @ turned_k.T
    for distance in (0, 1, 13):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(products[0, 0], products[13, 0])
    torch.testing.assert_close(turned_q.norm(dim=1), q.norm().expand(40))


def test_far_positions_stay_apart_in_bfloat16() -> None:
    cos, sin = rotary_angles(4001, 2, 10000.0, torch.device("cpu"))
    x = torch.tensor([1.0, 0.0]).bfloat16().expand(4001, 2)
    turned = rotate(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned[4000].float(), torch.tensor([math.cos(4000), math.sin(4000)]), rtol=0, atol=4e-3)


def test_grouped_heads_are_repeated_heads() -> None:
    grouped, full = Attention(24, 4, 2, 0.0, 10000.0), Attention(24, 4, 4, 0.0, 10000.0)
    state = grouped.state_dict()
    for name in ("k.weight", "v.weight"):
        state[name] = state[name].unflatten(0, (2, 6)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    features = torch.randn(2, 5, 24)
    torch.testing.assert_close(grouped(features), full(features))


def written_out(block: Block, x: Tensor, heads: int, kv_heads: int, eps: float) -> Tensor:
    """One block for x [t, width], number by number."""
    length, width = x.shape
    size = width // heads

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return torch.stack([row / math.sqrt(float((row * row).mean()) + eps) for row in y]) * weight

    def turned(vector: Tensor, position: int) -> Tensor:
        result = torch.empty_like(vector)
        for i in range(size // 2):
            angle = position / 10000.0 ** (2 * i / size)
            a, b = vector[i], vector[i + size // 2]
            result[i] = a * math.cos(angle) - b * math.sin(angle)
            result[i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return result

    attention = block.attention
    y = norm(x, block.attention_norm.weight)
    q, k, v = (y @ layer.weight.T for layer in (attention.q, attention.k, attention.v))
    mixed = torch.zeros(length, width, dtype=x.dtype)
    for head in range(heads):
        mine = slice(head * size, (head + 1) * size)
        group = head // (heads // kv_heads)
        shared = slice(group * size, (group + 1) * size)
        for t in range(length):
            scores = [turned(q[t, mine], t) @ turned(k[s, shared], s) / math.sqrt(size) for s in range(t + 1)]
            weights = torch.stack(scores).exp()
            mixed[t, mine] = (weights / weights.sum()) @ v[: t + 1, shared]
    x = x + mixed @ attention.o.weight.T
    y = norm(x, block.mlp_norm.weight)
    gate = y @ block.mlp.gate.weight.T
    return x + (gate * gate.sigmoid() * (y @ block.mlp.up.weight.T)) @ block.mlp.down.weight.T


@torch.no_grad()
def test_a_block_computes_what_is_written_out() -> None:
    block = Block(24, 4, 2, 32, 0.0, 10000.0, 0.1).double()
    for parameter in block.parameters():
        parameter.normal_(std=0.5)
    x = torch.randn(6, 24, dtype=torch.double)
    torch.testing.assert_close(block(x[None])[0], written_out(block, x, 4, 2, 0.1), rtol=1e-5, atol=1e-5)


def test_tied_layers_share_their_weight() -> None:
    tied, untied = small(tied=True), small()
    assert tied.head.weight is tied.embed.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 11 * 24


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = Transformer(vocabulary=512, width=128, depth=8, heads=4)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert parameter.eq(1).all()
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith((".o.weight", ".down.weight")) else 0.02
            assert float(parameter.detach().std()) == pytest.approx(std, rel=0.03), name
            assert abs(float(parameter.detach().mean())) < 0.1 * std, name
    loss = TokenCrossEntropy()(model(torch.randint(512, (2, 64))), torch.randint(512, (2, 64)))
    assert float(loss.detach()) == pytest.approx(math.log(512), rel=0.02)


def test_init_weights_fills_a_model_from_the_meta_device() -> None:
    with torch.device("meta"):
        model = small()
    model = model.to_empty(device="cpu")
    assert not list(model.buffers())
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    for module in model.modules():
        model.init_weights(module)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model(tokens(2, 5)).isfinite().all()


def test_names() -> None:
    parts = ["attention_norm", *(f"attention.{n}" for n in "qkvo"), "mlp_norm", "mlp.gate", "mlp.up", "mlp.down"]
    blocks = [f"layers.{i}.{part}.weight" for i in range(3) for part in parts]
    assert list(small().state_dict()) == ["embed.weight", *blocks, "norm.weight", "head.weight"]
    assert small().blocks() == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("starts", [["layers.1"], ["layers.1", "layers.2"], ["layers.2", "norm"]])
def test_stages_one_after_the_other_are_the_whole(starts: list[str]) -> None:
    whole = small(dropout=0.5).eval()
    expected = set(whole.state_dict())
    features = tokens(2, 7)
    held: list[str] = []
    for stage in range(len(starts) + 1):
        part = keep_stage(small(dropout=0.5).eval(), starts, stage)
        part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
        held += list(part.state_dict())
        features = part(features)
    assert torch.equal(features, whole(tokens(2, 7)))
    assert len(held) == len(expected) and set(held) == expected


def test_the_plan_names_each_module_once() -> None:
    named = {name: module for name, module in small().named_modules() if name}
    styles: dict[str, list[str]] = {name: [] for name in named}
    for pattern, style in small().tp_plan().items():
        matched = [name for name in named if fnmatchcase(name, pattern)]
        assert matched, pattern
        for name in matched:
            styles[name].append(style)
    assert styles.pop("layers") == []
    for i in range(3):
        assert styles.pop(f"layers.{i}") == []
    assert all(len(found) == 1 for found in styles.values()), styles
    assert {name for name, found in styles.items() if found == ["sequence"]} == {
        name for name, module in named.items() if isinstance(module, RMSNorm | nn.Dropout)
    }
    assert [name for name, found in styles.items() if found == ["sharded"]] == [
        f"layers.{i}.attention.core" for i in range(3)
    ]
    assert {name.rpartition(".")[2] for name, found in styles.items() if found == ["rowwise_scatter"]} == {
        *("embed", "o", "down")
    }
    assert {name.rpartition(".")[2] for name, found in styles.items() if found == ["colwise"]} == {*"qkv", "gate", "up"}
    assert {name.rpartition(".")[2] for name, found in styles.items() if found == ["gather"]} == {"attention", "mlp"}
    assert styles["head"] == ["head"]


def test_attention_takes_as_many_heads_as_its_projections_give() -> None:
    whole = Attention(24, 4, 2, 0.0, 10000.0)
    features = torch.randn(2, 5, 24)
    parts = []
    for rank in range(2):  # what a tensor-parallel rank of two holds
        part = Attention(24, 4, 2, 0.0, 10000.0)
        for name in "qkv":
            weight = getattr(whole, name).weight.detach()
            getattr(part, name).weight = nn.Parameter(weight.chunk(2, dim=0)[rank])
        part.o.weight = nn.Parameter(whole.o.weight.detach().chunk(2, dim=1)[rank])
        parts.append(part(features))
    torch.testing.assert_close(parts[0] + parts[1], whole(features))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_acts_in_training_only(dropout: float) -> None:
    model, ids = small(dropout=dropout), tokens(2, 8)
    assert torch.equal(model(ids), model(ids)) == (dropout == 0)
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_dropout_also_drops_attention_weights() -> None:
    attention = Attention(24, 4, 2, 0.5, 10000.0)
    features = torch.randn(1, 8, 24)
    assert not torch.equal(attention(features), attention(features))
    attention.eval()
    assert torch.equal(attention(features), attention(features))


@pytest.mark.parametrize("pure", [False, True])
def test_bfloat16_is_near_float32(pure: bool) -> None:
    model, ids = small(), tokens(2, 8)
    loss = TokenCrossEntropy()
    expected = loss(model(ids), ids)
    model = model.bfloat16() if pure else model
    with torch.autocast("cpu", torch.bfloat16, enabled=not pure):
        got = loss(model(ids), ids)
    assert got.dtype == torch.float32
    got.backward()
    assert float(got.detach()) == pytest.approx(float(expected.detach()), rel=0.01)


def test_it_learns_a_repeated_sequence() -> None:
    model, loss = small(), TokenCrossEntropy()
    ids = torch.arange(11).repeat(2)[None, :16]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        value = loss(model(ids[:, :-1]), ids[:, 1:])
        value.backward()
        optimizer.step()
    assert float(value.detach()) < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 5}, "model.heads=5: "),
        ({"width": 12, "heads": 4, "kv_heads": None}, "model.heads=4: .*odd"),
        ({"kv_heads": 3}, "model.kv_heads=3: "),
        ({"heads": 0}, "model.heads=0: must be at least 1"),
        ({"depth": -1}, "model.depth=-1: must be at least 1"),
        ({"kv_heads": 0, "hidden": 0}, "model.kv_heads=0: must be at least 1\nmodel.hidden=0: must be at least 1"),
        ({"dropout": 1.0}, "model.dropout=1.0: "),
    ],
)
def test_sizes_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        small(**arguments)


def test_a_sequence_that_is_too_long() -> None:
    with pytest.raises(UserError, match="^model.length: a sequence of 17 tokens is longer than the model's 16"):
        small()(tokens(1, 17))


def test_token_loss_is_the_mean_over_the_tokens_that_count() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    targets = torch.tensor([[1, -100, 4], [0, 2, -100]])
    logs = logits.detach().log_softmax(-1)
    expected = -(logs[0, 0, 1] + logs[0, 2, 4] + logs[1, 0, 0] + logs[1, 1, 2]) / 4
    loss = TokenCrossEntropy()
    assert loss.ignore_index == -100
    value = loss(logits, targets)
    torch.testing.assert_close(value.detach(), expected)
    value.backward()
    assert logits.grad is not None and logits.grad[0, 1].eq(0).all() and logits.grad[0, 0].ne(0).all()


def test_token_loss_with_another_ignored_value() -> None:
    logits, targets = torch.randn(1, 3, 5), torch.tensor([[1, 4, 2]])
    expected = TokenCrossEntropy()(logits, torch.tensor([[1, -100, 2]]))
    torch.testing.assert_close(TokenCrossEntropy(ignore_index=4)(logits, targets), expected)
    assert TokenCrossEntropy(ignore_index=4)(logits, torch.full((1, 3), 4)).isnan()
