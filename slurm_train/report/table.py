"""Rows of text as a table: drawn on a terminal, plain and in full width elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines with aligned columns.

    >>> print(aligned([["RUN", "STEP"], ["first", "1"]]))
    RUN    STEP
    first  1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in padded)


def show(rows: Sequence[Sequence[str]], stream: TextIO | None = None) -> None:
    """Print a table, the head first. On a terminal too narrow for it the longest cells are cut.

    Args:
        rows: of the same length.
        stream: where to; standard output by default.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        print(aligned(rows), file=stream)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    Console(file=stream).print(table)
