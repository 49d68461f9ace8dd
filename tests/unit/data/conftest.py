from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slurm_train.data import sources
from slurm_train.data.make_sample import idx_bytes

COUNTS = {"train": 60, "t10k": 20}


def content(count: int, seed: int = 0) -> tuple[bytes, bytes]:
    """The contents of a file of random images and one of labels."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    return idx_bytes(images), idx_bytes((np.arange(count) % 10).astype(np.uint8))


@pytest.fixture
def make_files() -> Callable[..., Path]:
    """Writes four small idx files into a directory and returns it."""

    def make(directory: Path, compressed: bool = True) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        for prefix, count in COUNTS.items():
            images, labels = content(count)
            for name, data in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
                if compressed:
                    (directory / f"{name}.gz").write_bytes(gzip.compress(data, 1, mtime=0))
                else:
                    (directory / name).write_bytes(data)
        return directory

    return make


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees this machine's data sets, cache or proxy."""
    monkeypatch.setattr(sources, "DEBIAN", tmp_path / "no-debian-package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
