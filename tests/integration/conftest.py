"""For the tests of several ranks: worlds that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.integration.worlds import World, Worlds


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """`world(n)` is a gloo world of n ranks, started at its first use and shared by all tests of the session."""
    with Worlds() as worlds:
        yield worlds.get
