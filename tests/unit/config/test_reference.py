"""The config reference: every field of the schema has its docstring and its row."""

from __future__ import annotations

import dataclasses

from omegaconf import OmegaConf

from slurm_train.config import schema
from slurm_train.config.names import known_keys
from slurm_train.config.reference import field_docstrings, reference
from slurm_train.config.schema import Config


def test_every_field_has_a_docstring() -> None:
    documented = field_docstrings()
    classes = [item for item in vars(schema).values() if isinstance(item, type) and dataclasses.is_dataclass(item)]
    assert {item.__name__ for item in classes} == set(documented)
    for item in classes:
        assert {field.name for field in dataclasses.fields(item)} == set(documented[item.__name__])
    assert [(name, field) for name, fields in documented.items() for field, row in fields.items() if not row[2]] == []


def test_the_reference_has_every_key_once() -> None:
    rows = [line.partition(" | ")[0] for line in reference().splitlines()]
    keys = known_keys(OmegaConf.structured(Config))
    typed = [key for key in keys if "_target_" not in key]
    assert [key for key in typed if rows.count(f"| `{key}`") != 1] == []


def test_rows_are_written_as_typed() -> None:
    text = reference()
    assert "| `train.epochs` | `int` | `5` | Number of passes over the training samples. |" in text
    assert "| `run.name` | `str \\| None` | `null` |" in text
    assert "| `parallel.find_unused` | `bool` | `false` |" in text
