"""The points of a sweep: the product of the values that overrides such as `optim.lr=1e-3,1e-2` list."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from slurm_train.errors import ConfigError, Fault


def points(overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of each point, in the order in which Hydra's basic sweeper visits them.

    Args:
        overrides: as typed, in Hydra's sweep grammar: a,b,c, choice(...), range(...).

    Raises:
        ConfigError: a sweep that has no list of points, such as interval(0,1).
    """
    parser = OverridesParser.create()
    return list(itertools.product(*(_values(parser, text) for text in overrides)))


def _values(parser: OverridesParser, text: str) -> list[str]:
    try:
        parsed = parser.parse_override(text)
    except HydraException:  # told as a fault where the point is composed
        return [text]
    if not parsed.is_sweep_override():
        return [text]
    if not parsed.is_discrete_sweep():
        raise ConfigError([Fault(text, "has no list of points", "list the values: a,b,c")])
    try:
        return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
    except (HydraException, NotImplementedError, TypeError) as error:
        raise ConfigError([Fault(text, f"cannot be listed: {error}", "list the values: a,b,c")]) from None
