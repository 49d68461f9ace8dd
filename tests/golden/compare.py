"""Whole files that a text must equal: a change shows as a diff of the file, and is looked at as one."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parent


def check_golden(path: Path, text: str) -> None:
    """Fail unless the file holds this text. With UPDATE_GOLDEN=1 in the environment it is written first."""
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path} is missing; UPDATE_GOLDEN=1 pytest writes it"
    assert text == path.read_text(encoding="utf-8"), f"{path} differs; UPDATE_GOLDEN=1 pytest writes it anew"
