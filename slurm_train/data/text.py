"""Text as a sequence of bytes: any file can be trained on, without a tokenizer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from slurm_train.data.corpus import SEPARATOR, Corpus, check_boundaries, find_corpus
from slurm_train.data.sequences import cut
from slurm_train.data.sources import cache_directory
from slurm_train.data.windows import TokenWindows

VOCABULARY = 256


class Bytes(TokenWindows):
    """Sequences of the bytes of text files, joined with a byte 0 between each two.

    Args:
        split: "train", or "test" for the last sequences of the joined files.
        path: a text file, or a directory with text files in it and below it. Default: the sources of the library that
            comes with this Python.
        files: pattern of the names of a directory's files, such as *.md. Default: all, but for hidden ones.
        length: bytes of a sequence.
        test: the part of the sequences that is held for test; 0 <= test < 1.
        boundaries: keep, or ignore: as a target, the first byte of a file does not count, for it cannot be foreseen.

    Raises:
        DataError: there are no such files, or too little text in them.
    """

    def __init__(
        self,
        split: str = "train",
        path: str | os.PathLike[str] | None = None,
        files: str | None = None,
        length: int = 256,
        test: float = 0.05,
        boundaries: str = "keep",
    ) -> None:
        check_boundaries(boundaries)
        corpus = find_corpus(path, files)
        first, last = cut(corpus.size, length, test, corpus.text).bounds(split)
        after = SEPARATOR if boundaries == "ignore" else None
        super().__init__(open_stream(corpus), length, first, last, source=corpus.text, ignore_after=after)

    @staticmethod
    def encode(text: str) -> list[int]:
        """The tokens of a text: its bytes in UTF-8."""
        return list(text.encode())

    @staticmethod
    def decode(ids: Iterable[int]) -> str:
        """The text of tokens; what is no UTF-8 becomes U+FFFD."""
        return bytes(ids).decode(errors="replace")


def open_stream(corpus: Corpus) -> np.ndarray:
    """The joined files, uint8: mapped from a file in the cache, so that all ranks of a host share the memory.

    The first to come writes it. Where there is no cache, or no room in it, the stream is read into memory.

    Raises:
        DataError: a file cannot be read.
    """
    downloads = cache_directory()
    if downloads is not None:
        cached = downloads.parent / "text" / f"{corpus.digest}.bytes"
        try:
            if not cached.is_file() or cached.stat().st_size != corpus.size:
                _write(corpus, cached)
            return np.memmap(cached, dtype=np.uint8, mode="r")
        except OSError:
            pass  # there is no room, or the directory is another user's
    return np.frombuffer(b"".join(corpus.pieces()), dtype=np.uint8)


def _write(corpus: Corpus, cached: Path) -> None:
    """Write the stream under another name first: nobody ever sees a part of it."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f"{cached.name}.", dir=cached.parent)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(corpus.pieces())
        os.replace(name, cached)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
