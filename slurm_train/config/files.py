"""What is wrong with a config file, told with the file's name and line: Hydra's errors translated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from slurm_train.config.library import GROUPS, Library, shown
from slurm_train.config.names import expected, known_keys, near, near_or_all
from slurm_train.config.schema import Config
from slurm_train.errors import Fault


def read_mapping(path: Path) -> DictConfig | Fault:
    """The mapping in a yaml file, or why there is none."""
    try:
        content = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        return Fault(f"{shown(path)}, line {line}", f"is not valid yaml: {_lower(error.problem or str(error))}")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
        return Fault(shown(path), f"cannot be read: {reason}")
    return content if isinstance(content, DictConfig) else Fault(shown(path), "must be a mapping of keys, not a list")


def composition_fault(error: Exception, library: Library, typed: Sequence[str]) -> Fault:
    """The fault behind an exception of Hydra's composition.

    Args:
        error: what Hydra raised.
        library: the config directories.
        typed: the overrides that were composed: the culprits when no file is.
    """
    chain = list(_chain(error))
    chosen = [file for text in typed if (file := library.file(*text.lstrip("+").split("=", 1)))]
    missing = next((e for e in chain if isinstance(e, MissingConfigException)), None)
    if missing:
        return _missing_fault(missing, library, chosen, typed)
    path = _named_file(chain, library)
    users = [file for place in library.users for file in sorted(place.glob("*/*.yaml"))]
    unread = isinstance(chain[0], OSError | UnicodeDecodeError)  # Hydra does not say which file it could not read
    for file in [path] if path else [*chosen, *(users if unread else ())]:
        content = read_mapping(file)
        if isinstance(content, Fault):
            return content
    causes = [e for e in chain if isinstance(e, OmegaConfBaseException)]
    if causes and path:
        return _key_fault(next((e for e in causes if e.full_key), causes[-1]), path)
    reason = re.sub(r"^In '[^']*': ", "", _first_line(chain[0]))
    if isinstance(chain[0], RecursionError):
        reason = "its defaults list leads back to itself"
    culprits = [text for text in typed if "hydra" in text and text.lstrip("+").partition("=")[0] in reason]
    path = path or next((file for file in chosen if file in users), None)
    if path and not culprits:
        return Fault(_line(path, "defaults"), reason)
    return Fault(" ".join(culprits or typed) or "config", reason)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _named_file(chain: Sequence[BaseException], library: Library) -> Path | None:
    """The file that an error names, such as "In 'experiment/mine': ..."."""
    for error in chain:
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            return Path(error.problem_mark.name)
        named = re.search(r"[Ii]n '?([\w./-]+)'?[:,]", str(error))
        group, _, option = named[1].rpartition("/") if named else ("", "", "")
        path = library.file(group, option) if option else None
        if path:
            return path
    return None


def _key_fault(cause: OmegaConfBaseException, path: Path) -> Fault:
    key = cause.full_key or _plain_section(path)
    if not key:
        return Fault(shown(path), _first_line(cause))
    if key.partition(".")[0] == path.parent.name and path.parent.name not in GROUPS:
        remedy = "start the file with the line: # @package _global_"
        return Fault(shown(path), f"its keys are placed below {path.parent.name}", remedy)
    place = f"{_line(path, key)}: {key}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return Fault(place, "unknown key", near(key, known_keys(OmegaConf.structured(Config))))
    return Fault(place, f"must be {expected(key)}" if expected(key) else _first_line(cause))


def _plain_section(path: Path) -> str:
    """The section that a file gives as a plain value: OmegaConf does not name its key."""
    content = read_mapping(path)
    sections = [entry.name for entry in fields(Config) if expected(entry.name).startswith("a mapping")]
    if isinstance(content, Fault):
        return ""
    return next((name for name in sections if name in content and not OmegaConf.is_config(content[name])), "")


def _missing_fault(
    error: MissingConfigException, library: Library, chosen: Sequence[Path], typed: Sequence[str]
) -> Fault:
    """A defaults list asks for a file that does not exist: the first one that mentions it is told."""
    wanted = (error.missing_cfg_file or "").lstrip("/")
    group, _, option = wanted.rpartition("/")
    users = [file for place in library.users for file in sorted(place.glob("*/*.yaml"))]
    asking = (file for file in [*chosen, *users] if re.search(rf"[:-] *{re.escape(option)}\b", _text(file)))
    path = next(asking, None)
    place = _line(path, "defaults", option) if path else " ".join(typed)
    if group and library.options(group):
        remedy = near_or_all(option, library.options(group), f"options of {group}")
        return Fault(place, f"{group} has no {option}", remedy)
    return Fault(place, f"there is no config file {wanted}", near_or_all(wanted, library.groups(), "groups"))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _line(path: Path, key: str, word: str = "") -> str:
    """The place "FILE, line N" of a key in a file; the file alone where the line is not found.

    The leading parts of the key may be missing in the file: those of its package. `word`, if given, is looked for from
    the key on.
    """
    text = _text(path)
    parts = key.split(".")
    for start in range(len(parts)):
        line = _position(yaml.compose(text, yaml.SafeLoader), parts[start:])
        if line is None:
            continue
        after = [n for n, content in enumerate(text.splitlines(), 1) if n >= line and word in content]
        return f"{shown(path)}, line {after[0] if after else line}"
    return shown(path)


def _position(node: Any, parts: list[str]) -> int | None:
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if name.value == parts[0]:
            return int(name.start_mark.line) + 1 if len(parts) == 1 else _position(value, parts[1:])
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
