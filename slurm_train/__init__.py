"""Train PyTorch models on one process, on many, and on a cluster, with one command that stays the same."""

from __future__ import annotations

__version__ = "0.1.0"
