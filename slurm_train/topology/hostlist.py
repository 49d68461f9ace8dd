"""Slurm's compressed lists: `n[001-003,007]` for host names, `4(x2),1` for counts per node.

The syntax is that of SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE (Slurm manual, sbatch, "Output environment
variables"). It is read here because scontrol is often missing on nodes and in containers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from slurm_train.errors import RankError

LARGEST = 1_000_000
"""More names than any cluster has; a longer list is taken for a mistake before it fills the memory."""

_DIGITS = re.compile(r"(\d+)$", re.ASCII)


def expand(text: str) -> list[str]:
    """All host names of a node list, in its order: `na,nb[001,003-004]` -> na, nb001, nb003, nb004.

    Zero padding is kept; several brackets in one name give the cross product.

    Raises:
        RankError: the list is malformed, or longer than any cluster.
    """
    names: list[str] = []
    for part in _split(text):
        pieces = [_piece(piece, text) for piece in re.split(r"(\[[^\[\]]*\])", part) if piece]
        _check_size(len(names) + _product(pieces), text)
        names.extend(map("".join, itertools.product(*pieces)))
    return names


def compress(names: Iterable[str]) -> str:
    """A node list that `expand` gives back as these names, in this order: n1, n2, n4 -> n[1-2,4]."""
    groups: list[tuple[str, list[str]]] = []
    for name in names:
        if not name or set(name) & set("[], \t\n"):
            raise RankError(f"{name!r} is no host name")
        found = _DIGITS.search(name)
        prefix, digits = (name[: found.start()], found[1]) if found else (name, "")
        if digits and groups and groups[-1][0] == prefix and groups[-1][1][0]:
            groups[-1][1].append(digits)
        else:
            groups.append((prefix, [digits]))
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
    parts = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+", text)
    if ",".join(parts) != text.strip() or not parts:
        raise RankError(f"malformed node list {text[:80]!r}")
    return parts


def _piece(piece: str, text: str) -> list[str]:
    """The alternatives that a piece of a name stands for: itself, or the numbers in its brackets."""
    if not piece.startswith("["):
        return [piece]
    numbers: list[str] = []
    for part in piece[1:-1].split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
        if not found or len(part) > 40:
            raise RankError(f"malformed node list {text[:80]!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise RankError(f"a range runs backwards in node list {text[:80]!r}")
        _check_size(len(numbers) + last - first + 1, text)
        width = len(found[1])
        numbers += [found[1]] if found[2] is None else [f"{number:0{width}}" for number in range(first, last + 1)]
    return numbers


def _product(pieces: Sequence[Sequence[str]]) -> int:
    size = 1
    for piece in pieces:
        size *= len(piece)
    return size


def _check_size(size: int, text: str) -> None:
    if size > LARGEST:
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
    return len(number) <= 18 and int(number) == int(last) + 1 and number == f"{int(number):0{len(first)}}"
