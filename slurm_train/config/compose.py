"""From the command line to a typed, resolved configuration, with all faults told at once.

Group choices (`model=cnn`, `+experiment=fmnist`) go through Hydra's Compose API; values (`train.epochs=3`) are applied
one by one on what it composed. The rule on targets: when the command line changes a `_target_`, the arguments in the
config files belong to the old target and are dropped, those typed stay; when an experiment changes it, the arguments
in the group's file are dropped, those in the experiment stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from slurm_train.config.checks import check
from slurm_train.config.files import composition_fault, read_mapping
from slurm_train.config.library import GROUPS, OPEN_GROUPS, Library
from slurm_train.config.overrides import Words, read, set_value, typed_leaves
from slurm_train.config.resolve import resolve
from slurm_train.config.schema import typed
from slurm_train.errors import ConfigError, Fault


@dataclass(frozen=True)
class Composed:
    """A configuration with where it comes from."""

    config: DictConfig
    """Typed by the schema, without interpolations."""

    overrides: tuple[str, ...]
    """As typed."""

    choices: Mapping[str, str]
    """Group -> the file chosen, such as {"model": "cnn", "experiment": "fmnist", ...}."""

    config_dirs: tuple[str, ...] = ()
    """The user's config directories, absolute; their Python files can be targets."""


def compose(overrides: Sequence[str], config_dirs: Sequence[Path | str] = ()) -> Composed:
    """The configuration that a command line asks for.

    Args:
        overrides: in Hydra's grammar, as typed.
        config_dirs: the user's directories of config files, as given by --config-dir.

    Raises:
        ConfigError: all faults of the command line and of what it asks for, in the order of the command line.
    """
    library, faults = Library.of(config_dirs)
    words = read(overrides, library)
    faults += words.faults
    try:
        composed = _composed(words, library)
    except Exception as error:  # Hydra, yaml and OmegaConf raise a dozen kinds for a faulty file
        faults.append(composition_fault(error, library, [*words.groups.values(), *words.hydra]))
        words.failed |= set(words.groups)
        composed = _composed(Words(), library)
    choices = _choices(composed)
    config, more = _valued(composed, words.values)
    return _result(Composed(config, tuple(overrides), choices, _names(library)), faults + more, words)


def apply(config: DictConfig, overrides: Sequence[str], config_dirs: Sequence[Path | str] = ()) -> Composed:
    """A saved configuration with some things changed, for `resume` and `evaluate`.

    A group choice (`parallel=ddp`) replaces the saved section by the group's file; an experiment cannot be changed.

    Raises:
        ConfigError: all faults, as by `compose`.
    """
    library, faults = Library.of(config_dirs)
    words = read(overrides, library)
    faults += words.faults
    for group in set(words.groups) - set(GROUPS):
        faults.append(Fault(words.groups.pop(group), "cannot be changed on a saved run", "start a new run"))
    changed = config.copy()
    choices: dict[str, str] = {}
    if words.groups:
        try:
            composed = _composed(words, library)
            choices = {group: choice for group, choice in _choices(composed).items() if group in words.groups}
            for group in words.groups:
                OmegaConf.update(changed, group, composed[group], merge=False)
        except Exception as error:  # as above
            faults.append(composition_fault(error, library, [*words.groups.values(), *words.hydra]))
            words.failed |= set(words.groups)
    changed, more = _valued(changed, words.values)
    return _result(Composed(changed, tuple(overrides), choices, _names(library)), faults + more, words)


def _result(composed: Composed, faults: list[Fault], words: Words) -> Composed:
    """What was composed, or all faults. Once there is one, those of `check` are told too, except for what hangs on a
    choice that failed: an unknown experiment might have chosen another model."""
    if not faults:
        return composed
    doubtful = {*GROUPS} if words.failed - {*GROUPS} else words.failed
    typed = typed_leaves(words.values)
    told = {fault.key.partition("=")[0].lstrip("+~") for fault in faults}
    for fault in check(composed.config, composed.config_dirs):
        key = fault.key.partition("=")[0]
        section = key.partition(".")[0]
        certain = key in typed and (section not in OPEN_GROUPS or f"{section}._target_" in typed)
        if key not in told and (certain or section not in doubtful):
            faults.append(fault)
    order = {text: place for place, text in enumerate(composed.overrides)}
    raise ConfigError(sorted(faults, key=lambda fault: order.get(fault.key, len(order))))


def _composed(words: Words, library: Library) -> DictConfig:
    """Hydra's composition of the group choices, with its own node `hydra`, open to changes."""
    config = _hydra(words.groups.values(), words.hydra, library)
    if set(words.groups) - set(GROUPS):
        for group in OPEN_GROUPS:
            _keep_own_arguments(config, group, words, library)
    return config


def _hydra(groups: Iterable[str], hydra: Iterable[str], library: Library) -> DictConfig:
    ConfigStore.instance().store(name="config_schema", node=typed(), provider="slurm_train")
    users = ",".join(QuotedString(str(place), Quote.single).with_quotes() for place in library.users)
    search = [f"hydra.searchpath=[{users}]"] if users else []
    outer = GlobalHydra.instance().hydra  # set when this process was itself started through Hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(library.directories[0]), job_name="slurm_train", version_base=None):
            config = hydra_compose("config", [*groups, *hydra, *search], return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = outer
    OmegaConf.set_struct(config, False)
    return config


def _keep_own_arguments(config: DictConfig, group: str, words: Words, library: Library) -> None:
    """Drop the arguments of a group's file when an experiment put another `_target_` on top of it."""
    choices = _choices(config)
    path = library.file(group, choices.get(group, ""))
    content = read_mapping(path) if path else None
    target = OmegaConf.select(config, f"{group}._target_")
    if not isinstance(content, DictConfig) or target == content.get("_target_"):
        return
    plain = _hydra([f"{name}={choices[name]}" for name in GROUPS], words.hydra, library)
    if OmegaConf.select(plain, f"{group}._target_") != target:
        own = _hydra([*(text for name, text in words.groups.items() if name != group), f"{group}=[]"], [], library)
        OmegaConf.update(config, group, own[group], merge=False)


def _choices(config: DictConfig) -> dict[str, str]:
    choices = config.hydra.runtime.choices
    return {group: str(choice) for group, choice in choices.items() if not group.startswith("hydra/")}


def _valued(config: DictConfig, values: Sequence[Override]) -> tuple[DictConfig, list[Fault]]:
    """The config with the typed values applied and all interpolations resolved, and the faults met."""
    leaves = typed_leaves(values)
    for key in _target_keys(config):
        if leaves.get(key, OmegaConf.select(config, key)) != OmegaConf.select(config, key):
            OmegaConf.update(config, key.removesuffix("._target_"), {}, merge=False)
    faults = [fault for value in values if (fault := set_value(config, value))]
    resolved, more = resolve(config)
    return resolved, faults + more


def _target_keys(config: DictConfig) -> list[str]:
    callbacks = [f"train.callbacks.{name}" for name in config.train.callbacks]
    nodes: list[Any] = [*OPEN_GROUPS, "train.loss", "train.loop", *callbacks]
    return [f"{node}._target_" for node in nodes]


def _names(library: Library) -> tuple[str, ...]:
    return tuple(str(place) for place in library.users)
