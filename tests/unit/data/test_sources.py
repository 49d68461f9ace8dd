from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from slurm_train.data import download, sources
from slurm_train.data.facts import FASHION_MNIST, data_facts
from slurm_train.data.fashion_mnist import FashionMNIST
from slurm_train.data.make_sample import idx_bytes
from slurm_train.errors import DataError

OFFLINE = "http://127.0.0.1:1"


def test_order_of_places(tmp_path: Path, make_files: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources.find(None) is None
    assert sources.locate(None, download=True, base_url=OFFLINE).is_sample
    cache = make_files(tmp_path / "cache" / "slurm_train" / "fashion-mnist")
    assert sources.locate(None, download=True, base_url=OFFLINE).directory == cache
    monkeypatch.setattr(sources, "DEBIAN", make_files(tmp_path / "debian"))
    assert sources.locate(None, download=True).directory == tmp_path / "debian"
    root = make_files(tmp_path / "mine with ünicode")
    source = sources.locate(str(root), download=True)
    assert (source.directory, source.key, source.is_sample) == (root, "data.root", False)


def test_an_incomplete_cache_is_passed_over(tmp_path: Path, make_files: Callable[..., Path]) -> None:
    cache = make_files(tmp_path / "cache" / "slurm_train" / "fashion-mnist")
    (cache / "t10k-labels-idx1-ubyte.gz").unlink()
    assert sources.find(None) is None


def test_downloads_into_the_cache(
    tmp_path: Path, make_files: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "download", lambda directory, base_url: make_files(directory))
    source = sources.locate(None, download=True)
    assert source.directory == tmp_path / "cache" / "slurm_train" / "fashion-mnist" and len(source.files) == 4
    assert "downloaded now" in source.text


@pytest.mark.parametrize(("allowed", "reason"), [(False, "data.download is false"), (True, "cannot be reached")])
def test_the_sample_says_why_and_what_to_do(allowed: bool, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = sources.locate(None, allowed, OFFLINE).text
    assert text.startswith("the embedded sample of 12,000 + 2,000 images (the full data set was not found")
    assert reason in text and "data.root" in text and "\n" not in text
    assert capsys.readouterr() == ("", "")


def test_no_home_directory_means_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert sources.cache_directory() is None
    assert "no home directory" in sources.locate(None, download=True).text


@contextmanager
def unreadable(directory: Path) -> Iterator[None]:
    """The directory without read permission, for root too."""
    uid, directory_mode = os.geteuid(), directory.stat().st_mode
    directory.chmod(0)
    if uid == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(uid)
        directory.chmod(directory_mode)


def test_directories_that_will_not_do(tmp_path: Path, make_files: Callable[..., Path]) -> None:
    lacking = make_files(tmp_path / "lacking")
    (lacking / "train-labels-idx1-ubyte.gz").unlink()
    (tmp_path / "file").write_text("x")
    cases = {
        tmp_path / "gone": "does not exist",
        tmp_path / "file": "is a file, not a directory",
        tmp_path / "file" / "below": "cannot read the directory",
        lacking: "lacks train-labels-idx1-ubyte (.gz or not);",
    }
    for root, message in cases.items():
        for call in (lambda root: FashionMNIST(root=root), lambda root: data_facts(config(root=root))):
            with pytest.raises(DataError) as raised:
                call(str(root))
            line = str(raised.value)
            assert line.startswith("data.root: ") and str(root) in line and message in line and "\n" not in line


def test_directory_without_read_permission(tmp_path: Path, make_files: Callable[..., Path]) -> None:
    root = make_files(tmp_path / "locked")
    with (
        unreadable(root),
        pytest.raises(DataError, match=r"data.root: cannot read the directory .*: Permission denied"),
    ):
        sources.find(root)


def test_the_path_is_told_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"^data.root: my data/set does not exist; "):
        FashionMNIST(root="my data/set")
    with pytest.raises(DataError, match=r"^data.root: 3 does not exist; "):
        FashionMNIST(root=3)  # type: ignore[arg-type]


def config(**arguments: object) -> dict[str, object]:
    return {"_target_": FASHION_MNIST, "root": None, "download": True, **arguments}


def test_facts(tmp_path: Path, make_files: Callable[..., Path]) -> None:
    assert data_facts({"_target_": "mine.Data"}) is None and data_facts({}) is None
    downloads = data_facts(config())
    assert downloads is not None and downloads.downloads
    assert (downloads.train_samples, downloads.test_samples) == (60_000, 10_000) and "downloaded" in downloads.source
    embedded = data_facts(config(download=False))
    assert embedded is not None and not embedded.downloads
    assert (embedded.train_samples, embedded.test_samples, embedded.classes) == (12_000, 2_000, 10)
    named = data_facts(config(root=str(make_files(tmp_path / "named"))))
    assert named is not None and (named.train_samples, named.test_samples) == (60, 20)
    assert named.sample_shape == (1, 28, 28)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("train-labels-idx1-ubyte", np.zeros(59, np.uint8), "60 images but train-labels-idx1-ubyte.gz 59 labels"),
        ("train-images-idx3-ubyte", np.zeros((60, 32, 32), np.uint8), "32 x 32 pixels; 28 x 28 are expected"),
        ("train-images-idx3-ubyte", np.zeros(60, np.uint8), "holds labels; images are expected"),
    ],
)
def test_files_that_do_not_belong_together(
    tmp_path: Path, make_files: Callable[..., Path], name: str, values: np.ndarray, message: str
) -> None:
    root = make_files(tmp_path / "root")
    (root / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(values)))
    for call in (lambda: FashionMNIST(root=root), lambda: data_facts(config(root=str(root)))):
        with pytest.raises(DataError, match=f"^data.root: .*{message}"):
            call()


def test_what_is_settled_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DEBIAN", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root, why = sources.settle(None, download=False)
    assert root == str(sources.SAMPLE)
    assert why.startswith("the full data set was not found and data.download is false; for all 70,000 install")
    assert sources.settle(root, download=True) == (root, "")
    assert FashionMNIST(root=root).source == sources.SAMPLE_TEXT
    assert sources.settle("my data", download=True) == ("my data", "")
