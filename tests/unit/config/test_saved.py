"""save and load: what a run directory keeps of its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.types import Quote, QuotedString

from slurm_train.config.compose import compose
from slurm_train.config.saved import dump, load, save
from slurm_train.config.schema import Config
from slurm_train.errors import ConfigError

TEXTS = [
    "plain",
    "a: b",
    "# no",
    "7",
    "null",
    "été 日本",
    "two\nlines",
    "${x}",
    "\\${x}",
    "${",
    "- x",
    "'q' \"d\"",
    " s ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_saved_and_loaded_is_the_same(tmp_path: Path, text: str) -> None:
    quoted = QuotedString(text.replace("\\${", "\\\\${").replace("${", "\\${"), Quote.single).with_quotes()
    config = compose(["+experiment=linear_regression", f"model.name={quoted}"]).config
    save(config, tmp_path / "config.yaml")
    loaded = load(tmp_path / "config.yaml")
    assert loaded == config
    assert loaded.model.name == config.model.name
    assert dump(loaded) == dump(config)


def test_the_text_is_in_the_order_of_the_schema() -> None:
    text = dump(compose(["data.root=été"]).config)
    sections = [line.partition(":")[0] for line in text.splitlines() if not line.startswith((" ", "-"))]
    assert sections == list(Config.__dataclass_fields__)
    assert "root: été" in text


def test_a_loaded_config_is_typed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train:\n  epochs: 7\n")
    config = load(tmp_path / "config.yaml")
    assert (config.train.epochs, config.train.batch_size) == (7, 64)
    with pytest.raises(Exception, match="could not be converted to Integer"):
        config.train.epochs = "many"


BROKEN = [
    (
        "train:\n  epoch: 3\nfoo: 1\nlauncher: {nodes: x}\n",
        [
            "config.yaml: train.epoch: unknown key, perhaps of another version of slurm_train; "
            "did you mean train.epochs?",
            "config.yaml: foo: unknown key, perhaps of another version of slurm_train; remove it",
            "config.yaml: launcher.nodes: must be an integer",
        ],
    ),
    ("a: [\n", ["config.yaml, line 2: is not valid yaml: expected the node content, but found '<stream end>'"]),
    ("- 1\n", ["config.yaml: must be a mapping of keys, not a list"]),
    ("train: 3\n", ["config.yaml: train: must be a mapping such as {key: value}"]),
    (None, ["config.yaml: cannot be read: No such file or directory"]),
]


@pytest.mark.parametrize(("text", "lines"), BROKEN)
def test_a_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, lines: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("config.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load(Path("config.yaml"))
    assert str(error.value).splitlines() == lines
