"""What became of each fault: noted by the tests, and printed as one table at their end."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_train.report.table import aligned

BITWISE = "yes, same weights"
CLEAR = "no, ends clearly"


@dataclass(frozen=True)
class Row:
    """One fault."""

    fault: str
    survived: str
    """BITWISE, CLEAR, or in words."""

    lost: int | None = None
    """Steps that were done a second time; None where nothing goes on."""

    seconds: float | None = None
    """From the start that went on to its first new step."""


ROWS: list[Row] = []


def note(fault: str, survived: str, lost: int | None = None, seconds: float | None = None) -> None:
    """Add a row."""
    ROWS.append(Row(fault, survived, lost, seconds))


def table() -> str:
    """All rows, as text."""
    head = ("fault", "survived", "lost steps", "s to recover")
    rows = [
        (row.fault, row.survived, _shown(row.lost), "-" if row.seconds is None else f"{row.seconds:.1f}")
        for row in ROWS
    ]
    return aligned([head, *rows])


def _shown(number: int | None) -> str:
    return "-" if number is None else str(number)
