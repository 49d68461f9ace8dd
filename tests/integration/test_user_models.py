"""A user's own modules, which know nothing of this project, under the layouts; and what is refused, by one line.

To a language model that is written as those of Hugging Face, a user adds `Causal`, or `Chain` for pipelines.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slurm_train.data.resident import TensorData
from slurm_train.errors import SlurmTrainError
from tests.integration.found_model import Config, ForCausalLM
from tests.integration.runs import SAMPLE, losses, run, run_on_rank
from tests.integration.test_bad_input import started
from tests.integration.test_matrix import deviation, weight_deviation

HERE = "tests.integration.test_user_models"


class Residual(nn.Module):
    """Two layers whose outputs are added to their inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, features: Tensor) -> Tensor:
        return features + self.down(self.up(features).relu())


class Net(nn.Module):
    """A network of residual blocks, which calls its modules one after the other."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.trunk = nn.Sequential(*[Residual(16) for _ in range(depth)])
        self.head = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.trunk(self.stem(inputs)))


class Skipping(Net):
    """What the stem gives skips the trunk."""

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.stem(inputs)
        return self.head(features + self.trunk(features))


class Ending(Net):
    """Ends with a module that has no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.silent(super().forward(inputs))


class Tied(Net):
    """The first and the last block share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk[3].up.weight = self.trunk[0].up.weight


class Dropping(Net):
    """Drops by a function, which every stage would call."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.trunk(F.dropout(self.stem(inputs), 0.5, self.training)))


class Attending(nn.Module):
    """torch's own attention over two halves of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.unflatten(1, (2, 4))
        return self.head(self.attention(tokens, tokens, tokens)[0].mean(1))


class Causal(nn.Module):
    """What a user adds for every layout but pipelines: token ids in, scores out."""

    def __init__(self, **sizes: object) -> None:
        super().__init__()
        self.lm = ForCausalLM(Config(**sizes))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm(input_ids=tokens).logits


class Chain(nn.Module):
    """The same for pipelines too: the modules of the model one after the other, each with one input."""

    def __init__(self, **sizes: object) -> None:
        super().__init__()
        lm = ForCausalLM(Config(**sizes))
        self.embed = lm.model.embed_tokens
        self.layers = nn.ModuleList(Positioned(layer, lm.model.rotary_emb) for layer in lm.model.layers)
        self.norm = lm.model.norm
        self.head = lm.lm_head

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class Positioned(nn.Module):
    """A layer of it that sees to its positions itself."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.layer(hidden, position_embeddings=self.rotary(hidden, positions))


def Points(split: str = "train") -> TensorData:
    """Points of which the largest of four values is to be told."""
    generator = torch.Generator().manual_seed(5 + (split == "test"))
    inputs = torch.randn(160 if split == "train" else 27, 8, generator=generator)
    return TensorData(inputs, inputs[:, :4].argmax(dim=1))


TEN = ["train.validation=0", "train.batch_size=16", "train.epochs=1", "optim=sgd", "optim.lr=0.1"]
BASE = [f"data._target_={HERE}.Points", *TEN]
NET = [f"model._target_={HERE}.Net", *BASE]


def agree(world, tmp_path: Path, overrides: list[str], layout: list[str], ranks: int) -> None:
    alone = run_on_rank([*overrides, "parallel=single"], str(tmp_path / "alone"))
    result = run(world, ranks, [*overrides, *layout], tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 10
    assert losses(tmp_path / "run")[10] < 0.98 * losses(tmp_path / "run")[1]
    assert deviation(losses(tmp_path / "run"), losses(tmp_path / "alone")) < 1e-5
    assert weight_deviation(tmp_path / "run", tmp_path / "alone") < 1e-5
    assert result["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (["parallel=tp", "parallel.plan={trunk.*.up: colwise, trunk.*.down: rowwise}"], 2),
        (["parallel=pp", "parallel.cuts=[trunk.1]"], 2),
        (["parallel=pp_fsdp", "parallel.cuts=[trunk.3]"], 4),
        (["parallel=fsdp", f"model._target_={HERE}.Tied"], 2),
        (["parallel=tp", "parallel.plan={head: head}", "parallel.loss_parallel=true"], 2),
    ],
    ids=str,
)
def test_a_network_of_residual_blocks(world, tmp_path, layout, ranks):
    model = [word for word in layout if word.startswith("model")]
    agree(world, tmp_path, [*NET, *model], layout, ranks)


def refusal(overrides: list[str], directory: str) -> tuple[int, str]:
    """Exit code and lines of a run that is refused."""
    try:
        run_on_rank(overrides, directory)
    except SlurmTrainError as error:
        return error.exit_code, str(error)
    return 0, ""


DIFFERS = (
    " together do not give what the whole gives: its forward does more between its modules than to call them one after "
    "the other; cut elsewhere, or write what it does there as a module"
)
REFUSED = {
    "a cut that names nothing": (
        ["parallel=pp", "parallel.cuts=[trunk.9]"],
        "parallel.cuts=trunk.9: is no module of the model; it has stem, stem.0, stem.1, trunk, trunk.0, trunk.0.up, "
        "trunk.0.down, trunk.1, trunk.1.up, trunk.1.down, trunk.2, trunk.2.up",
    ),
    "a cut inside a residual block": (
        ["parallel=pp", "parallel.cuts=[trunk.2.down]"],
        f"parallel.cuts: the stages of Net{DIFFERS}",
    ),
    "what skips the cut": (
        ["parallel=pp", f"model._target_={HERE}.Skipping"],
        f"parallel.cuts: the stages of Skipping{DIFFERS}",
    ),
    "a function that drops": (
        ["parallel=pp", f"model._target_={HERE}.Dropping"],
        f"parallel.cuts: the stages of Dropping{DIFFERS}",
    ),
    "a stage with nothing to train": (
        ["parallel=pp", "parallel.cuts=[silent]", f"model._target_={HERE}.Ending"],
        "parallel.pp: pipeline rank 1 would have no parameter to train; cut elsewhere: parallel.cuts",
    ),
    "a tied weight across stages": (
        ["parallel=pp", f"model._target_={HERE}.Tied"],
        "parallel.pp: trunk.0.up.weight and trunk.3.up.weight are one tied weight across pipeline stages; "
        "untie them (of this project's transformer: model.tied=false), or leave pipeline stages out",
    ),
    "a pattern that matches nothing": (
        ["parallel=tp", "parallel.plan={trunk.*.up: colwise, trunk.*.dwon: rowwise}"],
        "parallel.plan.trunk.*.dwon: matches no module of the model; its linear layers are stem.0, trunk.0.up, "
        "trunk.0.down, trunk.1.up, trunk.1.down, trunk.2.up, trunk.2.down, trunk.3.up, trunk.3.down, head",
    ),
    "two patterns that want different things, and an unknown style": (
        ["parallel=tp", "parallel.plan={trunk.*.up: colwise, trunk.0.up: rowwise, head: wide}"],
        "parallel.plan.trunk.0.up: trunk.0.up is colwise by trunk.*.up already; let one pattern match\n"
        "parallel.plan.head: unknown style 'wide'; use colwise, rowwise, rowwise_scatter, head, sequence, gather, "
        "sharded, replicate",
    ),
    "a part of torch's own attention": (
        ["parallel=tp", f"model._target_={HERE}.Attending", "parallel.plan={attention.out_proj: rowwise}"],
        "parallel.plan.attention.out_proj: attention is a MultiheadAttention, which keeps queries, keys and values in "
        "one parameter and splits the heads itself; write the attention with nn.Linear layers (see "
        "slurm_train/models/transformer.py)",
    ),
    "no plan": (
        ["parallel=tp"],
        "parallel.tp: Net declares no tensor-parallel plan; give it a method tp_plan(), or set parallel.plan, e.g. "
        "'parallel.plan={fc1: colwise, fc2: rowwise}'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_on_every_rank(world, tmp_path, what):
    layout, lines = REFUSED[what]
    model = [] if any(word.startswith("model") for word in layout) else [f"model._target_={HERE}.Net"]
    assert world(2).run(refusal, [*BASE, *model, *layout], str(tmp_path / "run")) == [(2, lines)] * 2


STYLES = {"*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise", "*.o_proj": "rowwise"}
STYLES |= {"*.gate_proj": "colwise", "*.up_proj": "colwise", "*.down_proj": "rowwise"}


def plan(**ends: str) -> str:
    """The key as it is typed."""
    return f"parallel.plan={{{', '.join(f'{name}: {style}' for name, style in {**STYLES, **ends}.items())}}}"


@pytest.fixture
def language(tmp_path):
    """What is typed for a language model of the bytes of a text."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and " * 130)
    return [
        *["data=bytes", f"data.path={text}", "data.length=16", "data.test=0.2", *TEN, "train.max_steps=10"],
        "train.loss._target_=slurm_train.models.token_loss.TokenCrossEntropy",
    ]


ENDS = {"lm.model.embed_tokens": "rowwise", "lm.lm_head": "head"}
CAUSAL = {
    "ddp": (["parallel=ddp"], 2),
    "fsdp": (["parallel=fsdp"], 2),
    "fsdp, tied": (["parallel=fsdp", "model.tie_word_embeddings=true"], 2),
    "tp": (["parallel=tp", plan()], 2),
    "tp, tied": (["parallel=tp", plan(**ENDS), "model.tie_word_embeddings=true"], 2),
    "fsdp_tp": (["parallel=fsdp_tp", plan(**ENDS), "parallel.loss_parallel=true"], 4),
}
CHAIN = {
    "pp": (["parallel=pp"], 2),
    "pp, cut": (["parallel=pp", "parallel.cuts=[layers.1]"], 2),
    "pp_tp": (["parallel=pp_tp", plan(embed="rowwise", head="head")], 4),
    "pp_fsdp": (["parallel=pp_fsdp", "train.recompute=all"], 4),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_language_model_in_three_lines(world, language, tmp_path, name):
    layout, ranks = CAUSAL[name]
    tied = [word for word in layout if word.startswith("model")]
    agree(world, tmp_path, [*language, f"model._target_={HERE}.Causal", *tied], layout, ranks)


@pytest.mark.parametrize("name", CHAIN)
def test_a_language_model_as_a_chain(world, language, tmp_path, name):
    agree(world, tmp_path, [*language, f"model._target_={HERE}.Chain"], *CHAIN[name])


def test_a_language_model_that_is_no_chain_is_not_cut(world, language, tmp_path):
    overrides = [*language, f"model._target_={HERE}.Causal", "parallel=pp"]
    told = (2, f"parallel.cuts: the stages of Causal{DIFFERS}")
    assert world(2).run(refusal, overrides, str(tmp_path / "run")) == [told] * 2


def Bare(**sizes: object) -> nn.Module:
    return ForCausalLM(Config(**sizes))


def test_a_model_that_gives_an_object_needs_the_three_lines(language, tmp_path):
    code, told = refusal([*language, f"model._target_={HERE}.Bare"], str(tmp_path / "run"))
    assert code == 2
    assert told == (
        "train.loss: it cannot take what the model gives, an object of type Output ('Output' object has no attribute "
        "'flatten'); let the model's forward return a tensor, or name a loss that takes the object"
    )


FILES = {
    "mine.py": """
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, features):
        return features + self.down(self.up(features).relu())


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(784, width))
        self.trunk = nn.Sequential(*[Residual(width) for _ in range(4)])
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        return self.head(self.trunk(self.stem(images)))
""",
    "conf/model/mine.yaml": "_target_: mine.Net\nwidth: 32\n",
    "conf/experiment/mine.yaml": """# @package _global_
defaults:
  - fmnist
  - override /model: mine
  - _self_
parallel:
  plan: {"trunk.*.up": colwise, "trunk.*.down": rowwise}
""",
}


def test_verify_says_that_a_users_model_agrees(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    typed = ["verify", "--config-dir", "conf", "+experiment=mine", SAMPLE, "parallel=tp", "launcher.tasks_per_node=2"]
    ended = started([*typed, "--steps", "3"], tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "verdict: the layout agrees with one process" in ended.stdout
