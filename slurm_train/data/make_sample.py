"""Makes the embedded sample: `python -m slurm_train.data.make_sample SOURCE_DIR OUT_DIR`.

The first 1,200 training and 200 test images of each class, in the order of the full files.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slurm_train.data import sources
from slurm_train.data.idx import IMAGES, LABELS, read_idx

if TYPE_CHECKING:
    from numpy.typing import NDArray

PER_CLASS = {"train": 1200, "test": 200}


def make_sample(source_directory: Path, out_directory: Path) -> None:
    """Write the sample's four .gz files; the same source gives the same bytes.

    Raises:
        DataError: the source directory lacks a file, or a file is broken.
    """
    source = sources.named(source_directory)
    out_directory.mkdir(parents=True, exist_ok=True)
    for split, per_class in PER_CLASS.items():
        labels = read_idx(source.labels(split), LABELS, source.key)
        chosen = first_of_each_class(labels, per_class)
        images = read_idx(source.images(split), IMAGES, source.key)
        for path, values in ((source.images(split), images[chosen]), (source.labels(split), labels[chosen])):
            name = path.name.removesuffix(".gz")
            (out_directory / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(values), 9, mtime=0))


def first_of_each_class(labels: NDArray[np.uint8], per_class: int) -> NDArray[np.intp]:
    """Positions of the first `per_class` samples of each class, ascending."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:per_class] for label in np.unique(labels)]))


def idx_bytes(values: NDArray[np.uint8]) -> bytes:
    """An array of unsigned bytes as the content of an idx file."""
    header = bytes([0, 0, 0x08, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    return header + values.tobytes()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m slurm_train.data.make_sample SOURCE_DIR OUT_DIR")
    make_sample(Path(sys.argv[1]), Path(sys.argv[2]))
