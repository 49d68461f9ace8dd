"""What keys there are, what each may hold, and which of them a mistyped one is near to."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from slurm_train.config.schema import Config

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


def known_keys(config: DictConfig) -> list[str]:
    """All dotted keys of a composed config, inner ones and leaves; those of Hydra left out."""
    return [key for key in _walk(config, "") if key.partition(".")[0] != "hydra"]


def _walk(node: DictConfig, prefix: str) -> Iterator[str]:
    for name in cast("dict[str, Any]", node):
        key = f"{prefix}{name}"
        yield key
        if key != "hydra" and not OmegaConf.is_missing(node, name) and not OmegaConf.is_interpolation(node, name):
            child = node[name]
            if isinstance(child, DictConfig):
                yield from _walk(child, f"{key}.")


def near(name: str, known: Iterable[str]) -> str:
    """Names that `name` may have been meant for, as a remedy ("did you mean train.epochs?"); empty if none is near.

    Dotted keys are compared whole and by their last part, so that `epochs` finds `train.epochs`.
    """
    scores = {candidate: _likeness(name.lower(), candidate.lower()) for candidate in known}
    best = max(scores.values(), default=0.0)
    found = sorted((c for c in scores if scores[c] >= max(0.65, best - 0.1)), key=lambda c: (-scores[c], c))[:3]
    return f"did you mean {' or '.join(found)}?" if found else ""


def _likeness(name: str, candidate: str) -> float:
    whole = difflib.SequenceMatcher(None, name, candidate).ratio()
    if "." not in candidate:
        return whole
    last = difflib.SequenceMatcher(None, name.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
    return max(whole, 0.95 * last if last > 0.8 else 0.0)


def near_or_all(name: str, known: Iterable[str], what: str) -> str:
    """The remedy for an unknown name out of a short list: the near ones, then the whole list."""
    names = sorted(known)
    everything = f"{what}: {', '.join(names)}" if names else f"{what}: none"
    return f"{near(name, names)} {everything}".strip()


def expected(key: str) -> str:
    """What a typed key may hold, in words ("an integer or null"); empty for a key that the schema does not type."""
    annotation = _annotation(key)
    if annotation is None:
        return ""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    words = [_word(option) for option in options if option is not types.NoneType]
    return " or ".join([*words, "null"] if types.NoneType in options else words)


def _word(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        return "a list such as [a,b]"
    return _WORDS.get(kind, "a mapping such as {key: value}")


def is_text(key: str) -> bool:
    """Whether the schema says that this key holds a text."""
    return _annotation(key) in (str, str | None)


def _annotation(key: str) -> Any:
    """The type of a key of the schema, or of the values of its mappings; None below an open node."""
    kind: Any = Config
    for part in key.split("."):
        if typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
            break
        if not dataclasses.is_dataclass(kind):
            return None
        kind = _hints(cast(type, kind)).get(part)
    return None if kind is Any else kind


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
