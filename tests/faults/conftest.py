"""Prints the table of faults at the end."""

from __future__ import annotations

import pytest

from tests.faults.table import ROWS, table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table, of the faults whose tests have passed."""
    if ROWS:
        terminalreporter.section(f"{len(ROWS)} faults")
        terminalreporter.write_line(table())
