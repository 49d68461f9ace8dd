"""Slurm's compressed lists: `n[001-003,007]` for host names, `4(x2),1` for counts per node.

The syntax is that of SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE (Slurm manual, sbatch, "Output environment
variables"). It is read here because scontrol is often missing on nodes and in containers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from math import prod

from slurm_train.errors import RankError

LARGEST = 1_000_000
"""More names than any cluster has; a longer list is taken for a mistake before it fills the memory."""

_NAME = re.compile(r"[^,\[\]\s]+")
_PART = re.compile(r"(?:[^,\[\]\s]+|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"(\[[^\[\]]*\])")
_NUMBERS = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*", re.ASCII)
_DIGITS = re.compile(r"(\d+)$", re.ASCII)
_LONGEST_NUMBER = 18  # digits of a number to count with; Python refuses to read numbers of some thousand


def expand(text: str) -> list[str]:
    """All host names of a node list, in its order: `na,nb[001,003-004]` -> na, nb001, nb003, nb004.

    Zero padding is kept; several brackets in one name give the cross product.

    Raises:
        RankError: the list is malformed, or longer than any cluster.
    """
    names: list[str] = []
    for part in _split(text):
        if "[" not in part:
            names.append(part)
            continue
        pieces: list[list[str]] = []
        for piece in filter(None, _BRACKET.split(part)):
            pieces.append(_piece(piece, text))
            _check_size(len(names) + prod(map(len, pieces)), text)
        names.extend(map("".join, itertools.product(*pieces)))
    return names


def compress(names: Iterable[str]) -> str:
    """A node list that `expand` gives back as these names, in this order: n1, n2, n4 -> n[1-2,4].

    Raises:
        RankError: there are no names, or one is no host name.
    """
    groups: list[tuple[str, list[str]]] = []
    for name in names:
        if not _NAME.fullmatch(name):
            raise RankError(f"{name!r} is no host name")
        found = _DIGITS.search(name)
        prefix, digits = (name[: found.start()], found[1]) if found else (name, "")
        if digits and groups and groups[-1][0] == prefix and groups[-1][1][0]:
            groups[-1][1].append(digits)
        else:
            groups.append((prefix, [digits]))
    if not groups:
        raise RankError("no host names to make a node list of")
    return ",".join(_bracket(prefix, numbers) for prefix, numbers in groups)


def expand_counts(text: str) -> list[int]:
    """Counts per node: `4(x2),1` -> [4, 4, 1].

    Raises:
        RankError: the text is malformed, or longer than any cluster.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip(), re.ASCII)
        if not found:
            raise RankError(f"malformed counts per node {text[:80]!r}")
        times = int(found[2] or 1)
        _check_size(len(counts) + times, text)
        counts += [int(found[1])] * times
    return counts


def compress_counts(counts: Sequence[int]) -> str:
    """Counts per node as Slurm writes them: [4, 4, 1] -> 4(x2),1."""
    runs = [(count, len(list(same))) for count, same in itertools.groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def _split(text: str) -> list[str]:
    """The parts between the commas outside of brackets."""
    parts = _PART.findall(text)
    if ",".join(parts) != text.strip() or not parts:
        raise RankError(f"malformed node list {text[:80]!r}")
    return parts


def _piece(piece: str, text: str) -> list[str]:
    """The alternatives that a piece of a name stands for: itself, or the numbers in its brackets."""
    if not piece.startswith("["):
        return [piece]
    if not _NUMBERS.fullmatch(piece, 1, len(piece) - 1):
        raise RankError(f"malformed node list {text[:80]!r}")
    numbers: list[str] = []
    for part in piece[1:-1].split(","):
        low, dash, high = part.partition("-")
        if dash:
            numbers += _range(low, high, LARGEST - len(numbers), text)
        else:
            numbers.append(part)
    return numbers


def _range(low: str, high: str, room: int, text: str) -> list[str]:
    """The numbers from low to high, as wide as low is written, if they are not more than there is room for."""
    if max(len(low), len(high)) > _LONGEST_NUMBER:
        raise RankError(f"a number is too long in node list {text[:80]!r}")
    first, last = int(low), int(high)
    if last < first:
        raise RankError(f"a range runs backwards in node list {text[:80]!r}")
    _check_size(last - first + 1, text, room)
    return list(map(f"%0{len(low)}d".__mod__, range(first, last + 1)))


def _check_size(size: int, text: str, room: int = LARGEST) -> None:
    if size > room:
        raise RankError(f"more than {LARGEST:,} entries in {text[:80]!r}")


def _bracket(prefix: str, numbers: Sequence[str]) -> str:
    if len(numbers) == 1:
        return prefix + numbers[0]
    ranges: list[tuple[str, str]] = []
    for number in numbers:
        if ranges and _follows(ranges[-1], number):
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return f"{prefix}[{','.join(a if a == b else f'{a}-{b}' for a, b in ranges)}]"


def _follows(run: tuple[str, str], number: str) -> bool:
    """Whether `number` continues the run: the next one, written as `expand` would write it."""
    first, last = run
    if max(len(last), len(number)) > _LONGEST_NUMBER:
        return False
    return int(number) == int(last) + 1 and number == f"{int(number):0{len(first)}}"
