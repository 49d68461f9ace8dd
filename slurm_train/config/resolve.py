"""Interpolations (`${run.experiment}`, `${oc.env:USER}`) replaced by their values, each failing one told by its key."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from slurm_train.config.names import expected
from slurm_train.config.schema import Config, typed
from slurm_train.errors import Fault


def resolve(config: DictConfig) -> tuple[DictConfig, list[Fault]]:
    """The config typed by the schema, without interpolations and without Hydra's node, and the faults met.

    A faulty value is left out, so that the rest can still be checked. `${hydra:...}` works while a config has Hydra's
    node, for what Hydra knows before a run starts.
    """
    singleton = HydraConfig.instance()
    outer = singleton.cfg
    if "hydra" in config:
        singleton.set_config(config)
    try:
        faults: list[Fault] = []
        plain = {entry.name: _plain(config, entry.name, entry.name, faults) for entry in fields(Config)}
    finally:
        singleton.cfg = outer
    given = {name: value for name, value in plain.items() if value is not _FAULTY}
    return cast(DictConfig, OmegaConf.merge(typed(), given)), faults


_FAULTY = object()


def _plain(node: DictConfig | ListConfig, index: Any, key: str, faults: list[Fault]) -> Any:
    """The value at one index as plain Python, resolved; _FAULTY when it cannot be."""
    try:
        value = "???" if OmegaConf.is_missing(node, index) else node[index]
    except OmegaConfBaseException as error:
        words = expected(key) if isinstance(error, ValidationError) else ""
        faults.append(Fault(f"{key}={_raw(node, index)}", f"must be {words}" if words else _reason(error)))
        return _FAULTY
    if OmegaConf.is_interpolation(node, index) and _unknown_to_hydra(_raw(node, index)):
        faults.append(Fault(f"{key}={_raw(node, index)}", "Hydra does not know this before the run starts"))
        return _FAULTY
    if isinstance(value, str) and value == "???":
        faults.append(Fault(key, "needs a value", f"type {key}=VALUE"))
        return _FAULTY
    if isinstance(value, DictConfig):
        names = cast("list[str]", list(value))
        items: dict[Any, Any] = {name: _plain(value, name, f"{key}.{name}", faults) for name in names}
        return {name: item for name, item in items.items() if item is not _FAULTY}
    if isinstance(value, ListConfig):
        items = {place: _plain(value, place, f"{key}.{place}", faults) for place in range(len(value))}
        return [item for item in items.values() if item is not _FAULTY]
    return literal(value) if isinstance(value, str) else value


def _raw(node: DictConfig | ListConfig, index: Any) -> str:
    """A value as written, interpolations and all."""
    plain: Any = OmegaConf.to_container(node, resolve=False)
    return str(plain[index])


def _unknown_to_hydra(text: str) -> bool:
    """Whether a text asks Hydra for something that is missing: its resolver would give null for it."""
    known: Any = HydraConfig.instance().cfg
    return any(OmegaConf.select(known, f"hydra.{path}") is None for path in re.findall(r"\$\{hydra:([^}]*)\}", text))


def _reason(error: OmegaConfBaseException) -> str:
    """OmegaConf's reason without its preamble."""
    return str(error).splitlines()[0].rpartition("while resolving interpolation: ")[2].strip('"')


def literal(text: str) -> str:
    """A text written so that OmegaConf reads it back as it is, `${` included."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
