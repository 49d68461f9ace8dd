"""Token ids from a large file, which is mapped and never read whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from slurm_train.data.sequences import cut
from slurm_train.data.token_layout import DTYPES, check_ignore, token_layout
from slurm_train.data.windows import TokenWindows
from slurm_train.errors import DataError


class TokenFile(TokenWindows):
    """Sequences of the tokens in a file.

    Args:
        split: "train", or "test" for the last sequences of the file.
        path: what `write_tokens` wrote, or a one-dimensional array that numpy.save wrote (.npy).
        length: tokens of a sequence.
        dtype: type of a token in the file: uint8, uint16, int32 or uint32; a .npy file tells its own.
        test: the part of the sequences that is held for test; 0 <= test < 1.
        ignore: targets of this value, such as padding, do not count. None: all count.

    Raises:
        DataError: the file is missing or is not what it should be, or has too few tokens; an argument cannot be.
    """

    def __init__(
        self,
        split: str = "train",
        path: str | os.PathLike[str] | None = None,
        length: int = 1024,
        dtype: str = "uint16",
        test: float = 0.05,
        ignore: int | None = None,
    ) -> None:
        check_ignore(ignore)
        layout = token_layout(path, dtype)
        first, last = cut(layout.count, length, test, layout.text).bounds(split)
        stream = np.memmap(layout.path, dtype=layout.dtype, mode="r", offset=layout.offset, shape=(layout.count,))
        super().__init__(stream, length, first, last, source=layout.text, ignore=ignore)

    @staticmethod
    def encode(text: str) -> list[int]:
        """The token ids in a text such as "1 5 7".

        Raises:
            DataError: it is no such text.
        """
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            remedy = "write numbers with spaces between, as in '1 5 7'"
            raise DataError(f"{text!r} is not token ids", remedy=remedy) from None

    @staticmethod
    def decode(ids: Iterable[int]) -> str:
        """Token ids as such a text."""
        return " ".join(str(int(token)) for token in ids)


def write_tokens(path: str | os.PathLike[str], documents: Iterable[Any], dtype: str = "uint16") -> int:
    """Write token ids to a file for TokenFile, one array after the other; the file appears when all are written.

    Args:
        path: the file; not .npy, which is for numpy.save. Its directory must be there.
        documents: integer arrays or sequences of any length, each with its end-of-text token if it should have one.
        dtype: type of a token in the file: uint8, uint16, int32 or uint32.

    Returns:
        the number of tokens.

    Raises:
        DataError: a token does not fit the type, or is no whole number; the name or the type cannot be.
    """
    target = Path(path)
    if target.suffix == ".npy":
        raise DataError(f"{target} would have no header of a .npy file", remedy="take another name, such as tokens.bin")
    if dtype not in DTYPES:
        raise DataError(f"unknown type of tokens {dtype}", remedy=f"use {', '.join(DTYPES)}")
    count = 0
    descriptor, name = tempfile.mkstemp(prefix=f"{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            for document in documents:
                tokens = _checked(np.asarray(document), dtype)
                file.write(tokens.tobytes())
                count += len(tokens)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return count


def _checked(tokens: np.ndarray, dtype: str) -> np.ndarray:
    """One document's tokens as `dtype`, flat."""
    if not tokens.size:
        return np.empty(0, dtype)
    if tokens.dtype.kind not in "iu":
        raise DataError(f"tokens are whole numbers, not {tokens.dtype}")
    limits = np.iinfo(dtype)
    low, high = tokens.min(), tokens.max()
    if low < limits.min or high > limits.max:
        wrong = low if low < limits.min else high
        raise DataError(f"the token {wrong} does not fit {dtype}", remedy="write them as uint32")
    return tokens.astype(dtype).ravel()
