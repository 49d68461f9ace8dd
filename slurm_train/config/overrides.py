"""The words of the command line: told apart into group choices and values, and the values applied one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from slurm_train.config.library import GROUPS, OPEN_GROUPS, Library
from slurm_train.config.names import expected, is_text, known_keys, near, near_or_all
from slurm_train.config.schema import Config
from slurm_train.errors import Fault

# A value that needs none of the grammar's own characters is taken as it stands, though Hydra has no token for a
# second `=`, for `~`, `#`, `;` or for letters beyond ASCII.
_PLAIN = re.compile(r"([+~]{0,2}[\w./@-]+)=([^'\"\\\[\]{}(),$]*)", re.DOTALL)
_PLAN = "parallel.plan."


@dataclass
class Words:
    """The overrides of one command line, told apart."""

    groups: dict[str, str] = field(default_factory=dict)
    """Group -> the override for Hydra, such as model=cnn or +experiment=fmnist."""

    values: list[Override] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)
    """Overrides of Hydra's own settings."""

    failed: set[str] = field(default_factory=set)
    """Groups whose choice is at fault: what depends on them is not worth telling."""

    faults: list[Fault] = field(default_factory=list)


def read(overrides: Sequence[str], library: Library) -> Words:
    """Tell group choices from values; a faulty override is told and left out.

    `+` and `++` make no difference: a group that conf/config.yaml does not choose (an experiment) is added, every other
    one is changed.
    """
    words = Words()
    parser = OverridesParser.create()
    for text in overrides:
        parsed = _parse(parser, text, library)
        if isinstance(parsed, Fault):
            words.faults.append(parsed)
        elif parsed.is_hydra_override():
            words.hydra.append(text)
        elif parsed.is_sweep_override():
            words.faults.append(_sweep_fault(parsed))
        elif library.is_group(parsed.key_or_group) and not isinstance(parsed.value(), dict):
            _choose(words, parsed, library)
        elif parsed.package is not None or "/" in parsed.key_or_group:
            groups = near_or_all(parsed.key_or_group, library.groups(), "groups")
            words.faults.append(Fault(text, "no such group", groups))
        else:
            words.values.append(parsed)
    return words


def _parse(parser: OverridesParser, text: str, library: Library) -> Override | Fault:
    key, equals, value = text.partition("=")
    name = key.lstrip("+~-")
    if "," in value and _takes_commas(name, value):
        return _plain(parser, key, value, text)
    if not name or (not equals and not text.startswith("~")):
        options = [f"{_prefix(group)}={option}" for group in library.groups() for option in library.options(group)]
        found = [option for option in options if option.partition("=")[2] == text]
        if text.startswith("-"):
            return Fault(text, "unknown option", "see --help")
        return Fault(text or "''", "is not KEY=VALUE", f"did you mean {' or '.join(found)}?" if found else "")
    if key.startswith("-"):
        keys = known_keys(OmegaConf.structured(Config))
        return Fault(text, "an override has no dashes", near(name, keys) or f"type {name}={value}")
    try:
        return parser.parse_override(text)
    except HydraException as error:
        plain = _PLAIN.fullmatch(text)
        if plain:
            return _plain(parser, plain[1], plain[2], text)
        if is_text(name) and "${" not in value:  # n[3-4] or a path with a quote: a text needs no grammar
            return _plain(parser, key, value, text)
        if not re.fullmatch(r"[\w./@-]+", name):
            return _no_key(text, name)
        cause = "unknown function" if "Unknown function" in str(error) else "the value does not follow Hydra's grammar"
        return Fault(text, cause, _grammar_remedy(key, value))


def _grammar_remedy(key: str, value: str) -> str:
    """How to type what Hydra's grammar did not take; a mapping or a list in quotes would be a text."""
    if value.startswith("{"):
        return _mapping(key)
    if value.startswith("["):
        return f"quote each text in the list: {key}=['TEXT', ...]"
    quoted = value.replace("'", "\\'")
    return f"quote it inside the argument: {key}='{quoted}'"


def _no_key(text: str, name: str) -> Fault:
    return Fault(text, f"{name} is not a key", _mapping(_PLAN.rstrip(".")) if name.startswith(_PLAN) else "")


def _mapping(key: str) -> str:
    return f"type {key}={{NAME: 'VALUE', ...}}, but a NAME with quotes or brackets in a YAML file (--config-dir)"


def _takes_commas(name: str, value: str) -> bool:
    """Whether commas are part of a text, as in launcher.partition=gpu,spot; a sweep has been taken apart before."""
    return name.startswith("launcher.") and is_text(name) and not re.search(r"['\"\[\]{}()$\\]", value)


def _plain(parser: OverridesParser, key: str, value: str, text: str) -> Override | Fault:
    try:
        parsed = parser.parse_override(f"{key}=")
    except HydraException:
        return _no_key(text, key.lstrip("+~"))
    parsed._value, parsed.value_type, parsed.input_line = value, ValueType.ELEMENT, text
    return parsed


def _sweep_fault(parsed: Override) -> Fault:
    text = parsed.input_line or ""
    key, _, value = text.partition("=")
    remedy = "give one value"
    if parsed.value_type is ValueType.SIMPLE_CHOICE_SWEEP:
        quoted = value.replace("'", "\\'")
        remedy = f"quote a comma inside the argument: {key}='{quoted}', or type a list: {key}=[{value}]"
    return Fault(text, "several values; a sweep needs -m", remedy)


def _choose(words: Words, parsed: Override, library: Library) -> None:
    """Note a group choice, or what is wrong with it."""
    text, group = parsed.input_line or "", parsed.key_or_group
    options = near_or_all("", library.options(group), f"options of {group}")
    fault: Fault | None = None
    if parsed.package is not None:
        fault = Fault(text, "a group has one place here", f"type {group}={parsed.value()}")
    elif parsed.type is OverrideType.DEL:
        fault = Fault(text, "a group cannot be taken away", options)
    elif group in words.groups:
        fault = Fault(text, f"{group} is chosen twice", f"keep one of {words.groups[group]} and {text}")
    else:
        value = parsed.value()
        names = value if isinstance(value, list) and value else [text.partition("=")[2].strip("'\" ")]
        for name in names:
            if library.file(group, str(name)) is None:
                remedy = near_or_all(str(name), library.options(group), f"options of {group}")
                if group in OPEN_GROUPS and "." in str(name):
                    remedy = f"for a class of your own type {group}._target_={name}"
                fault = Fault(text, f"{group} has no {name}" if name else f"no option of {group} is given", remedy)
    if fault:
        words.faults.append(fault)
        words.failed.add(group)
    else:
        words.groups[group] = f"{_prefix(group)}={text.partition('=')[2]}"


def _prefix(group: str) -> str:
    """A group as Hydra wants it: with a plus if it is not in the defaults list."""
    return group if group in GROUPS else f"+{group}"


def typed_leaves(values: Sequence[Override]) -> dict[str, Any]:
    """Dotted key -> value of all values typed; a mapping counts as its leaves."""
    leaves: dict[str, Any] = {}
    for parsed in values:
        if not parsed.is_delete():
            leaves.update(_leaves(parsed.key_or_group, parsed.value()))
    return leaves


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def set_value(config: DictConfig, parsed: Override) -> Fault | None:
    """Apply one value to a composed config in place; returns what is wrong with it, if anything.

    Keys of the schema must exist and take their type; below an open node any key may be new. What follows
    `parallel.plan.` is one module name, dots included.
    """
    key, text = parsed.key_or_group, parsed.input_line or ""
    if key.startswith(_PLAN):
        node, name = config.parallel.plan, key.removeprefix(_PLAN)
    else:
        problem = _unknown(config, key)
        if problem:
            return Fault(text, problem, near(key, known_keys(config)) or _siblings(config, key))
        node, name = config, key
    if parsed.is_delete():
        return _delete(config, node, name, parsed)
    value = parsed.value()
    if is_text(key) and isinstance(value, int | float):
        value = text.partition("=")[2].strip()  # 1e3 and 1_000 are the user's letters here, not numbers
    try:
        if node is config:
            OmegaConf.update(config, key, value, merge=True, force_add=True)
        else:
            node[name] = value
    except OmegaConfBaseException as error:
        return _refused(config, text, key, error)
    return None


def _unknown(config: DictConfig, key: str) -> str:
    """What is wrong with a key: nothing ("") for one that exists or lies below an open node."""
    node: Any = config
    path = ""
    for part in key.split("."):
        if isinstance(node, ListConfig):
            if not part.isdigit() or int(part) >= len(node):
                return f"{path} is a list of {len(node)}"
            index: Any = int(part)
        elif isinstance(node, DictConfig):
            if part not in node:
                return "" if OmegaConf.get_type(node) is dict else "unknown key"
            index = part
        else:
            return f"{path} is a value and has no keys"
        path = f"{path}.{part}" if path else part
        if OmegaConf.is_missing(node, index) or OmegaConf.is_interpolation(node, index):
            return ""
        node = node[index]
    return ""


def _siblings(config: DictConfig, key: str) -> str:
    """The remedy for a key that is near no other: what its parent has."""
    parent = key.rpartition(".")[0]
    while parent and not isinstance(OmegaConf.select(config, parent), DictConfig):
        parent = parent.rpartition(".")[0]
    names = [str(name) for name in (OmegaConf.select(config, parent) if parent else config) if name != "hydra"]
    return f"{parent or 'the top level'} has: {', '.join(names)}"


def _delete(config: DictConfig, node: DictConfig, name: str, parsed: Override) -> Fault | None:
    text, key = parsed.input_line or "", parsed.key_or_group
    parent, _, last = ("", "", name) if node is not config else name.rpartition(".")
    holder = OmegaConf.select(node, parent) if parent else node
    if not isinstance(holder, DictConfig):
        return Fault(text, "there is no such key", near(key, known_keys(config)))
    if OmegaConf.get_type(holder) is not dict:
        return Fault(text, "only arguments of a _target_ can be taken away", f"set it: {key}=VALUE")
    if last not in holder:
        return Fault(text, "there is no such key", near(key, known_keys(config)))
    if parsed.value() is not None and parsed.value() != holder[last]:
        return Fault(text, f"{key} is {holder[last]}", f"type ~{key}")
    del holder[last]
    return None


def _refused(config: DictConfig, text: str, key: str, error: OmegaConfBaseException) -> Fault:
    """The fault of a value that OmegaConf did not take."""
    full_key = error.full_key or key
    head = text if full_key == key else f"{text}: {full_key}"
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return Fault(head, "unknown key", near(full_key, known_keys(config)))
    if full_key in ("train.loss", "train.loop"):
        return Fault(head, "must have a _target_", f"type {full_key}._target_=FILE.NAME")
    if expected(full_key):
        return Fault(head, f"must be {expected(full_key)}")
    return Fault(head, str(error).splitlines()[0])
