"""Time limits and memory sizes in Slurm's formats (Slurm manual, sbatch, --time and --mem)."""

from __future__ import annotations

import math
import re

from slurm_train.errors import UserError

FORMATS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"


LEAD_SECONDS = 10
"""What ranks need before they save: to end a step, to agree on it, and afterwards to leave."""


def lead_seconds(save_seconds: float) -> int:
    """How long before its time limit a job is to be told to save.

    Args:
        save_seconds: the longest that a save took; twice that is allowed for.
    """
    return LEAD_SECONDS + math.ceil(2 * save_seconds)


def parse_time(text: str) -> int | None:
    """Seconds of a time limit; None for `infinite` or `unlimited`. A bare number is minutes.

    Raises:
        UserError: it is in none of Slurm's formats, or zero.
    """
    text = str(text).strip()
    if text.lower() in ("infinite", "unlimited"):
        return None
    found = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", text, re.ASCII)
    if not found:
        raise UserError(f"{text!r} is not a time limit", remedy=f"write {FORMATS}")
    days, *rest = found.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:  # hours first
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # minutes first
        hours, minutes, seconds = 0, *[*numbers, 0][:2]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise UserError("a time limit of zero", remedy=f"write {FORMATS}")
    return total


MEMORY_FORMATS = "a number with K, M, G or T, such as 512M or 2.5GB; without a unit it is megabytes; 0 for all"


def parse_memory(text: str) -> int:
    """Megabytes of a memory size; 0 means all that a node has. A bare number is megabytes, as in Slurm.

    Slurm itself takes whole numbers only: 2.5GB is 2560 megabytes here. What is no whole number of megabytes is
    rounded up.

    Raises:
        UserError: it is no size, or it is negative.
    """
    text = str(text).strip()
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*(?:([kmgt])(?:i?b)?)?", text, re.ASCII | re.IGNORECASE)
    if not found:
        raise UserError(f"{text!r} is not a memory size", remedy=f"write {MEMORY_FORMATS}")
    factor = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024**2}[(found[2] or "m").lower()]
    return math.ceil(float(found[1]) * factor)
