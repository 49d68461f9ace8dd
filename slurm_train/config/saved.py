"""The resolved configuration of a run as config.yaml in its run directory: written for people, read back typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from slurm_train.config.files import read_mapping
from slurm_train.config.library import shown
from slurm_train.config.names import expected, known_keys, near
from slurm_train.config.resolve import literal
from slurm_train.config.schema import Config
from slurm_train.errors import ConfigError, Fault


def dump(config: DictConfig) -> str:
    """A resolved config as yaml text, in the schema's order."""
    plain = _with_literal_texts(OmegaConf.to_container(config, resolve=True))
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def save(config: DictConfig, path: Path) -> None:
    """Write a resolved config to a file."""
    path.write_text(dump(config), encoding="utf-8")


def load(path: Path) -> DictConfig:
    """Read a saved config, typed by the schema. A section or key that the file lacks takes its default.

    Raises:
        ConfigError: the file is missing or no valid yaml, or has keys or values that this version does not know.
    """
    content = read_mapping(path)
    if isinstance(content, Fault):
        raise ConfigError([content])
    plain: Any = OmegaConf.to_container(content, resolve=False)
    config: Any = OmegaConf.structured(Config)
    faults = []
    for section, value in plain.items():
        try:
            config = OmegaConf.merge(config, {section: value})
        except OmegaConfBaseException as error:
            faults.append(_fault(path, error.full_key or str(section), error))
    if faults:
        raise ConfigError(faults)
    return cast(DictConfig, config)


def _fault(path: Path, key: str, error: OmegaConfBaseException) -> Fault:
    place = f"{shown(path)}: {key}"
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        remedy = near(key, known_keys(OmegaConf.structured(Config)))
        return Fault(place, "unknown key, perhaps of another version of slurm_train", remedy or "remove it")
    return Fault(place, f"must be {expected(key)}" if expected(key) else str(error).splitlines()[0])


def _with_literal_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_literal_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_literal_texts(item) for item in value]
    return literal(value) if isinstance(value, str) else value
