"""Any text whatever on the command line ends in a config or in faults of one line."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from slurm_train.config.compose import compose
from slurm_train.config.library import Library
from slurm_train.config.names import expected, near
from slurm_train.config.overrides import read, set_value
from slurm_train.config.resolve import literal, resolve

WORDS = [
    "train",
    "epochs",
    "model",
    "width",
    ".",
    "=",
    "+",
    "~",
    "/",
    "@",
    "'",
    '"',
    "{",
    "}",
    "[",
    "]",
    "(",
    ",",
    ":",
    "$",
]
WORDS += [
    "-",
    "3",
    "1.5",
    "null",
    "true",
    " ",
    "\n",
    "é",
    "\\",
    "_target_",
    "experiment",
    "fmnist",
    "plan",
    "parallel",
    "${",
    "?",
]


@cache
def base() -> DictConfig:
    return compose([]).config


@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=8).map("".join) | st.text(max_size=8), max_size=3))
def test_no_text_raises(typed: list[str]) -> None:
    library, _ = Library.of([])
    words = read(typed, library)
    config = base().copy()
    faults = [*words.faults, *(fault for value in words.values if (fault := set_value(config, value)))]
    _, more = resolve(config)
    assert all("\n" not in str(fault) and str(fault) for fault in [*faults, *more])


@given(st.text(alphabet="ab${}\\ x:.", max_size=12))
def test_a_literal_text_is_read_back(text: str) -> None:
    assert OmegaConf.create({"key": literal(text)}).key == text


def test_near_names() -> None:
    known = ["train.epochs", "train.early_stopping", "model.width", "seed", "optim.lr"]
    assert near("epochs", known) == "did you mean train.epochs?"
    assert near("Train.Epoch", known) == "did you mean train.epochs?"
    assert near("sead", known) == "did you mean seed?"
    assert near("lr", known) == "did you mean optim.lr?"
    assert near("zzz", known) == ""
    assert near("zzz", []) == ""


def test_expected_words() -> None:
    keys = [
        "train.epochs",
        "train.max_steps",
        "train.validation",
        "run.name",
        "train",
        "model",
        "model.width",
        "nothing.x",
    ]
    assert [expected(key) for key in keys] == [
        "an integer",
        "an integer or null",
        "a number",
        "a text or null",
        "a mapping such as {key: value}",
        "a mapping such as {key: value}",
        "",
        "",
    ]
