"""How the tokens lie in a file: told by its size and its header, without numpy or torch."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from slurm_train.errors import DataError

DTYPES = {"uint8": 1, "uint16": 2, "int32": 4, "uint32": 4}
"""The types of a token in a file without a header -> bytes of each."""

_NPY = b"\x93NUMPY"
_REMEDY = "name a file that slurm_train.data.tokens.write_tokens or numpy.save wrote"


class TokenLayout(NamedTuple):
    """Where the tokens are.

    Attributes:
        path: the file.
        dtype: numpy's name of their type.
        offset: bytes before the first.
        count: their number.
    """

    path: Path
    dtype: str
    offset: int
    count: int

    @property
    def text(self) -> str:
        """One line for humans."""
        return f"{self.path} ({self.count:,} tokens, {self.dtype})"


def token_layout(path: Any, dtype: Any = "uint16") -> TokenLayout:
    """How the tokens lie in the user's file.

    Args:
        path: the file: tokens one after the other in this machine's byte order, or a one-dimensional array that
            numpy.save wrote (.npy).
        dtype: uint8, uint16, int32 or uint32; a .npy file tells its own.

    Raises:
        DataError: the file is missing, or is not what it should be; `dtype` is unknown.
    """
    key = "data.path" if path is None else f"data.path={path}"
    if path is None:
        raise DataError("no file is named", key, _REMEDY)
    file_path = Path(os.path.expanduser(str(path)))
    try:
        with open(file_path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file_path.suffix == ".npy":
                return _npy_layout(file, file_path, size, key)
    except OSError as error:
        raise DataError(f"cannot read it: {error.strerror}", key, _REMEDY) from None
    if dtype not in DTYPES:
        raise DataError("unknown type of tokens", f"data.dtype={dtype}", f"use {', '.join(DTYPES)}")
    if size % DTYPES[dtype]:
        raise DataError(f"{size:,} bytes are no whole number of {dtype} tokens", key, "set data.dtype")
    return TokenLayout(file_path, dtype, 0, size // DTYPES[dtype])


def check_ignore(ignore: Any) -> None:
    """Refuse what `ignore` cannot be.

    Raises:
        DataError: it is neither a whole number nor None.
    """
    if ignore is not None and type(ignore) is not int:
        raise DataError("must be a whole number or null", f"data.ignore={ignore}")


def _npy_layout(file: BinaryIO, path: Path, size: int, key: str) -> TokenLayout:
    """The layout that the header of a .npy file tells (numpy.lib.format)."""
    try:
        magic, major = file.read(6), file.read(2)[0]
        length = int.from_bytes(file.read(2 if major == 1 else 4), "little")
        header = ast.literal_eval(file.read(length).decode("utf-8" if major == 3 else "latin-1").strip())
        kind, shape = str(header["descr"]), tuple(header["shape"])
    except (ValueError, SyntaxError, LookupError, TypeError):
        magic, kind, shape = b"", "", ()
    if magic != _NPY:
        raise DataError("it is no .npy file, whatever its name", key, _REMEDY)
    integers = re.fullmatch(r"[<>|=][iu]([1248])", kind)
    if not integers or len(shape) != 1:
        raise DataError(f"it holds {kind} of shape {shape}, not a row of whole numbers", key, _REMEDY)
    offset, (count,) = file.tell(), shape
    if size != offset + count * int(integers[1]):
        raise DataError(f"it should hold {count:,} tokens, but is {size:,} bytes long", key, "write it again")
    return TokenLayout(path, kind, offset, count)
