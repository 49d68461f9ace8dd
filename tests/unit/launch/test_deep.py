"""plan --deep: what it finds in a model is what the facts say of it, and what a user's own model is."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.compose import compose
from slurm_train.launch.deep import look
from slurm_train.launch.plan import make_plan
from slurm_train.launch.show import show
from slurm_train.models.layers import Layer
from slurm_train.train.inspect_model import inspect

OWN = """
from torch import nn


class Net(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.place = nn.Embedding(50, 8), nn.Embedding(6, 8)
        self.parts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.drop, self.core, self.norm = nn.Dropout(0.1), nn.Identity(), nn.LayerNorm(8)
        self.head = nn.Linear(8, 50)
        if tied:
            self.head.weight = self.embed.weight
        for module in self.modules():
            self.init_weights(module)

    def init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight)

    def blocks(self):
        return ["parts.0", "parts.1"]
"""
PLAN = {
    "embed": "rowwise_scatter",
    "place": "colwise",
    "parts.0": "colwise",
    "parts.1": "rowwise",
    "drop": "sequence",
    "core": "sharded",
    "norm": "replicate",
    "head": "head",
}
REST = {"blocks": [], "cuts": [], "stages": 1, "recompute": None}


@pytest.fixture
def question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return {"search": [str(tmp_path)], "model": {"_target_": "own_net.Net"}, "plan": PLAN, "tp": 2, **REST}


def test_the_transformer_is_what_its_facts_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights.pt").touch()
    typed = ["model._target_=slurm_train.models.transformer.Transformer", "model.depth=2", "model.tied=true"]
    typed += ["data=bytes", f"data.path={__file__}", "data.length=32"]
    composed = compose([*typed, "model.init_from=weights.pt", "parallel=tp", "parallel.tp=2"])
    told = make_plan(composed, {})
    seen = look(replace(told, parameters=None, layers=()), composed.config)
    assert (seen.parameters, seen.layers) == (told.parameters, told.layers)
    assert show(seen) == show(told)


def test_names_of_modules_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    composed = compose(["+experiment=lm", f"data.path={__file__}", "train.recompute=[layers.0]"])
    told = make_plan(composed, {})
    assert told.unchecked and look(told, composed.config).unchecked == ()


def test_all_styles_on_a_users_model(question: dict[str, Any]) -> None:
    answer = inspect(question)
    assert answer["layers"] == [
        asdict(Layer("embed", 50, 8, "rowwise_scatter", bias=False, lookup=True)),
        asdict(Layer("place", 6, 8, "colwise", bias=False, lookup=True)),
        asdict(Layer("parts.0", 8, 8, "colwise", bias=False, block=0)),
        asdict(Layer("parts.1", 8, 8, "rowwise", bias=False, block=1)),
        asdict(Layer("head", 8, 50, "head")),
    ]
    assert answer["parameters"] == sum(Layer(**layer).parameters for layer in answer["layers"]) + 2 * 8


def test_a_tied_weight_counts_once(question: dict[str, Any]) -> None:
    alone = inspect(question)["parameters"]
    tied = inspect(question | {"model": {"_target_": "own_net.Net", "tied": True, "init_from": "weights.pt"}})
    assert tied["parameters"] == alone - 50 * 8
    assert [layer["name"] for layer in tied["layers"] if layer["tied"]] == ["head"]


def test_a_plan_that_does_not_fit(question: dict[str, Any]) -> None:
    ((key, message, remedy),) = inspect(question | {"plan": {"fc": "colwise"}})["faults"]
    assert (key, message) == ("parallel.plan.fc", "matches no module of the model")
    assert remedy == "its linear layers are parts.0, parts.1, head"
    ((_, message, _),) = inspect(question | {"tp": 4, "plan": {"place": "rowwise"}})["faults"]
    assert message == "tp=4 does not divide the 6 num_embeddings of place (rowwise)"
    ((_, message, _),) = inspect(question | {"plan": {"norm": "colwise"}})["faults"]
    assert message == "norm is a LayerNorm"


def test_stages_and_blocks_that_do_not_fit(question: dict[str, Any]) -> None:
    def message(**changed: Any) -> str:
        ((key, message, _),) = inspect(question | {"plan": {}, "tp": 1} | changed)["faults"]
        return f"{key}: {message}"

    assert message(stages=3) == "parallel.pp: Net has 2 blocks (parts.0, parts.1) for 3 stages"
    assert message(stages=2, cuts=["part.1"]) == "parallel.cuts=part.1: is no module of the model"
    assert message(blocks=["layer.*"]) == "parallel.blocks=layer.*: matches no module of the model"
    assert message(recompute=["layer.*"]) == "train.recompute=layer.*: matches no module of the model"
    tied = {"_target_": "own_net.Net", "tied": True}
    assert message(stages=2, model=tied).endswith("are one tied weight across pipeline stages")
    assert "faults" not in inspect(question | {"plan": {}, "tp": 1, "stages": 2, "cuts": ["parts.1"]})
