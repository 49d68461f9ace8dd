from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from slurm_train.data import sources
from slurm_train.data.download import SHA256
from slurm_train.data.fashion_mnist import MEAN, STD, FashionMNIST
from slurm_train.data.idx import IMAGES, LABELS, read_idx
from slurm_train.data.make_sample import PER_CLASS, first_of_each_class, idx_bytes, make_sample
from slurm_train.errors import DataError

REAL = Path("/usr/share/datasets/fashion-mnist")
needs_real_data = pytest.mark.skipif(
    not (REAL / "train-images-idx3-ubyte.gz").exists(),
    reason="the Debian package dataset-fashion-mnist is not installed",
)


@pytest.mark.parametrize("compressed", [True, False])
def test_types_shapes_and_floats(tmp_path: Path, make_files: Callable[..., Path], compressed: bool) -> None:
    data = FashionMNIST("test", root=make_files(tmp_path / "ein Ordner", compressed))
    assert (data.inputs.dtype, data.inputs.shape) == (torch.uint8, (20, 1, 28, 28))
    assert (data.targets.dtype, data.targets.tolist()) == (torch.int64, [i % 10 for i in range(20)])
    assert data.source == str(tmp_path / "ein Ordner")
    image, label = data[3]
    assert label == 3
    torch.testing.assert_close(image, (data.inputs[3] / 255 - MEAN) / STD)


def test_label_above_nine(tmp_path: Path, make_files: Callable[..., Path]) -> None:
    root = make_files(tmp_path / "root")
    labels = np.full(60, 10, np.uint8)
    (root / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(labels)))
    with pytest.raises(DataError, match=r"^data.root: .* holds the label 10; 0 to 9 are expected"):
        FashionMNIST(root=root)


def test_unknown_split() -> None:
    with pytest.raises(DataError, match=r"data.split: there is no split 'valid'"):
        FashionMNIST("valid", download=False)


@pytest.mark.parametrize(("split", "per_class"), PER_CLASS.items())
def test_the_sample_is_whole_and_balanced(split: str, per_class: int) -> None:
    data = FashionMNIST(split, download=False)
    assert torch.bincount(data.targets).tolist() == [per_class] * 10
    assert data.source.startswith("the embedded sample of 12,000 + 2,000 images")
    assert sum(PER_CLASS.values()) * 10 == 14_000


def test_the_sample_carries_its_licence() -> None:
    assert "Copyright (c) 2017 Zalando SE" in (sources.SAMPLE / "LICENSE").read_text()


@needs_real_data
@pytest.mark.parametrize(("split", "per_class"), PER_CLASS.items())
def test_the_sample_is_made_of_the_real_images(split: str, per_class: int) -> None:
    real, embedded = sources.named(REAL), sources.sample("")
    labels = read_idx(real.labels(split), LABELS)
    chosen = first_of_each_class(labels, per_class)
    assert np.array_equal(read_idx(embedded.labels(split), LABELS), labels[chosen])
    assert np.array_equal(read_idx(embedded.images(split), IMAGES), read_idx(real.images(split), IMAGES)[chosen])


@needs_real_data
def test_checksums_and_mean_are_those_of_the_real_data() -> None:
    source = sources.named(REAL)
    for name, digest in SHA256.items():
        with gzip.open(source.files[name]) as stream:
            assert hashlib.sha256(stream.read()).hexdigest() == digest
    pixels = FashionMNIST(root=REAL).inputs.view(-1)
    counts = torch.bincount(pixels.int(), minlength=256).double()
    levels = torch.arange(256).double() / 255
    mean = float((counts * levels).sum() / counts.sum())
    std = float((counts * (levels - mean) ** 2).sum() / counts.sum()) ** 0.5
    assert (round(mean, 4), round(std, 4)) == (MEAN, STD)


def test_make_sample_is_reproducible(
    tmp_path: Path, make_files: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PER_CLASS, "train", 2)
    monkeypatch.setitem(PER_CLASS, "test", 1)
    root = make_files(tmp_path / "full")
    for out in ("first", "second"):
        make_sample(root, tmp_path / out)
    for name in sources.NAMES:
        first, second = (tmp_path / out / f"{name}.gz" for out in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()
    small = FashionMNIST("train", root=tmp_path / "first")
    assert small.targets.tolist() == [i % 10 for i in range(20)]
    assert torch.equal(small.inputs, FashionMNIST("train", root=root).inputs[:20])
