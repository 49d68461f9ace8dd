"""Time limits in Slurm's formats (Slurm manual, sbatch, --time)."""

from __future__ import annotations

import re

from slurm_train.errors import UserError

FORMATS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"


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
