"""Fashion-MNIST: 28 x 28 grey images of clothes in ten classes (Xiao, Rasul and Vollgraf, 2017, arXiv:1708.07747)."""

from __future__ import annotations

import os

import torch

from slurm_train.data import sources
from slurm_train.data.facts import CLASSES, split_shape
from slurm_train.data.idx import IMAGES, LABELS, read_idx
from slurm_train.data.resident import TensorData
from slurm_train.errors import DataError

MEAN = 0.2860
"""Mean of all training pixels, scaled to 0..1."""

STD = 0.3530
"""Standard deviation of all training pixels, scaled to 0..1."""


def FashionMNIST(split: str = "train", root: str | os.PathLike[str] | None = None, download: bool = True) -> TensorData:
    """One split of Fashion-MNIST, held in memory.

    Args:
        split: "train" or "test".
        root: directory with the four idx files, .gz or not. Default: the Debian package's directory, else the
            download cache, else a download, else the sample that is embedded in this package.
        download: whether the files may be downloaded.

    Returns:
        inputs uint8 [N, 1, 28, 28], which become (x / 255 - MEAN) / STD; targets int64 [N] in 0..9;
        `source` says in one line where they come from.

    Raises:
        DataError: `root` does not hold the four files, or a file is broken.
    """
    if split not in ("train", "test"):
        raise DataError(f"there is no split {split!r}", "data.split", "take train or test")
    source = sources.locate(root, download)
    split_shape(source, split)
    images = torch.from_numpy(read_idx(source.images(split), IMAGES, source.key))
    labels = torch.from_numpy(read_idx(source.labels(split), LABELS, source.key))
    largest = int(labels.max())
    if largest >= CLASSES:
        raise DataError(f"{source.labels(split)} holds the label {largest}; 0 to 9 are expected", source.key)
    return TensorData(images.unsqueeze(1), labels.long(), scale=1 / (255 * STD), shift=-MEAN / STD, source=source.text)
