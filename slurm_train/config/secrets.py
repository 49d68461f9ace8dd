"""Secrets in a configuration: refused, for it is written into files that people read, copy and send.

Whoever needs one reads it from the environment where it is used; jobs inherit the environment of their submission.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from omegaconf import DictConfig, OmegaConf

from slurm_train.errors import Fault

_NAMES = {"token", "secret", "password", "passwd", "passphrase", "webhook", "credential", "credentials", "apikey"}
_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("auth", "key"), ("web", "hook")}
_SHAPES = re.compile(
    r"\b(gh[opsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z]{20,}|AKIA[0-9A-Z]{16}"
    r"|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,})|https?://[^/\s:@]+:[^/\s@]+@|hooks\.slack\.com/services/\w"
    r"|discord(?:app)?\.com/api/webhooks/\w|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""What tokens of well-known services, addresses with a password, and addresses of web hooks look like."""

_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(?!\s|$|\"\"|''|[\"']?\$)")
"""In a shell line: a variable that is given a value which is not itself taken from a variable."""


def secret_faults(config: DictConfig) -> Iterator[Fault]:
    """A fault for each value that looks like a secret, by the name of its key or by itself. The value is not told."""
    for key, value in _leaves(OmegaConf.to_container(config, resolve=True), ""):
        name = key.rpartition(".")[2]
        if not isinstance(value, str) or not value:
            continue
        if key.startswith("launcher.setup."):
            names = [found for found in _ASSIGNED.findall(value) if is_secret(found)]
            if names or _SHAPES.search(value):
                yield _fault(key, names[0] if names else "")
        elif (is_secret(name) and _can_be_one(name, value)) or _SHAPES.search(value):
            yield _fault(key, name if key.startswith("launcher.env.") else "")


def is_secret(name: str) -> bool:
    """Whether the name of a key or variable says that its value is a secret.

    >>> [name for name in ("WANDB_API_KEY", "hfToken", "max_tokens", "tokenizer", "key_dim") if is_secret(name)]
    ['WANDB_API_KEY', 'hfToken']
    """
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    lower = [word.lower() for word in words]
    return not _NAMES.isdisjoint(lower) or not _PAIRS.isdisjoint(pairwise(lower))


def _can_be_one(name: str, value: str) -> bool:
    """Not a path of a file that holds one, nor a token of a text, such as eos_token=</s>."""
    *_, last = re.split(r"[_\-.]", name.lower())
    text = last == "token" and not re.fullmatch(r"[\w.~+/=-]{12,}", value)
    return last not in ("path", "file", "dir", "name") and not text


def _fault(key: str, variable: str) -> Fault:
    remedy = (
        f"export {variable} in the shell where you submit: jobs inherit it"
        if variable
        else "let your code read it from an environment variable: jobs inherit those of your shell"
    )
    return Fault(key, "looks like a secret, and would be written into config.yaml", remedy)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield key, value
        return
    for name, item in items:
        yield from _leaves(item, f"{key}.{name}" if key else str(name))
