"""What can be said of a data set before a run starts: reads sizes and headers, downloads nothing, needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_train.data import sources
from slurm_train.data.corpus import check_boundaries, find_corpus
from slurm_train.data.idx import IMAGES, LABELS, read_shape
from slurm_train.data.sequences import cut
from slurm_train.data.token_layout import check_ignore, token_layout
from slurm_train.errors import DataError

FASHION_MNIST = "slurm_train.data.fashion_mnist.FashionMNIST"
BYTES = "slurm_train.data.text.Bytes"
TOKEN_FILE = "slurm_train.data.tokens.TokenFile"
CLASSES = 10


@dataclass(frozen=True)
class DataFacts:
    """What a run will train on.

    Attributes:
        source: one line for humans.
        train_samples: number of training samples, validation included.
        test_samples: number of test samples.
        sample_shape: shape of one input; of a sequence of tokens its length.
        classes: number of classes; None for a regression, or where it is not known.
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
        DataError: what the user named is missing, broken or too small, or an argument cannot be.
    """
    facts = _FACTS.get(str(data_config.get("_target_")))
    return facts(data_config) if facts else None


def _fashion_mnist_facts(config: Mapping[str, Any]) -> DataFacts:
    download = config.get("download", True)
    if not isinstance(download, bool):
        raise DataError("must be true or false", f"data.download={download}")
    source = sources.find(config.get("root"))
    if source is None and download and sources.cache_directory() is not None:
        text = f"to be downloaded to {sources.cache_directory()} (offline: {sources.SAMPLE_TEXT})"
        return DataFacts(text, 60_000, 10_000, (1, 28, 28), CLASSES, downloads=True)
    source = source or sources.locate(None, download=False)
    train, test = split_shape(source, "train"), split_shape(source, "test")
    return DataFacts(source.text, train[0], test[0], (1, *train[1:]), CLASSES, downloads=False)


def _bytes_facts(config: Mapping[str, Any]) -> DataFacts:
    check_boundaries(config.get("boundaries", "keep"))
    corpus = find_corpus(config.get("path"), config.get("files"))
    length = config.get("length", 256)
    sequences = cut(corpus.size, length, config.get("test", 0.05), corpus.text)
    return DataFacts(corpus.text, sequences.train, sequences.test, (length,), 256, downloads=False)


def _token_file_facts(config: Mapping[str, Any]) -> DataFacts:
    check_ignore(config.get("ignore"))
    layout = token_layout(config.get("path"), config.get("dtype", "uint16"))
    length = config.get("length", 1024)
    sequences = cut(layout.count, length, config.get("test", 0.05), layout.text)
    return DataFacts(layout.text, sequences.train, sequences.test, (length,), None, downloads=False)


_FACTS: Mapping[str, Callable[[Mapping[str, Any]], DataFacts]] = {
    FASHION_MNIST: _fashion_mnist_facts,
    BYTES: _bytes_facts,
    TOKEN_FILE: _token_file_facts,
}


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
