"""Where the Fashion-MNIST files are. Prints nothing: what was found is told by `Source.text`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import DataError

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The four files, without `.gz`."""

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SAMPLE = Path(__file__).parent / "sample"
KEY = "data.root"

SAMPLE_TEXT = "the embedded sample of 12,000 + 2,000 images"
_HOW = "for all 70,000 install the Debian package dataset-fashion-mnist or set data.root to the four files' directory"


@dataclass(frozen=True)
class Source:
    """Where the four files are.

    Attributes:
        directory: the directory that holds them.
        files: file name without `.gz` -> path of the file, plain or gzip.
        text: one line for humans: which data this is, and why if it is the sample.
        key: the config key that named the directory; "" if no user did.
        is_sample: whether this is the embedded sample.
        why: why it is that, and how to get the full data; "" if it is not, or was named.
    """

    directory: Path
    files: Mapping[str, Path]
    text: str
    key: str = ""
    is_sample: bool = False
    why: str = ""

    def images(self, split: str) -> Path:
        """The images of split "train" or "test"."""
        return self.files[f"{_PREFIX[split]}-images-idx3-ubyte"]

    def labels(self, split: str) -> Path:
        """The labels of split "train" or "test"."""
        return self.files[f"{_PREFIX[split]}-labels-idx1-ubyte"]


_PREFIX = {"train": "train", "test": "t10k"}


def locate(root: str | os.PathLike[str] | None, download: bool, base_url: str | None = None) -> Source:
    """The files to use: those of `root`, of the Debian package, of the download cache, downloaded now, or the sample.

    Args:
        root: the directory that the user named, or None.
        download: whether they may be downloaded. Offline, the sample is used after at most about a second.
        base_url: where to download from; by default the official place.

    Raises:
        DataError: `root` is given and does not hold the four files.
    """
    source = find(root)
    if source is not None:
        return source
    if not download:
        return sample("the full data set was not found and data.download is false")
    cache = cache_directory()
    if cache is None:
        return sample("the full data set was not found and there is no home directory to download it to")
    try:
        # Late: the modules for the network take longer to import than a submission has to spare.
        from slurm_train.data import download as official

        official.download(cache, base_url or official.BASE_URL)
    except official.DownloadFailed as error:
        return sample(f"the full data set was not found and not downloaded: {error}")
    return Source(cache, _files(cache), f"{cache} (downloaded now)")


def find(root: str | os.PathLike[str] | None) -> Source | None:
    """The files that are there already, without downloading; None if only the sample is.

    Raises:
        DataError: `root` is given and does not hold the four files.
    """
    if root is not None:
        return named(root)
    for directory, origin in ((DEBIAN, "Debian package"), (cache_directory(), "downloaded before")):
        if directory is not None and len(files := _files(directory)) == len(NAMES):
            return Source(directory, files, f"{directory} ({origin})")
    return None


def settle(root: str | None, download: bool) -> tuple[str | None, str]:
    """Which directory a run uses from now on, so that a resume does not find other data, and a word on what was tried.

    Args:
        root: the directory that the user named; it stays.
        download: whether the files may be downloaded now.

    Returns:
        the directory, and why it is the sample if it is ("" if it is not).
    """
    if root is not None:
        return root, ""
    source = locate(None, download)
    return str(source.directory), source.why


def sample(reason: str) -> Source:
    """The sample in this package; `reason` says why not the full data set."""
    why = f"{reason}; {_HOW}"
    return Source(SAMPLE, _files(SAMPLE), f"{SAMPLE_TEXT} ({why})", is_sample=True, why=why)


def cache_directory() -> Path | None:
    """The download cache: below $XDG_CACHE_HOME, by default ~/.cache; None for a user without a home directory."""
    base = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    return base / "slurm_train" / "fashion-mnist" if base.is_absolute() else None


def named(root: str | os.PathLike[str]) -> Source:
    """The files in the directory that the user named.

    Raises:
        DataError: it does not hold the four files.
    """
    remedy = "name the directory that holds the four Fashion-MNIST idx files (.gz or not), or leave data.root out"
    directory = Path(os.path.expanduser(str(root)))
    if os.path.isfile(directory):
        raise DataError(f"{root} is a file, not a directory", KEY, remedy)
    try:
        os.listdir(directory)
    except FileNotFoundError:
        raise DataError(f"{root} does not exist", KEY, remedy) from None
    except OSError as error:
        raise DataError(f"cannot read the directory {root}: {error.strerror}", KEY, remedy) from None
    files = _files(directory)
    missing = [name for name in NAMES if name not in files]
    if missing:
        raise DataError(f"{root} lacks {', '.join(missing)} (.gz or not)", KEY, remedy)
    return Source(directory, files, _text(directory, str(root)), KEY, is_sample=directory == SAMPLE)


def _text(directory: Path, typed: str) -> str:
    """What is in a directory that was named, if it is one that this project knows."""
    if directory == SAMPLE:
        return SAMPLE_TEXT
    return f"{typed} (Debian package)" if directory == DEBIAN else typed


def _files(directory: Path) -> dict[str, Path]:
    """Those of the four files that are there; the plain file goes before its .gz."""
    found: dict[str, Path] = {}
    for name in NAMES:
        for candidate in (directory / name, directory / f"{name}.gz"):
            if os.path.exists(candidate):
                found[name] = candidate
                break
    return found
