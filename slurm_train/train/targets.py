"""From a `_target_` in the configuration to an object; what goes wrong on the way is told in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from slurm_train.errors import SlurmTrainError, UserError


def build(node: DictConfig, key: str, **extra: Any) -> Any:
    """Call the node's `_target_` with the node's other keys and `extra`.

    Nested nodes with a `_target_` of their own are built first.

    Args:
        node: the configuration of one object.
        key: where it stands, e.g. "model"; named in errors.

    Raises:
        UserError: the target does not import, or raises when it is called; the real cause is shown.
    """
    find(node, key)
    try:
        return instantiate(OmegaConf.to_container(node, resolve=True), **extra, _convert_="all")
    except HydraException as error:
        cause = error.__cause__ or error
        if isinstance(cause, SlurmTrainError):
            raise cause from None
        raise UserError(f"{node._target_} raised {_named(cause)}", key, "look at its arguments") from cause


def find(node: DictConfig, key: str) -> Callable[..., Any]:
    """The class or function that the node's `_target_` names, not called.

    Raises:
        UserError: it does not import, with the real cause.
    """
    try:
        found = get_object(str(node._target_))
    except Exception as error:  # importing a user's file can raise anything
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__  # type: ignore[assignment]
        raise UserError(f"{node._target_} cannot be imported: {_named(cause)}", f"{key}._target_") from error
    if not callable(found):
        raise UserError(f"{node._target_} is not a class or function", f"{key}._target_")
    return found  # type: ignore[no-any-return]


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a class or function accepts an argument `name` by name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
