"""What can be said of a data set before a run starts: reads headers only, downloads nothing, needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_train.data import sources
from slurm_train.data.idx import IMAGES, LABELS, read_shape
from slurm_train.errors import DataError

FASHION_MNIST = "slurm_train.data.fashion_mnist.FashionMNIST"
CLASSES = 10


@dataclass(frozen=True)
class DataFacts:
    """What a run will train on.

    Attributes:
        source: one line for humans.
        train_samples: number of training samples, validation included.
        test_samples: number of test samples.
        sample_shape: shape of one input.
        classes: number of classes; None for a regression.
        downloads: whether the run would download the data first.
    """

    source: str
    train_samples: int
    test_samples: int
    sample_shape: tuple[int, ...]
    classes: int | None
    downloads: bool


def data_facts(data_config: Mapping[str, Any]) -> DataFacts | None:
    """Facts of the data set that a `data` config stands for; None for a user's own, which is not looked into.

    Raises:
        DataError: the directory that the user named is missing, a file's header is broken, or `download` is no bool.
    """
    if data_config.get("_target_") != FASHION_MNIST:
        return None
    download = data_config.get("download", True)
    if not isinstance(download, bool):
        raise DataError("must be true or false", f"data.download={download}")
    source = sources.find(data_config.get("root"))
    if source is None and download and sources.cache_directory() is not None:
        text = f"to be downloaded to {sources.cache_directory()} (offline: {sources.SAMPLE_TEXT})"
        return DataFacts(text, 60_000, 10_000, (1, 28, 28), CLASSES, downloads=True)
    source = source or sources.locate(None, download=False)
    train, test = split_shape(source, "train"), split_shape(source, "test")
    return DataFacts(source.text, train[0], test[0], (1, *train[1:]), CLASSES, downloads=False)


def split_shape(source: sources.Source, split: str) -> tuple[int, ...]:
    """Count, rows and columns of a split's images, checked against its labels.

    Raises:
        DataError: a header is broken, the counts differ, or the images are not 28 x 28.
    """
    images, labels = source.images(split), source.labels(split)
    shape = read_shape(images, IMAGES, source.key)
    (count,) = read_shape(labels, LABELS, source.key)
    if shape[1:] != (28, 28):
        raise DataError(f"{images} holds images of {shape[1]} x {shape[2]} pixels; 28 x 28 are expected", source.key)
    if shape[0] != count:
        raise DataError(f"{images} holds {shape[0]:,} images but {labels.name} {count:,} labels", source.key)
    return shape
