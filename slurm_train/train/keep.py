"""Which checkpoints of a run stay on the disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
"""The file of a checkpoint that tells its step, its metrics, and the checksums of the others."""


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when a new one is written. What one rule keeps stays, whatever the others say."""

    newest: int = 0
    """So many of the newest; 0 for all."""

    every: int | None = None
    """Those whose step is a multiple of it."""

    best: int = 0
    """So many with the best `metric`."""

    metric: str = "val_loss"
    """The metric; of accuracies the highest are best, else the lowest."""

    def surplus(self, known: Mapping[Path, Mapping[str, float]]) -> list[Path]:
        """The checkpoints that do not stay.

        Args:
            known: all, oldest first, with their metrics.
        """
        if not self.newest:
            return []
        sign = -1.0 if self.metric.endswith("accuracy") else 1.0
        valued = [(sign * known[path][self.metric], path) for path in known if self.metric in known[path]]
        ranked = [path for value, path in sorted(valued, key=lambda pair: pair[0]) if value == value]
        kept = {*list(known)[-self.newest :], *ranked[: self.best]}
        return [path for path in known if path not in kept and not (self.every and _step(path) % self.every == 0)]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def metrics_of(path: Path) -> dict[str, float]:
    """The figures in the manifest of a checkpoint; none if it cannot be read."""
    try:
        metrics = json.loads((path / MANIFEST).read_text())["metrics"]
        return {str(name): float(value) for name, value in metrics.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
